"""Requests with a grammar wait for its compile and nothing else does; cancels and failures meanwhile are not lost."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from services.common.grammar_source import GrammarError
from services.worker.engine.engine_config import InvalidRequestError
from services.worker.engine.request import EngineRequest, Grammar, GrammarKind, SamplingParams
from services.worker.engine_loop import LoopReport, Rejection
from services.worker.grammar_gate import GrammarGate
from services.worker.requests import Abort

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")


class Engine:
    """What reached the engine, in order."""

    def __init__(self) -> None:
        self.commands: list[EngineRequest | Abort] = []
        self.arrived = asyncio.Event()

    def check(self, request: EngineRequest) -> None:
        """Everything fits."""

    def submit(self, request: EngineRequest) -> None:
        self.commands.append(request)
        self.arrived.set()

    def abort(self, aborts: list[Abort]) -> None:
        self.commands += aborts


class Compiler:
    """Compiles when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self.error = error

    def compile(self, grammar: Grammar) -> object:
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        return ("compiled", grammar.text)


class Rig:
    def __init__(self, compiler: Compiler | None, **options: Any) -> None:
        self.engine = Engine()
        self.gate = GrammarGate(self.engine, compiler, **options)  # type: ignore[arg-type]
        self.rejections: list[Rejection] = []
        self.rejected = asyncio.Event()
        self.gate.on_report = self._on_report

    def _on_report(self, report: LoopReport) -> None:
        self.rejections += report.rejections
        self.rejected.set()


def request(request_id: str, grammar: Grammar | None = GRAMMAR) -> EngineRequest:
    sampling = SamplingParams(max_tokens=4, seed=1, grammar=grammar)
    return EngineRequest(request_id, 1, np.array([1], dtype=np.int32), sampling)


async def test_a_request_waits_for_its_grammar_and_others_pass_it() -> None:
    compiler = Compiler()
    rig = Rig(compiler)
    rig.gate.submit(request("guided"))
    rig.gate.submit(request("free", None))

    assert [each.request_id for each in rig.engine.commands] == ["free"]
    rig.engine.arrived.clear()
    compiler.go.set()
    await rig.engine.arrived.wait()

    _, guided = rig.engine.commands
    assert isinstance(guided, EngineRequest)
    assert guided.sampling.grammar == GRAMMAR
    assert guided.sampling.grammar.compiled == ("compiled", "a+")
    await rig.gate.close()


async def test_a_cancel_during_the_compile_follows_the_request_into_the_engine() -> None:
    compiler = Compiler()
    rig = Rig(compiler)
    rig.gate.submit(request("guided"))
    mine, other = Abort("guided", 1), Abort("other", 1)
    rig.gate.abort([mine, other])

    assert rig.engine.commands == [other]
    compiler.go.set()
    await rig.engine.arrived.wait()

    assert [type(each) for each in rig.engine.commands] == [Abort, EngineRequest, Abort]
    assert rig.engine.commands[-1] == mine
    rig.gate.abort([mine])
    assert rig.engine.commands[-2:] == [mine, mine]
    await rig.gate.close()


@pytest.mark.parametrize(
    ("error", "said"), [(GrammarError("it is too large"), "it is too large"), (OSError("/secret"), "could not be")]
)
async def test_a_grammar_that_fails_is_a_rejection_with_a_reason(error: Exception, said: str) -> None:
    compiler = Compiler(error)
    compiler.go.set()
    rig = Rig(compiler)
    rig.gate.submit(request("guided"))
    await rig.rejected.wait()

    (rejection,) = rig.rejections
    assert (rejection.request_id, rejection.epoch, rejection.reason) == ("guided", 1, "INVALID_REQUEST")
    assert said in rejection.detail
    assert "/secret" not in rejection.detail
    assert rig.engine.commands == []
    await rig.gate.close()


async def test_a_compile_that_takes_too_long_is_a_rejection() -> None:
    compiler = Compiler()
    rig = Rig(compiler, timeout_s=0.01)
    rig.gate.submit(request("guided"))
    await rig.rejected.wait()

    assert "longer than 0.01 s" in rig.rejections[0].detail
    assert rig.engine.commands == []
    compiler.go.set()
    await rig.gate.close()


async def test_a_model_without_structured_output_refuses_at_the_door() -> None:
    rig = Rig(None)
    rig.gate.check(request("free", None))

    with pytest.raises(InvalidRequestError, match="structured output"):
        rig.gate.check(request("guided"))
    await rig.gate.close()


async def test_closing_drops_what_is_held() -> None:
    compiler = Compiler()
    rig = Rig(compiler)
    rig.gate.submit(request("guided"))
    closing = asyncio.create_task(rig.gate.close())
    compiler.go.set()
    await closing

    assert rig.rejections == []
    assert rig.engine.commands == []
