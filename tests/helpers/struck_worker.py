"""An echo worker that a signal strikes once it comes to a crash point: STRIKE is `point:signal number`.

SIGUSR1 lets it be struck once more. It verifies that what it reads of its blocks is what belongs there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from unittest import mock

from services.common import entry_point
from services.worker import prefill_desk, remote_prefill
from services.worker.config import WorkerConfig
from services.worker.engine.fake_model_runner import FakeScript
from services.worker.wiring import WorkerApp, build
from tests.helpers.worker import scripted_echo

MODULE = "tests.helpers.struck_worker"


def _arm(strike: str) -> None:
    point, _, number = strike.partition(":")
    struck: list[str] = []

    def crash_point(name: str) -> None:
        if name == point and not struck:
            struck.append(name)
            os.kill(os.getpid(), int(number))

    signal.signal(signal.SIGUSR1, lambda *_: struck.clear())
    for module in (prefill_desk, remote_prefill):
        mock.patch.object(module, "crash_point", crash_point).start()


async def _build(config: WorkerConfig, instance: str) -> WorkerApp:
    script = FakeScript(before_step=lambda _: time.sleep(config.echo_step_ms / 1e3), verify=True)
    return build(config, model=scripted_echo(config, script), instance=instance)


if __name__ == "__main__":
    _arm(os.environ.get("STRIKE", ""))
    sys.exit(entry_point.main("worker", "An echo worker that a signal strikes.", WorkerConfig, _build))
