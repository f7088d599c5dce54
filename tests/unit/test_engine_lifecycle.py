"""The life of a request in the engine: arrival, chunks, tokens, every way to end, abort in every state."""

from __future__ import annotations

import dataclasses

import pytest

from services.worker.engine.engine_config import (
    DuplicateRequestError,
    InvalidRequestError,
    NeverFitsError,
    TenantLimits,
)
from services.worker.engine.outputs import SchedulerOutput
from services.worker.engine.request import Choice, FinishReason, RequestKey, SamplingParams
from tests.helpers.engine import (
    EngineRig,
    FakeScript,
    assert_engine_empty,
    echoes,
    make_request,
    make_spec,
    prompt,
    tokens,
)


def test_one_request_gets_its_echo_sequence_and_ends_by_length() -> None:
    rig = EngineRig()
    rig.add(make_request("a", prompt(10), max_tokens=20))

    rig.run()

    assert rig.token_ids("a") == echoes("a", 20)
    assert rig.finish("a") is FinishReason.LENGTH
    assert_engine_empty(rig)
