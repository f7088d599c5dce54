"""The client of `millrace bench` makes an outcome of whatever a server does."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from cli.bench_client import Load, open_client
from cli.bench_load import Ending, Job, Outcome

USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}


def event(body: object) -> str:
    return f"data: {json.dumps(body)}\n\n"


def text(part: str) -> str:
    return event({"choices": [{"text": part}], "usage": None})


ANSWER = text("") + text("a") + ": ping\n\n" + text("b") + event({"choices": [], "usage": USAGE}) + "data: [DONE]\n\n"


async def outcome_of(status: int, body: str) -> Outcome:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=body))
    async with open_client("http://server/v1/", "k", transport=transport) as client:
        return await Load(client, "m").send(Job("hello", 3))


async def test_a_completed_answer_counts_by_the_usage_of_the_server() -> None:
    seen = await outcome_of(200, ANSWER)

    assert (seen.ending, seen.error) == (Ending.COMPLETED, "")
    assert (seen.prompt_tokens, seen.completion_tokens, seen.cached_tokens) == (12, 3, 8)
    assert len(seen.gaps_s) == 1
    assert seen.sent_s <= seen.first_s <= seen.end_s


async def test_without_usage_chunks_are_counted_and_said_to_be() -> None:
    seen = await outcome_of(200, text("a") + text("b") + "data: [DONE]\n\n")

    assert (seen.ending, seen.completion_tokens, seen.is_estimated) == (Ending.COMPLETED, 2, True)


@pytest.mark.parametrize(
    ("status", "body", "ending", "error"),
    [
        (429, '{"error": {"message": "slow down"}}', Ending.REFUSED, "429: slow down"),
        (503, "away", Ending.REFUSED, "503: away"),
        (500, '{"error": "boom"}', Ending.FAILED, "500: boom"),
        (200, text("a") + event({"error": {"message": "lost"}}), Ending.FAILED, "lost"),
        (200, text("a"), Ending.FAILED, "the stream ended without [DONE]"),
        (200, "data: {nope\n\n", Ending.FAILED, "the stream has a line that is no event: {nope"),
    ],
)
async def test_refusals_and_failures_are_told_apart(status: int, body: str, ending: Ending, error: str) -> None:
    seen = await outcome_of(status, body)

    assert (seen.ending, seen.error) == (ending, error)


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    def absent(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody listens")

    async with open_client("http://server", "", transport=httpx.MockTransport(absent)) as client:
        seen = await Load(client, "m").send(Job("hello", 3))

    assert (seen.ending, seen.error) == (Ending.FAILED, "ConnectError: nobody listens")


class Gate:
    """A server that answers nobody until it is opened, and knows how many wait."""

    def __init__(self) -> None:
        self.waiting = self.most_waiting = self.served = 0
        self.arrived, self.opened = asyncio.Event(), asyncio.Event()
        self.expected = 0

    async def __call__(self, _: httpx.Request) -> httpx.Response:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        if self.waiting == self.expected:
            self.arrived.set()
        await self.opened.wait()
        self.waiting -= 1
        self.served += 1
        return httpx.Response(200, text=ANSWER)


@pytest.mark.parametrize(("concurrency", "expected"), [(None, 7), (3, 3)])
async def test_an_open_loop_sends_all_that_is_due_and_a_closed_loop_so_many_at_a_time(
    concurrency: int | None, expected: int
) -> None:
    gate, done, jobs = Gate(), [], [Job("hello", 3)] * 7
    gate.expected = expected
    async with open_client("http://server", "", transport=httpx.MockTransport(gate)) as client:
        load = Load(client, "m", lambda: done.append(1))
        run = load.open_loop(jobs) if concurrency is None else load.closed_loop(jobs, concurrency=concurrency)
        running = asyncio.create_task(run)
        await gate.arrived.wait()
        gate.opened.set()
        outcomes = await running

    assert gate.most_waiting == expected
    assert gate.served == len(outcomes) == len(done) == 7
    assert {each.ending for each in outcomes} == {Ending.COMPLETED}
