"""The whole stack over the echo engine: exact tokens, kills, and Redis going away."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.stack import Stack, millrace, running_stack
from tests.helpers.transcripts import Transcript, stream_completion
from tests.helpers.waiting import WAIT_S, until

pytestmark = pytest.mark.timeout(180)

VOCAB = 32_000
STREAMS = 32


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(
        tmp_path / "home", "--workers", "2", "--model", "echo", env={"MILLRACE_ECHO_STEP_MS": "20"}
    ) as stack:
        yield stack


async def run_streams(
    stack: Stack, count: int, max_tokens: int, *, seen: list[Transcript] | None = None
) -> list[Transcript]:
    """Streams side by side, read to their ends; `seen` is filled meanwhile."""
    made = seen if seen is not None else []
    made += [Transcript() for _ in range(count)]
    body = {"model": "echo", "prompt": "one two three", "max_tokens": max_tokens, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=stack.url, headers=stack.headers, timeout=60) as client:
        return await asyncio.gather(*(stream_completion(client, body, seen=each) for each in made))


async def all_run(seen: list[Transcript]) -> None:
    """Return once each stream has a token."""
    await until(lambda: seen and all(transcript.text for transcript in seen))


def assert_billed_as_seen(stack: Stack, seen: list[Transcript]) -> None:
    rows = {row["request_id"]: row for row in stack.wait_ledger(len(seen))}
    assert len(stack.ledger()) == len(rows) == len(seen)
    for transcript in seen:
        row = rows[transcript.request_id]
        if transcript.ending == "completed":
            assert transcript.usage is not None
            assert row["terminal_state"] == "completed"
            assert row["billed_completion_tokens"] == len(transcript.token_ids) == transcript.usage["completion_tokens"]
            assert row["billed_prompt_tokens"] == transcript.usage["prompt_tokens"]
        else:
            assert row["billed_completion_tokens"] == len(transcript.token_ids)


def test_32_concurrent_streams_on_two_workers_complete_and_are_billed_to_the_token(stack: Stack) -> None:
    seen = asyncio.run(run_streams(stack, STREAMS, 40))

    assert [t.ending for t in seen] == ["completed"] * STREAMS
    assert all(t.is_echo_prefix(VOCAB) and len(t.token_ids) == 40 for t in seen)
    assert len({t.request_id for t in seen}) == STREAMS
    assert_billed_as_seen(stack, seen)


def test_killing_the_router_and_a_worker_leaves_no_silent_stream_and_no_double_bill(stack: Stack) -> None:
    async def scenario() -> list[Transcript]:
        running: list[Transcript] = []
        streams = asyncio.create_task(run_streams(stack, STREAMS, 150, seen=running))
        await all_run(running)
        stack.signal("router", signal.SIGKILL)
        stack.signal("worker-1", signal.SIGKILL)
        return await streams

    seen = asyncio.run(scenario())

    assert {t.ending for t in seen} <= {"completed", "error"}, [t for t in seen if t.ending == "unclassified"]
    assert all(t.is_echo_prefix(VOCAB) for t in seen)
    assert sum(t.ending == "completed" for t in seen) >= STREAMS // 2
    assert_billed_as_seen(stack, seen)


def test_streams_run_on_while_redis_is_away_and_new_work_gets_503(stack: Stack) -> None:
    async def scenario() -> tuple[list[Transcript], httpx.Response]:
        running: list[Transcript] = []
        streams = asyncio.create_task(run_streams(stack, 4, 150, seen=running))
        await all_run(running)
        stack.signal("redis", signal.SIGSTOP)
        async with httpx.AsyncClient(base_url=stack.url, headers=stack.headers, timeout=WAIT_S) as client:
            body = {"model": "echo", "prompt": "late", "max_tokens": 2}
            refused = await client.post("/v1/completions", json=body)
        seen = await streams
        stack.signal("redis", signal.SIGCONT)
        return seen, refused

    seen, refused = asyncio.run(scenario())

    assert [t.ending for t in seen] == ["completed"] * 4
    assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert int(refused.headers["retry-after"]) >= 1
    assert_billed_as_seen(stack, seen)


def test_accepted_work_survives_the_death_of_redis(stack: Stack) -> None:
    async def scenario() -> list[Transcript]:
        running: list[Transcript] = []
        streams = asyncio.create_task(run_streams(stack, 8, 100, seen=running))
        await all_run(running)
        stack.signal("redis", signal.SIGKILL)
        return await streams

    seen = asyncio.run(scenario())

    assert all(t.ending in ("completed", "error") for t in seen)
    assert all(t.is_echo_prefix(VOCAB) for t in seen)
    assert_billed_as_seen(stack, seen)
    assert asyncio.run(run_streams(stack, 2, 5))[0].ending == "completed"


def test_a_client_that_goes_away_is_billed_for_what_it_got_and_stops_the_work(stack: Stack) -> None:
    async def cut() -> tuple[str, int]:
        body = {"model": "echo", "prompt": "cut me", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        received = 0
        async with (
            httpx.AsyncClient(base_url=stack.url, headers=stack.headers, timeout=WAIT_S) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                received += line.count('"text":"t')
                if received >= 5:
                    return response.headers["x-request-id"], received
        return "", 0

    request_id, received = asyncio.run(cut())

    rows = {row["request_id"]: row for row in stack.wait_ledger(1)}
    assert rows[request_id]["terminal_state"] == "cancelled"
    assert received <= rows[request_id]["billed_completion_tokens"] < 4_000


def test_with_tls_between_services_a_request_is_answered_and_administrators_are_served(tmp_path: Path) -> None:
    with running_stack(tmp_path / "home", "--model", "echo", "--tls") as secure:
        seen = asyncio.run(run_streams(secure, 1, 10))
        assert_billed_as_seen(secure, seen)
        key = millrace(secure.home, "key", "create", "--tenant", "demo")
        status = millrace(secure.home, "status")
        refused = millrace(secure.home, "key", "list", env={"MILLRACE_TLS_DIR": str(secure.home / "tls" / "worker")})

        assert [t.ending for t in seen] == ["completed"]
        assert (key.returncode, status.returncode) == (0, 0), key.stderr + status.stderr
        assert refused.returncode == 2
        assert "certificate" in refused.stderr


def test_bench_ramps_to_the_knee_and_says_what_is_wrong(stack: Stack, tmp_path: Path) -> None:
    load = ("--requests", "6", "--prompt-words", "20", "--output-tokens", "5", "--ttft-target-ms", "60000")
    report, plot = tmp_path / "report.json", tmp_path / "goodput.svg"

    ramp = millrace(stack.home, "bench", "--ramp", "20:40:20", *load, "--out", str(report), "--plot", str(plot))
    wrong_key = millrace(stack.home, "bench", "--key", "mr_wrong", *load)

    assert ramp.returncode == 0, ramp.stderr
    assert "Knee: 40 requests/s" in ramp.stdout
    results = json.loads(report.read_text())["results"]
    assert [(r["rate"], r["completed"], r["output_tokens"]) for r in results] == [(20.0, 6, 30), (40.0, 6, 30)]
    assert plot.read_text().startswith("<svg")
    assert wrong_key.returncode == 2
    assert "401" in wrong_key.stderr
