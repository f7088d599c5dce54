"""The engine: takes requests, runs steps, says what happened to each choice.

Owns scheduler, cache manager and the stop rules; decides nothing about text, tenants' money or the network.
Called by the worker's engine loop on one thread; every call but `step` returns at once.
Charter: a new feature is a new file and at most one call here.
"""

from __future__ import annotations

from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.outputs import EngineOutput, EngineStats, KVEvents
from services.worker.engine.request import EngineRequest


class Engine:
    """One model runner's scheduler, cache and stop rules. Not thread-safe: one thread owns it."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        """Raises ValueError when the settings cannot work with the runner's pool."""
        config.validate(num_blocks=runner.spec.num_blocks)
        self._runner = runner
        self._config = config

    def add_request(self, request: EngineRequest, *, now: float) -> None:
        """Queue every choice of `request`. Each ends with exactly one EngineOutput that has a `finish_reason`.

        `now` is on the clock of `request.deadline`. Raises InvalidRequestError, NeverFitsError or
        DuplicateRequestError, and then has changed nothing.
        """
        raise NotImplementedError

    def abort(self, request_id: str, *, epoch: int | None = None, choice: int | None = None) -> int:
        """Stop choices of a request (of this epoch, of this choice; None means all) and free their blocks at once.

        Returns how many were stopped; each ends as CANCELLED in the next step's outputs. Unknown ids return 0.
        """
        raise NotImplementedError

    def step(self, now: float) -> list[EngineOutput]:
        """Schedule, compute and account one step; blocks for as long as the runner computes.

        Returns at most one output a choice that got tokens, started or ended. Raises what the runner raises for the
        device as a whole; then call `fail_all`.
        """
        raise NotImplementedError

    def fail_all(self, error: str) -> list[EngineOutput]:
        """End every choice with ERROR and free everything; the engine can go on or be thrown away."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """True while a choice is unfinished or an output is still to be handed out by `step`."""
        raise NotImplementedError

    def stats(self, now: float) -> EngineStats:
        """Counts as of the last step."""
        raise NotImplementedError

    def take_kv_events(self) -> KVEvents:
        """Changes of the set of hittable blocks since the last call; bounded, a snapshot after an overflow."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Raise AssertionError when block, slot or queue accounting is off. When idle also that nothing is held."""
        raise NotImplementedError
