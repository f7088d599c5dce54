"""Rows a second and peak memory of a whole export: usage service, gRPC, `millrace usage export` into a file.

By number of rows and by format, on both databases; memory is that of the service's and of the command's process. Flat
memory means that the peaks do not follow the rows; while an export runs, it is told every few seconds what both hold.
Prints a table and writes `benchmarks/results/export.json`.
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
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.ledger_databases import databases
from benchmarks.ledger_rows import load
from benchmarks.results import cpu_ms, machine, save
from services.usage.exports import PAGE_ROWS
from services.usage.ledger import last_row_id
from services.usage.store import open_store

TOKEN = "root-token-of-the-benchmark"
SAMPLE_S = 0.05
TOLD_EVERY_S = 10.0
START_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One export; peaks are resident memory in MiB, processor time is that of a row in microseconds."""

    database: str
    format: str
    rows: int
    rows_per_s: int
    service_mib: int
    command_mib: int
    file_mib: int
    service_cpu_us: float
    command_cpu_us: float
    load: float


@dataclasses.dataclass(slots=True)
class Watched:
    """What one process took: peak of its resident memory in MiB, processor time in milliseconds."""

    pid: int
    peak_mib: int = 0
    cpu_ms: float = 0.0

    def look(self) -> None:
        """While the process lives."""
        with contextlib.suppress(OSError):
            self.peak_mib = max(self.peak_mib, resident_mib(self.pid))
            self.cpu_ms = cpu_ms(self.pid)


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


def export(address: str, service_pid: int, format: str, output: Path) -> tuple[float, Watched, Watched]:
    """Seconds, and what service and command took, of one export into `output`."""
    argv = [sys.executable, "-m", "cli.main", "usage", "export", "--format", format, "--output", str(output)]
    environment = os.environ | {"MILLRACE_USAGE_ADDRESS": address, "MILLRACE_ADMIN_TOKEN": TOKEN}
    before_ms = cpu_ms(service_pid)
    start = time.perf_counter()
    told = start
    with subprocess.Popen(argv, env=environment) as process:
        service, command = Watched(service_pid), Watched(process.pid)
        while process.poll() is None:
            service.look()
            command.look()
            if time.perf_counter() > told + TOLD_EVERY_S:
                told = time.perf_counter()
                _say(told - start, service, command, output)
            time.sleep(SAMPLE_S)
    if process.returncode != 0:
        raise SystemExit("the export failed")
    service.cpu_ms -= before_ms
    return time.perf_counter() - start, service, command


def _say(spent_s: float, service: Watched, command: Watched, output: Path) -> None:
    partial = output.with_name(f".{output.name}.partial")
    size = partial.stat().st_size >> 20 if partial.exists() else 0
    held = f"service {resident_mib(service.pid)} MiB, command {resident_mib(command.pid)} MiB"
    print(f"{spent_s:.0f} s: {size} MiB written, {held}", file=sys.stderr, flush=True)


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
    parser.add_argument("--keep", type=Path, help="folder in which filled databases stay for the next run")
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--formats", nargs="+", default=["csv", "parquet"])
    arguments = parser.parse_args()
    results = []
    print(" ".join(f"{field.name:>14}" for field in dataclasses.fields(Result)))
    for kind in arguments.databases:
        with databases(kind, arguments.keep) as url_of:
            for rows in sorted(arguments.rows):
                for result in _measure(kind, url_of(f"rows_{rows}"), rows, arguments.formats):
                    results.append(result)
                    print(" ".join(f"{value!s:>14}" for value in dataclasses.astuple(result)), flush=True)
    print(save("export", {"page_rows": PAGE_ROWS}, [dataclasses.asdict(each) for each in results], arguments.json))


def _measure(kind: str, url: str, rows: int, formats: Sequence[str]) -> Iterator[Result]:
    store = open_store(url)
    load(store, rows)
    # More than asked for, where the ledger's benchmark has added to them.
    rows = store.read_sync(last_row_id)
    store.close()
    for format in formats:
        with tempfile.TemporaryDirectory() as name:
            output = Path(name) / f"usage.{format}"
            with service(url, Path(name)) as (address, pid):
                seconds, ours, theirs = export(address, pid, format, output)
            cpu_us = [round(each.cpu_ms * 1000 / rows, 1) for each in (ours, theirs)]
            size, busy = output.stat().st_size >> 20, machine()["load"]
            rate = round(rows / seconds)
            yield Result(kind, format, rows, rate, ours.peak_mib, theirs.peak_mib, size, cpu_us[0], cpu_us[1], busy)


if __name__ == "__main__":
    main()
