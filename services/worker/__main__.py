"""Entry point of the worker process: `python -m services.worker [--print-config]`."""

from __future__ import annotations

import asyncio
import sys

from services.common import entry_point
from services.worker.config import WorkerConfig
from services.worker.model_source import load_model
from services.worker.wiring import WorkerApp, build


async def _build(config: WorkerConfig, instance: str) -> WorkerApp:
    """Loads the model first, off the event loop, so that a signal is heard meanwhile; prints the memory budget."""
    model = await asyncio.to_thread(load_model, config)
    sys.stdout.write(f"{model.budget_text.rstrip()}\n")
    sys.stdout.flush()
    return build(config, model=model, instance=instance)


if __name__ == "__main__":
    sys.exit(entry_point.main("worker", "A Millrace worker: one model, one engine.", WorkerConfig, _build))
