"""A computed model answers with the same tokens whether its prompts come from a peer, over either transport, or not."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest
from millrace.common.v1 import admission_pb2, common_pb2

from services.worker.config import WorkerConfig, WorkerRole
from services.worker.model_source import LoadedModel, load_model
from services.worker.runtime.torch_model_runner import TorchModelRunner
from services.worker.runtime.transfers.nixl import nixl_module
from services.worker.service import ServedModel
from tests.helpers.grammar_model import closing_bias, grammar_compiler, tiny_model
from tests.helpers.model import CONTEXT, ModelRig
from tests.helpers.peers import fallbacks, pair_of_workers, peer_config
from tests.helpers.waiting import WAIT_S, until
from tests.helpers.worker import GatewayClient, echo_config, entry, running_worker

pytestmark = pytest.mark.model
KINDS = ("greedy", "seeded", "chunked", "cached", "guided", "choices")
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 150}, "role": {"enum": ["advice", None, 7]}},
    "required": ["age", "role"],
    "additionalProperties": False,
}
# As many at once as the peer has room for.
WAVE = 6
# On a busy machine a peer may be silent for long: that is not what is compared here.
ROOM = {"max_model_len": CONTEXT, "num_blocks": 2_048, "kv_lease_ms": round(WAIT_S * 1_000)}
Answers = dict[str, dict[int, list[int]]]


def computed_model(config: WorkerConfig) -> LoadedModel:
    """The tiny transformer, served under the name `echo`."""
    checkpoint, _ = tiny_model()
    echo = load_model(config)
    runner = ModelRig(model=tiny_model(), num_blocks=echo.runner.spec.num_blocks).runner
    card = type(echo.served.card)()
    card.CopyFrom(echo.served.card)
    card.vocab_size = runner.spec.vocab_size
    card.eos_token_ids[:] = sorted(checkpoint.tokenizer.eos_token_ids)
    card.structured_output = True
    return LoadedModel(runner, ServedModel(card, b""), echo.budget_text, grammars=grammar_compiler())


def make_requests(count: int, seed: int) -> list[admission_pb2.AdmissionEntry]:
    """Of each kind as many; `cached` ones begin as an earlier one does."""
    rng = random.Random(seed)
    made: list[admission_pb2.AdmissionEntry] = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        length = rng.randint(150, 400) if kind == "chunked" else rng.randint(33, 110)
        prompt = [rng.randrange(100, 40_000) for _ in range(length)]
        if kind == "cached":
            earlier = list(made[rng.randrange(number)].token_ids)
            prompt = earlier[: rng.randint(len(earlier) // 2, len(earlier))] + prompt
        work = entry(f"{kind}-{number}", prompt=prompt, max_tokens=rng.randint(8, 20), seed=rng.randrange(1 << 30))
        sampling = work.sampling
        sampling.choice_count = 2 if kind == "choices" else 1
        sampling.temperature = 0.0 if kind in ("greedy", "chunked") else 0.9
        if kind == "seeded":
            sampling.top_p, sampling.frequency_penalty = 0.9, 0.3
        if kind == "guided":
            sampling.max_token_count = 60
            sampling.grammar.kind, sampling.grammar.text = common_pb2.GRAMMAR_KIND_JSON_SCHEMA, json.dumps(SCHEMA)
            for token_id, bias in closing_bias(6.0):
                sampling.logit_bias.add(token_id=token_id, bias=bias)
        made.append(work)
    return made


def taken(gateway: GatewayClient, requests: Sequence[admission_pb2.AdmissionEntry]) -> Answers:
    assert [gateway.of(work.request_id).failed for work in requests] == [None] * len(requests)
    return {work.request_id: gateway.of(work.request_id).tokens for work in requests}


async def in_waves(
    gateway: GatewayClient,
    requests: Sequence[admission_pb2.AdmissionEntry],
    submit: Callable[[admission_pb2.AdmissionEntry], Awaitable[object]],
) -> None:
    """Submit `WAVE` at a time, each wave once the one before it has been answered, and tell how far it is."""
    for first in range(0, len(requests), WAVE):
        wave = requests[first : first + WAVE]
        for work in wave:
            await submit(work)
        await gateway.finished(*(work.request_id for work in wave))
        if (first // WAVE + 1) % 10 == 0:
            print(f"{first + len(wave)} of {len(requests)} answered", flush=True)


async def aggregated(requests: Sequence[admission_pb2.AdmissionEntry]) -> Answers:
    """What one worker says, with no peer and prompts in larger chunks."""
    config = echo_config(**ROOM)
    async with running_worker(config=config, model=computed_model(config)) as rig:
        gateway = await rig.gateway()
        await until(lambda: rig.app.parts.table.is_attached("gateway-1"))
        await in_waves(gateway, requests, gateway.submit)
        await gateway.close()
    return taken(gateway, requests)


async def disaggregated(requests: Sequence[admission_pb2.AdmissionEntry], transport: str) -> Answers:
    """What the decoding worker says, whose prompts come from its peer, all of them."""
    prefill, decode = (
        peer_config(role, kv_transfer=transport, **ROOM) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
    )
    async with pair_of_workers(prefill=prefill, decode=decode, model=computed_model) as pair:
        canary = pair.decode_stats().prefill_token_total
        await in_waves(pair.gateway, requests, pair.submit)
        await pair.assert_nothing_is_held()
        assert fallbacks(pair.decode) == {}
        # Of each prompt at most the last block and what a cached prefix leaves of one is computed here.
        assert pair.decode_stats().prefill_token_total - canary <= 16 * 2 * len(requests)
        assert sum(pair.gateway.of(work.request_id).finishes[0].usage.cached_token_count for work in requests) > 0
        return taken(pair.gateway, requests)


async def test_tokens_are_those_of_an_aggregated_worker() -> None:
    requests = make_requests(2 * len(KINDS), seed=12)

    assert await disaggregated(requests, "grpc") == await aggregated(requests)


@pytest.mark.fault
@pytest.mark.timeout(900)
async def test_three_hundred_answers_are_the_same_by_either_transport() -> None:
    requests = make_requests(300, seed=300)
    expected = await aggregated(requests)

    for transport in ("grpc", "nixl") if nixl_module() is not None else ("grpc",):
        told = await disaggregated(requests, transport)
        assert [name for name in expected if told[name] != expected[name]] == []
        print(f"{len(told)} of {len(expected)} the same over {transport}", flush=True)


async def test_other_keys_and_values_give_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(2 * len(KINDS), seed=1)
    expected = await aggregated(requests)
    whole = TorchModelRunner.export_block

    def negated(runner: TorchModelRunner, block: int) -> bytes:
        return (-np.frombuffer(whole(runner, block), dtype=np.float32)).tobytes()

    monkeypatch.setattr(TorchModelRunner, "export_block", negated)
    told = await disaggregated(requests, "grpc")

    # A grammar leaves little choice.
    assert {name for name in told if told[name] == expected[name]} <= {"guided-4", "guided-10"}
