"""Container health check: asks one local URL, exits 0 when it answers 200 and 1 otherwise. Imports nothing heavy."""

import http.client
import sys


def main(address: str, path: str) -> int:
    """`address` is host:port; gives up after 4 s."""
    connection = http.client.HTTPConnection(address, timeout=4)
    try:
        connection.request("GET", path)
        return 0 if connection.getresponse().status == http.HTTPStatus.OK else 1
    except OSError:
        return 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
