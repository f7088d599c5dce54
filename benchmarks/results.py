"""How every benchmark keeps its results: JSON with commit, machine, load and configuration in `benchmarks/results`."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

RESULTS = Path(__file__).parent / "results"
_TICKS_MS = 1000 / os.sysconf("SC_CLK_TCK")


def save(
    benchmark: str, config: Mapping[str, Any], results: Sequence[Mapping[str, Any]], path: Path | None = None
) -> Path:
    """Write one report to `path`, or to `results/<benchmark>.json`; returns where it lies."""
    target = path if path is not None else RESULTS / f"{benchmark}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "benchmark": benchmark,
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "config": config,
        "results": results,
    }
    # What was not measured (NaN) is null.
    target.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return target


def commit() -> str:
    """The commit measured, with `+` when files differ from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """What was measured on, and how busy it was with other work (one-minute load average)."""
    return {
        "python": platform.python_version(),
        "arch": platform.machine(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def cpu_ms(pid: int, task: int | None = None) -> float:
    """Processor time so far of a process or of one of its threads, in milliseconds."""
    folder = Path(f"/proc/{pid}") if task is None else Path(f"/proc/{pid}/task/{task}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICKS_MS


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=True
    ).stdout.strip()
