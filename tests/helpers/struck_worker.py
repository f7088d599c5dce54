"""Echo workers that stop themselves at a crash point once, forked from a process that has imported everything.

Run as a module it is that process: each line it reads is the environment of a worker to start, answered by its pid.
A worker's file `STRIKE` is read at SIGUSR1, and removed: it names the point at which the worker stops next, until
SIGCONT. Blocks are as large as those of a real model, and workers verify that what they read is what belongs there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import numpy as np

from services.common import entry_point
from services.worker import prefill_desk, remote_prefill
from services.worker.config import WorkerConfig
from services.worker.engine.fake_model_runner import FakeModelRunner, FakeScript
from services.worker.engine.kv_blocks import KVLayout
from services.worker.model_source import load_model
from services.worker.runtime.transfers import grpc_stream, nixl
from services.worker.wiring import WorkerApp, build

ROOT = Path(__file__).parents[2]
# Times that a block carries what the echo model keeps of it.
COPIES = 2_048


class Nursery:
    """The parent of the workers."""

    def __init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env={**kept, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._pids: list[int] = []

    def start(self, environment: Mapping[str, str]) -> int:
        """A worker's pid; it serves a moment later."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(dict(environment)) + "\n")
        self._process.stdin.flush()
        self._pids.append(int(self._process.stdout.readline()))
        return self._pids[-1]

    def stop(self) -> None:
        """Kill them all."""
        for pid in filter(is_alive, self._pids):
            os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()


def is_alive(pid: int) -> bool:
    """False once it was killed: nobody waits for these."""
    return Path(f"/proc/{pid}").exists()


class WideEcho(FakeModelRunner):
    """Its blocks are `COPIES` times as large as they need be; each copy must be like the others."""

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout("uint64", (COPIES, self.spec.block_size), 8)

    def export_block(self, block: int) -> bytes:
        return super().export_block(block) * COPIES

    def import_block(self, block: int, payload: bytes) -> None:
        copies = np.frombuffer(payload, dtype=np.uint64).reshape(COPIES, -1)
        if not (copies == copies[0]).all():
            raise ValueError("a block is torn")
        self._shadow[block] = copies[0]


def _stop_at(point: str, armed: list[str]) -> None:
    if point in armed:
        armed.clear()
        os.kill(os.getpid(), signal.SIGSTOP)


def _arm(file: Path) -> None:
    armed: list[str] = []

    def on_signal(*_: object) -> None:
        armed[:] = [file.read_text()]
        file.unlink()

    signal.signal(signal.SIGUSR1, on_signal)
    for module in (prefill_desk, remote_prefill, grpc_stream, nixl):
        mock.patch.object(module, "crash_point", lambda point: _stop_at(point, armed)).start()


async def _build(config: WorkerConfig, instance: str) -> WorkerApp:
    script = FakeScript(before_step=lambda _: time.sleep(config.echo_step_ms / 1e3), verify=True)
    loaded = load_model(config)
    runner = WideEcho(loaded.runner.spec, script=script)
    return build(config, model=dataclasses.replace(loaded, runner=runner), instance=instance)


def _work(environment: Mapping[str, str]) -> int:
    os.environ.update(environment)
    output = os.open(os.environ["STRIKE"] + ".log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = sys.argv[:1]
    _arm(Path(os.environ["STRIKE"]))
    return entry_point.main("worker", "An echo worker that stops at a crash point.", WorkerConfig, _build)


def _nurse() -> None:
    nixl.nixl_module()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(_work(json.loads(line)))
        print(pid, flush=True)


if __name__ == "__main__":
    _nurse()
