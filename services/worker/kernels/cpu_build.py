"""Compiles the CPU kernels once for this machine's instruction set and keeps the result by content.

Owns the cache folder's names. Safe for two processes at once: each compiles beside its target and renames.
A cached file is loaded only when its name holds the hash of exactly these sources, flags and compiler.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("cpu")
MAIN_SOURCE = "millrace_cpu.cpp"
COMPILE_TIMEOUT_S = 300
# Reassociated integer sums keep every product alive at once, and spill: half the speed of the eight-bit tiles.
_REASSOCIATION = "-fno-tree-reassoc"
_BASE_FLAGS = (
    *("-std=c++20", "-O3", "-ffp-contract=off", _REASSOCIATION),
    *("-fPIC", "-shared", "-w", "-pthread", "-march=x86-64-v3"),
)
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})


class KernelUnavailableError(Exception):
    """No compiled kernels here; the message says why in one sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class InstructionSet:
    """A level that the kernels are written for."""

    name: str
    flags: tuple[str, ...]


AVX2 = InstructionSet("avx2", ())
AVX512_VNNI = InstructionSet("avx512vnni", ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"))


def instruction_sets() -> tuple[InstructionSet, ...]:
    """Levels this CPU runs, best first; empty when it runs none. Reads /proc/cpuinfo."""
    if platform.machine() != "x86_64":
        return ()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    features = frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))
    if not features >= _AVX2:
        return ()
    return (AVX512_VNNI, AVX2) if features >= _AVX512 else (AVX2,)


def build(level: InstructionSet, cache_dir: Path) -> Path:
    """The shared library for `level`, compiled unless cached; blocks for seconds. Raises KernelUnavailableError."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    sources = sorted(SOURCES.iterdir())
    flags = (*_BASE_FLAGS, *level.flags)
    digest = hashlib.sha256()
    for part in (_version(compiler) if compiler else "none", *flags):
        digest.update(part.encode() + b"\0")
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    target = cache_dir / f"millrace_cpu-{level.name}-{digest.hexdigest()[:32]}.so"
    if _trusted(target):
        return target
    if compiler is None:
        raise KernelUnavailableError("no C++ compiler (g++ or clang++) is on the path")
    _compile(compiler, flags, target)
    return target


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix="build-", suffix=".so")
    except OSError as error:
        raise KernelUnavailableError(f"the kernel cache {target.parent} is not writable: {error.strerror}") from None
    os.close(descriptor)
    unfinished = Path(name)
    try:
        done = subprocess.run(
            [compiler, *flags, str(SOURCES / MAIN_SOURCE), "-o", name],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            raise KernelUnavailableError(f"{Path(compiler).name} could not compile the kernels: {first[:300]}")
        unfinished.chmod(0o700)
        unfinished.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailableError(f"compiling the kernels failed: {type(error).__name__}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _trusted(path: Path) -> bool:
    """A cached library is code: it must be ours and writable by nobody else."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, errors="replace", check=False)
    return done.stdout.splitlines()[0] if done.stdout else compiler
