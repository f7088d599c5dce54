"""Rows a second and peak memory of a whole export: usage service, gRPC, `millrace usage export` into a file.

By number of rows and by format, on both databases; memory is that of the service's and of the command's process. Flat
memory means that the peaks do not follow the rows. Prints a table and writes `benchmarks/results/export.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.ledger import databases
from benchmarks.ledger_rows import load
from benchmarks.results import machine, save
from services.usage.store import open_store

TOKEN = "root-token-of-the-benchmark"
SAMPLE_S = 0.05
START_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One export; peaks are resident memory in MiB."""

    database: str
    format: str
    rows: int
    rows_per_s: int
    service_mib: int
    command_mib: int
    file_mib: int
    load: float


@contextlib.contextmanager
def service(database_url: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Address and process id of a usage service on this database. It needs no Redis to export."""
    address = f"unix:{folder}/usage.sock"
    environment = os.environ | {
        "MILLRACE_DATABASE_URL": database_url,
        "MILLRACE_DATA_DIR": str(folder / "data"),
        "MILLRACE_GRPC_LISTEN": address,
        "MILLRACE_ADMIN_TOKEN": TOKEN,
        "MILLRACE_REDIS_URL": f"unix://{folder}/no-redis.sock",
    }
    argv = [sys.executable, "-m", "services.usage"]
    process = subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(folder / "usage.sock"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the usage service did not start")
            time.sleep(SAMPLE_S)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


def export(address: str, service_pid: int, format: str, output: Path) -> tuple[float, int, int]:
    """Seconds, and peak memory in MiB of service and command, of one export into `output`."""
    argv = [sys.executable, "-m", "cli.main", "usage", "export", "--format", format, "--output", str(output)]
    environment = os.environ | {"MILLRACE_USAGE_ADDRESS": address, "MILLRACE_ADMIN_TOKEN": TOKEN}
    peaks = [0, 0]
    start = time.perf_counter()
    with subprocess.Popen(argv, env=environment) as process:
        while process.poll() is None:
            for index, pid in enumerate((service_pid, process.pid)):
                peaks[index] = max(peaks[index], resident_mib(pid))
            time.sleep(SAMPLE_S)
    if process.returncode != 0:
        raise SystemExit("the export failed")
    return time.perf_counter() - start, peaks[0], peaks[1]


def resident_mib(pid: int) -> int:
    """Resident memory of a process, 0 once it is gone."""
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20
    return 0


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write instead of benchmarks/results/export.json")
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--formats", nargs="+", default=["csv", "parquet"])
    arguments = parser.parse_args()
    results = []
    print(" ".join(f"{field.name:>12}" for field in dataclasses.fields(Result)))
    for kind in arguments.databases:
        with databases(kind) as new_url, tempfile.TemporaryDirectory() as name:
            folder, url = Path(name), new_url()
            for rows in sorted(arguments.rows):
                store = open_store(url)
                load(store, rows)
                store.close()
                for format in arguments.formats:
                    output = folder / f"usage.{format}"
                    with service(url, folder) as (address, pid):
                        seconds, ours, theirs = export(address, pid, format, output)
                    size = output.stat().st_size >> 20
                    busy = machine()["load"]
                    results.append(Result(kind, format, rows, round(rows / seconds), ours, theirs, size, busy))
                    print(" ".join(f"{value!s:>12}" for value in dataclasses.astuple(results[-1])), flush=True)
    print(save("export", {"page_rows": 500}, [dataclasses.asdict(each) for each in results], arguments.json))


if __name__ == "__main__":
    main()
