"""How servers are held against each other."""

from __future__ import annotations

from benchmarks.peers import OURS, chart, compare
from cli.bench_load import Ending, Outcome, Summary, Targets, summarise


def run(*, tokens: int, ttft: float, ending: Ending = Ending.COMPLETED) -> Summary:
    """One request that lasts a second."""
    return summarise([Outcome(0.0, 0.0, ttft, 1.0, ending, completion_tokens=tokens)], Targets())


def test_ratios_are_of_medians_against_the_best_peer_of_the_shape() -> None:
    found = {
        ("chat", OURS): [run(tokens=n, ttft=0.2) for n in (10, 30, 90)],
        ("chat", "slow"): [run(tokens=15, ttft=0.1)],
        ("chat", "fast"): [run(tokens=60, ttft=0.4)],
        ("long", OURS): [run(tokens=5, ttft=0.2)],
        ("long", "fast"): [run(tokens=0, ttft=0.9, ending=Ending.FAILED)],
    }

    ours, slow, fast, alone, broken = results = compare(found)

    assert (ours.best_tokens_per_s, ours.median_tokens_per_s, ours.throughput_ratio, ours.ttft_ratio) == (
        90,
        30,
        0.5,
        0.5,
    )
    assert (slow.throughput_ratio, slow.ttft_ratio) == (0.25, 1.0)
    assert (fast.throughput_ratio, fast.ttft_ratio) == (1.0, 0.25)
    assert (alone.throughput_ratio, alone.ttft_ratio, alone.failed) == (None, None, 0)
    assert (broken.median_ttft_ms, broken.failed) == (None, 1)
    assert "slow, chat: 15" in chart([each for each in results if each.shape == "chat"])
