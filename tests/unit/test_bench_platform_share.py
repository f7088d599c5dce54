"""What the benchmark of the platform's share counts, from two samples of a stack."""

from __future__ import annotations

from benchmarks.platform_share import Sample, table


def test_the_platform_is_all_but_the_steps_and_their_helpers() -> None:
    before = Sample(100.0, {"gateway": 5.0, "redis": 1.0}, {7: 90.0, 8: 80.0}, 3.0)
    after = Sample(120.0, {"gateway": 5.5, "redis": 1.25}, {7: 110.5, 8: 99.0, 9: 0.25}, 4.0)

    rows = table(after.parts_since(before), after.step_s - before.step_s, requests=40)

    assert {row["part"]: row["cpu_s"] for row in rows} == {
        "gateway": 0.5,
        "redis": 0.25,
        "worker: event loop, gRPC": 1.0,
        "worker: engine between steps": 0.5,
        "platform": 2.25,
    }
    assert rows[-1]["share"] == 0.1125
    assert (rows[-1]["target"], rows[-1]["met"], rows[-1]["requests"]) == (0.1, False, 40)
