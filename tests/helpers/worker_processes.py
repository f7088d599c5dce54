"""Echo workers as processes of their own, to be killed and frozen; `DYING` ones end with code 137 at one prompt.

Run as a module it is such a dying worker.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from services.common import entry_point
from services.common.admission_store import AdmissionStore
from services.worker.config import WorkerConfig
from services.worker.engine.fake_model_runner import FakeModelRunner, FakeScript
from services.worker.model_source import LoadedModel, load_model
from services.worker.wiring import WorkerApp, build

ROOT = Path(__file__).parents[2]
DYING = "tests.helpers.worker_processes"
DEADLY_PROMPT = (1, 2, 3)


class WorkerProcesses:
    """Workers found again by their address; a name may start again once its process has ended."""

    def __init__(self, redis_url: str, folder: Path, *, module: str = "services.worker", step_ms: int = 5) -> None:
        self._redis_url = redis_url
        self._folder = folder
        self._module = module
        self._step_ms = step_ms
        self._by_address: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, *, engine: str = "max_model_len=2048,num_blocks=2048", env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """`env` is added to the worker's environment."""
        address = f"unix:{self._folder}/{name}"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")}
        settings = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}",
            "MILLRACE_MODEL": "echo",
            "MILLRACE_ECHO_STEP_MS": str(self._step_ms),
            "MILLRACE_REDIS_URL": self._redis_url,
            "MILLRACE_GRPC_LISTEN": address,
            "MILLRACE_ENGINE": engine,
        }
        process = self._by_address[address] = subprocess.Popen(
            [sys.executable, "-m", self._module],
            cwd=ROOT,
            env={**kept, **settings, **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return process

    async def of(self, store: AdmissionStore, instance: str) -> subprocess.Popen[bytes]:
        """The process of a registered worker."""
        records = {record.instance: record for record in await store.list_workers()}
        return self._by_address[records[instance].address]

    def stop(self) -> None:
        for process in self._by_address.values():
            process.kill()
            process.wait()


async def _build(config: WorkerConfig, instance: str) -> WorkerApp:
    loaded = load_model(config)
    script = FakeScript(
        before_step=lambda _: time.sleep(config.echo_step_ms / 1e3),
        magic_prompt=DEADLY_PROMPT,
        on_magic=lambda: os._exit(137),
    )
    model = LoadedModel(FakeModelRunner(loaded.runner.spec, script=script), loaded.served, loaded.budget_text)
    return build(config, model=model, instance=instance)


if __name__ == "__main__":
    sys.exit(entry_point.main("worker", "An echo worker that dies of one prompt.", WorkerConfig, _build))
