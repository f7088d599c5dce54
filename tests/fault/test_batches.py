"""A gateway is killed in mid-batch: after its restart each line has one result and one bill."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.helpers.stack import Stack

pytestmark = [pytest.mark.fault, pytest.mark.timeout(420)]

SHORT, LONG = 8, 16
SHORT_TOKENS, LONG_TOKENS = 5, 1_000
WAIT_S = 180.0
Batch = dict[str, Any]


def line(number: int) -> dict[str, Any]:
    tokens = SHORT_TOKENS if number < SHORT else LONG_TOKENS
    body = {"model": "echo", "prompt": "one two three", "ignore_eos": True, "max_tokens": tokens}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def submit(client: httpx.Client, lines: list[dict[str, Any]]) -> str:
    raw = "".join(json.dumps(each) + "\n" for each in lines).encode()
    file = client.post("/v1/files", files={"file": ("in.jsonl", raw)}, data={"purpose": "batch"}).raise_for_status()
    body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(client.post("/v1/batches", json=body).raise_for_status().json()["id"])


def wait_batch(client: httpx.Client, batch_id: str, reached: Callable[[Batch], bool]) -> Batch:
    """The batch once it got so far; a gateway that is away is asked again."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            answer = client.get(f"/v1/batches/{batch_id}")
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.is_success and reached(answer.json()):
            return dict(answer.json())
        time.sleep(0.1)
    raise AssertionError("the batch did not get so far")


def test_lines_of_a_killed_gateway_have_one_result_and_one_bill_each(stack: Stack) -> None:
    names = [f"line-{number}" for number in range(SHORT + LONG)]
    with httpx.Client(base_url=stack.url, headers=stack.headers, timeout=60) as client:
        batch_id = submit(client, [line(number) for number in range(SHORT + LONG)])
        wait_batch(client, batch_id, lambda batch: batch["request_counts"]["completed"] >= SHORT)
        # The short lines' bills are written too, so that the kill hits only lines that run.
        stack.wait_ledger(SHORT, timeout_s=WAIT_S)

        stack.signal("gateway", signal.SIGKILL)
        done = wait_batch(client, batch_id, lambda batch: batch["status"] == "completed")
        output = client.get(f"/v1/files/{done['output_file_id']}/content").raise_for_status().text

    results = [json.loads(each) for each in output.splitlines()]
    assert [result["custom_id"] for result in results] == names
    assert done["error_file_id"] is None
    usages = {result["response"]["request_id"]: result["response"]["body"]["usage"] for result in results}
    assert len(usages) == len(names)

    stack.wait_requests(usages, WAIT_S)
    # Each line that was cut has a row of its first try too, which costs nothing.
    rows = stack.wait_ledger(len(names) + 1, timeout_s=WAIT_S)
    paid = {row["request_id"]: row for row in rows if row["billed_completion_tokens"] or row["billed_prompt_tokens"]}
    assert len({row["request_id"] for row in rows}) == len(rows)
    assert paid.keys() == usages.keys()
    for request_id, usage in usages.items():
        row = paid[request_id]
        assert row["terminal_state"] == "completed"
        assert row["billed_prompt_tokens"] == usage["prompt_tokens"]
        assert row["billed_completion_tokens"] == usage["completion_tokens"]
    lost = [row["error_reason"] for row in rows if row["request_id"] not in usages]
    print(f"{len(lost)} lines were cut")
    assert set(lost) == {"GATEWAY_LOST"}
