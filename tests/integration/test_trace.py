"""One trace per request over HTTP → admission → claim → submit → prefill → decode → usage, and no content in it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.helpers.four_services import KEY, four_services
from tests.helpers.redis import RedisProcess
from tests.helpers.waiting import until

NAMES = {
    "gateway.request",
    "admission.enqueue",
    "router.claim",
    "router.submit",
    "worker.prefill",
    "worker.decode",
    "usage.insert",
}
CANARY = "zebra-canary-4711"


async def run_requests(redis: RedisProcess, folder: Path, count: int, spans: InMemorySpanExporter) -> list[str]:
    body = {"model": "echo", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 6, "user": "u"}
    async with four_services(redis.url, folder) as client:

        async def one() -> str:
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == httpx.codes.OK, response.text
            return response.headers["x-request-id"]

        ids = await asyncio.gather(*(one() for _ in range(count)))
        # The span of an insert ends right after its commit, the others may end meanwhile.
        await until(lambda: all(named(spans)[name] >= count for name in NAMES))
    return ids


def named(spans: InMemorySpanExporter) -> Counter[str]:
    """How many spans of each station have ended."""
    return Counter(span.name for span in spans.get_finished_spans() if span.name in NAMES)


def tree_of(spans: list[ReadableSpan], trace_id: int) -> dict[str, ReadableSpan]:
    return {s.name: s for s in spans if s.context is not None and s.context.trace_id == trace_id}


async def test_each_request_is_one_trace_with_every_station_and_no_orphan(
    spans: InMemorySpanExporter, redis_server: RedisProcess, tmp_path: Path
) -> None:
    ids = await run_requests(redis_server, tmp_path, 10, spans)

    finished = list(spans.get_finished_spans())
    roots = [s for s in finished if s.name == "gateway.request"]
    assert sorted(s.attributes["millrace.request_id"] for s in roots if s.attributes) == sorted(ids)
    assert len({s.context.trace_id for s in roots if s.context}) == len(ids)
    for root in roots:
        assert root.context is not None
        tree = tree_of(finished, root.context.trace_id)
        assert set(tree) == NAMES
        known = {s.context.span_id for s in tree.values() if s.context}
        assert root.parent is None
        assert all(s.parent is not None and s.parent.span_id in known for s in tree.values() if s is not root)
    assert named(spans) == dict.fromkeys(NAMES, len(ids))


async def test_spans_name_the_model_and_tokens_but_never_the_content(
    spans: InMemorySpanExporter, redis_server: RedisProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await run_requests(redis_server, tmp_path, 2, spans)

    finished = spans.get_finished_spans()
    root = next(s for s in finished if s.name == "gateway.request")
    insert = next(s for s in finished if s.name == "usage.insert")
    assert root.attributes is not None
    assert insert.attributes is not None
    assert root.attributes["gen_ai.request.model"] == "echo"
    assert root.attributes["millrace.tenant"] == "demo"
    assert insert.attributes["gen_ai.usage.output_tokens"] == 6
    everything = "\n".join(s.to_json() for s in finished) + "".join(capfd.readouterr())
    assert CANARY not in everything
    assert KEY not in everything
