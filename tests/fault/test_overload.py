"""Five times what the stack can do: goodput, typed refusals, callers that obey Retry-After, the gateway's memory.

The echo model on one worker of a few slots; clients ask again as soon as they are answered. Rates are compared with
rates of the same run only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.closed_load import SEED, Load, percentile
from tests.helpers.stack import Stack, running_stack

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

SLOTS = 8
# Slow enough that the slots are what is short, not the machine's processors.
STEP_MS = 100
# Requests that may wait: more than two seconds of work, so that room can be held for a second's
# callers. Tokens of one request.
QUEUE, TOKENS = 24, 8
SETTLE_S, PEAK_S, OVERLOAD_S = 8, 16, 40


def memory_kib(stack: Stack) -> int:
    """Resident memory of the gateway."""
    status = Path(f"/proc/{stack.state.processes['gateway']}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def test_five_times_too_much_costs_no_goodput_and_no_memory(tmp_path: Path) -> None:
    async def scenario(stack: Stack) -> tuple[float, float, Load, list[int]]:
        fitting, all_of_them = (Load(stack, stack.key, TOKENS) for _ in range(2))
        async with fitting.running(SLOTS + QUEUE):
            await asyncio.sleep(SETTLE_S)
            peak = await fitting.tokens_a_second(PEAK_S)
        async with all_of_them.running(5 * (SLOTS + QUEUE)):
            await asyncio.sleep(SETTLE_S)
            # Not those of the first rush.
            all_of_them.refused.clear()
            memory = [memory_kib(stack)]
            goodput = await all_of_them.tokens_a_second(OVERLOAD_S)
            memory.append(memory_kib(stack))
        return peak, goodput, all_of_them, memory

    print(f"OVERLOAD_SEED={SEED}")
    environment = {
        "MILLRACE_ECHO_STEP_MS": str(STEP_MS),
        "MILLRACE_ENGINE": f"max_num_seqs={SLOTS}",
        "MILLRACE_QUEUE": f"max_requests={QUEUE}",
    }
    with running_stack(tmp_path / "home", "--workers", "1", "--model", "echo", env=environment) as stack:
        peak, goodput, load, memory = asyncio.run(scenario(stack))

    once = sum(each.refusals >= 1 for each in load.done)
    twice = sum(each.refusals >= 2 for each in load.done)
    kinds = Counter((each.status, each.reason) for each in load.refused)
    waits = [each.after_s * 1_000 for each in load.refused]
    print(f"peak {peak:.0f} tokens/s, at five times the load {goodput:.0f}; refusals {dict(kinds)}")
    print(f"answered after a refusal {once}, after a second {twice}; gateway {memory} KiB; longest {longest(load)} s")
    shares = ", ".join(f"p{share:g} {percentile(waits, share / 100):.0f}" for share in (50, 95, 99))
    print(f"refused after ms: {shares}; the time of clients in this process is in it")
    assert goodput >= 0.9 * peak
    assert set(kinds) == {(503, "QUEUE_FULL")}
    assert all(each.retry_after is not None and 1 <= int(each.retry_after) <= 60 for each in load.refused)
    assert memory[1] <= 1.1 * memory[0]
    assert twice < 0.05 * once


def longest(load: Load) -> str | None:
    """The longest Retry-After."""
    return max((each.retry_after for each in load.refused if each.retry_after), key=int, default=None)
