"""Stream one answer: `python stream.py 127.0.0.1:8001 <key> smollm2-135m "Once upon a time"`."""

from __future__ import annotations

import sys

from millrace_client import Client, MillraceError, Options


def main(target: str, key: str, model: str, prompt: str) -> int:
    """Print the answer as it comes, then what it used."""
    try:
        with (
            Client(target, key) as client,
            client.stream(model, prompt, Options(max_tokens=64), timeout_s=60) as stream,
        ):
            for delta in stream:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
            sys.stdout.write(f"\n{stream.request_id}: {stream.usage}\n")
    except MillraceError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:5]))
