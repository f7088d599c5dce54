"""Holds requests with a grammar back until it is compiled, off the engine's thread; everything else passes at once.

Stands between the hub and the engine loop, on the event loop's thread. What is cancelled meanwhile is cancelled: its
aborts follow it into the engine. Owns the compile threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import structlog

from services.common.grammar_source import GrammarError
from services.worker.engine.engine_config import InvalidRequestError
from services.worker.engine.request import EngineRequest, Grammar
from services.worker.engine_loop import EngineLoop, LoopReport, Rejection
from services.worker.requests import Abort

COMPILE_TIMEOUT_S = 2.0
COMPILE_THREADS = 2


class GrammarCompiler(Protocol):
    """Makes a grammar ready to run."""

    def compile(self, grammar: Grammar) -> object:
        """Blocks. Raises GrammarError."""
        ...


class GrammarGate:
    """The engine as the hub sees it. `compiler` None: a model without structured output."""

    def __init__(
        self, engine: EngineLoop, compiler: GrammarCompiler | None, *, timeout_s: float = COMPILE_TIMEOUT_S
    ) -> None:
        self._engine = engine
        self._compiler = compiler
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._held: dict[tuple[str, int], list[Abort]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_report: Callable[[LoopReport], None] = lambda report: None

    def check(self, request: EngineRequest) -> None:
        """Raise EngineError for a request that could never run here."""
        if request.sampling.grammar is not None and self._compiler is None:
            raise InvalidRequestError("this model has no structured output")
        self._engine.check(request)

    def submit(self, request: EngineRequest) -> None:
        """Hand over to the engine, at once or when the grammar is compiled; a grammar that fails is a Rejection."""
        grammar = request.sampling.grammar
        if grammar is None or self._compiler is None:
            self._engine.submit(request)
            return
        self._held[request.request_id, request.epoch] = []
        task = asyncio.create_task(self._compile(self._compiler, request, grammar))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abort(self, aborts: Iterable[Abort]) -> None:
        """Stop choices, also of requests that are held here."""
        passed: list[Abort] = []
        for abort in aborts:
            self._held.get((abort.request_id, abort.epoch), passed).append(abort)
        if passed:
            self._engine.abort(passed)

    async def close(self) -> None:
        """Drop what is held. Compiles that still run end by their own limits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _compile(self, compiler: GrammarCompiler, request: EngineRequest, grammar: Grammar) -> None:
        key = (request.request_id, request.epoch)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                compiled = await loop.run_in_executor(self._pool, compiler.compile, grammar)
        except TimeoutError:
            self._reject(request, f"The grammar takes longer than {self._timeout_s:g} s to compile.")
        except GrammarError as error:
            self._reject(request, f"Structured output is not possible: {error}.")
        except Exception as error:  # whatever it is, it is this request's alone
            structlog.get_logger().error("grammar_failed", error=type(error).__name__, exc_info=error)
            self._reject(request, "The grammar could not be compiled.")
        else:
            ready = dataclasses.replace(grammar, compiled=compiled)
            sampling = dataclasses.replace(request.sampling, grammar=ready)
            self._engine.submit(dataclasses.replace(request, sampling=sampling))
            aborts = self._held[key]
            if aborts:
                self._engine.abort(aborts)
        finally:
            del self._held[key]

    def _reject(self, request: EngineRequest, detail: str) -> None:
        rejection = Rejection(request.request_id, request.epoch, "INVALID_REQUEST", detail)
        self.on_report(LoopReport([], [rejection], None, [], False))
