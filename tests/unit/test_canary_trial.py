"""Trials of rollouts: what events say, steps in simulated time, the plot, and going on after a restart."""

from __future__ import annotations

import dataclasses

import pytest
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import rollout_progress_pb2, usage_event_pb2

from services.common.admission_types import SHADOW_TENANT
from services.common.errors import InvalidRequest
from services.common.routes import RolloutState, Route, RouteTable
from services.usage import rollout as steps
from services.usage.canary.criteria import NAMES, Criteria, check_criteria, criteria_of
from services.usage.canary.judge import Call
from services.usage.canary.observations import Observation
from services.usage.canary.points import MAX_POINTS, Figures, Timeline
from services.usage.canary.sightings import Match, observation_of
from services.usage.canary.trial import Trial, is_watched
from tests.helpers.canaries import GOOD
from tests.helpers.rollouts import NEW, OLD, Fleet, stamp

NOW = 1_700_000_000.0
MATCH = Match(OLD, NEW, since=NOW)


def begun(**criteria: float) -> RouteTable:
    plan = steps.Plan(NEW, OLD, bake_s=2.0, criteria=criteria, mirrored=0.05)
    return steps.start(RouteTable(), "echo", plan, now=NOW)


def trial_of(table: RouteTable) -> Trial:
    route = table.routes["echo"]
    assert route.rollout is not None
    return Trial(route, route.rollout)


@pytest.mark.parametrize("seed", range(20))
def test_a_good_version_is_promoted_without_a_false_alarm(seed: int) -> None:
    table, now, fleet = begun(tpot_ms=30, min_requests=10), NOW, Fleet({NEW: GOOD}, seed)
    trial = trial_of(table)

    while trial.rollout.state is RolloutState.RUNNING:
        trial.observe(fleet.serve(table, 60, now), now)
        now += 0.5
        verdict = trial.verdict()
        assert verdict.call is not Call.FAIL, verdict.why
        if verdict.call is Call.PASS and now >= trial.rollout.step_time + trial.rollout.bake_s:
            table = steps.promote(table, "echo", now=now)
            trial = trial_of(table)

    assert trial.rollout.state is RolloutState.PROMOTED


def event(**fields: object) -> usage_event_pb2.UsageEvent:
    """A completed request of the new version: first token after 0.2 s, 11 tokens in 0.3 s more."""
    made = usage_event_pb2.UsageEvent(
        tenant="acme",
        model=common_pb2.ModelRef(model="echo", version="2"),
        priority_class=common_pb2.PRIORITY_CLASS_INTERACTIVE,
        terminal_state=common_pb2.TERMINAL_STATE_COMPLETED,
        choice_token_counts=[11],
    )
    made.delivered.prompt_token_count, made.delivered.completion_token_count = 5, 11
    for name, offset in (("admit", 1.0), ("start", 1.1), ("first_token", 1.2), ("end", 1.5)):
        getattr(made.times, f"{name}_time").CopyFrom(stamp(NOW + offset))
    made.MergeFrom(usage_event_pb2.UsageEvent(**fields))  # type: ignore[arg-type]
    return made


def test_an_event_says_how_fast_long_and_dear_its_answer_was() -> None:
    seen = observation_of(event(), MATCH)

    assert seen is not None
    assert seen.canary
    assert seen.ttft_s == pytest.approx(0.2)
    assert seen.tpot_s == pytest.approx(0.03)
    assert (seen.output_tokens, seen.cost_tokens, seen.failed, seen.refused) == (11, 16, False, False)


def test_an_answer_that_its_client_got_at_once_is_as_slow_as_it_was_made() -> None:
    told = event()
    told.latency.first_token.FromMilliseconds(500)
    told.latency.per_token.FromMilliseconds(0)

    seen = observation_of(told, MATCH)

    assert seen is not None
    assert (seen.ttft_s, seen.tpot_s) == (pytest.approx(0.2), pytest.approx(0.03))


def test_a_batch_has_no_time_to_first_token_and_a_short_answer_no_pace() -> None:
    batch = observation_of(event(priority_class=common_pb2.PRIORITY_CLASS_BATCH), MATCH)
    short = event()
    short.choice_token_counts[:] = [3]

    assert batch is not None
    assert batch.ttft_s is None
    assert observation_of(short, MATCH).tpot_s is None  # type: ignore[union-attr]


def test_only_faults_of_the_version_count_as_errors() -> None:
    failed = common_pb2.TERMINAL_STATE_FAILED
    engine = observation_of(event(terminal_state=failed, error_reason="ENGINE_ERROR"), MATCH)
    gateway = observation_of(event(terminal_state=failed, error_reason="GATEWAY_LOST"), MATCH)
    client = observation_of(event(terminal_state=common_pb2.TERMINAL_STATE_CANCELLED), MATCH)

    assert [seen.failed for seen in (engine, gateway, client) if seen is not None] == [True, False, False]


def test_what_waited_in_vain_or_came_back_empty_is_a_refusal() -> None:
    expired = event(terminal_state=common_pb2.TERMINAL_STATE_EXPIRED)
    assert observation_of(expired, MATCH).refused is False  # type: ignore[union-attr]
    expired.times.ClearField("start_time")
    empty = event()
    empty.delivered.completion_token_count = 0

    assert observation_of(expired, MATCH).refused is True  # type: ignore[union-attr]
    assert observation_of(empty, MATCH).refused is True  # type: ignore[union-attr]


def test_other_versions_earlier_requests_and_pinned_tenants_are_no_matter() -> None:
    other, early = event(), event()
    other.model.version = "3"
    early.times.admit_time.CopyFrom(stamp(NOW - 1))

    assert observation_of(other, MATCH) is None
    assert observation_of(early, MATCH) is None
    assert observation_of(event(), dataclasses.replace(MATCH, pinned=frozenset({"acme"}))) is None


def mirrored(compared: int, equal: int, *, lengths_differ: bool = False) -> bool | None:
    made = event(tenant=SHADOW_TENANT)
    made.shadow.compared_token_count, made.shadow.equal_token_count = compared, equal
    made.shadow.lengths_differ = lengths_differ
    seen = observation_of(made, MATCH)
    assert seen is not None
    assert seen.shadow
    assert (seen.ttft_s, seen.tpot_s, seen.output_tokens) == (None, None, None)
    return seen.differs


def test_mirrored_answers_differ_where_they_part_early() -> None:
    assert mirrored(40, 40) is False
    assert mirrored(40, 30) is False
    assert mirrored(40, 7) is True
    assert mirrored(3, 3, lengths_differ=True) is True
    assert mirrored(0, 0) is None


def test_what_was_seen_survives_a_restart() -> None:
    table, fleet = begun(tpot_ms=30), Fleet({NEW: GOOD}, 1)
    before = trial_of(table)
    for tick in range(40):
        before.observe(fleet.serve(table, 100, NOW + tick), NOW + tick)

    kept = rollout_progress_pb2.RolloutProgress.FromString(before.progress([("s", "1-0")], NOW).SerializeToString())
    after = trial_of(table)

    assert after.restore(kept)
    assert after.progress([("s", "1-0")], NOW) == kept
    assert after.verdict() == before.verdict()


def test_of_another_step_only_the_plot_is_taken_over() -> None:
    table, fleet = begun(min_requests=1), Fleet({NEW: GOOD}, 1)
    before = trial_of(table)
    for tick in range(10):
        before.observe(fleet.serve(table, 100, NOW + tick), NOW + tick)
    after = trial_of(steps.promote(table, "echo", now=NOW + 10))

    assert not after.restore(before.progress([], NOW))
    assert after.judge.canary.requests == 0
    assert after.timeline.points == before.timeline.points != []


def test_a_plot_never_has_too_many_points_and_loses_no_request() -> None:
    timeline = Timeline()
    for tick in range(MAX_POINTS * 10):
        timeline.add([Observation(False, ttft_s=0.1), Observation(True, ttft_s=0.2, failed=True)], NOW + tick)

    assert len(timeline.points) <= MAX_POINTS
    last = timeline.points[-1]
    covered = int(last.start + timeline.span_s - NOW)
    assert sum(point.baseline.requests for point in timeline.points) == covered
    assert last.candidate.failed == last.candidate.requests
    assert last.baseline.ttft == pytest.approx((0.1, 0.1), rel=0.03)


def test_merged_spans_keep_the_worse_high_and_weigh_the_medians() -> None:
    one, other = Figures(3, 1, (0.1, 0.5), None), Figures(1, 0, (0.3, 0.4), (0.02, 0.03))

    assert one.merged(other) == Figures(4, 1, (pytest.approx(0.15), 0.5), (0.02, 0.03))


def test_a_rollout_is_watched_while_it_runs_and_one_bake_longer_unless_a_hand_promoted_it() -> None:
    table = begun()
    rollout = trial_of(table).rollout
    by_hand = steps.promote(table, "echo", now=NOW, percent=100).routes["echo"].rollout
    assert by_hand is not None
    by_itself = dataclasses.replace(by_hand, reason="no figure is worse")

    assert is_watched(rollout, NOW)
    assert not is_watched(None, NOW)
    assert not is_watched(by_hand, NOW + 1)
    assert is_watched(by_itself, NOW + 1)
    assert not is_watched(by_itself, NOW + 2)
    assert not is_watched(steps.pause(table, "echo", reason="").routes["echo"].rollout, NOW)


def test_criteria_are_named_and_bounded() -> None:
    check_criteria({"tpot_ms": 30, "diff_rate": 1.0})
    with pytest.raises(InvalidRequest, match="There is no criterion `speed`"):
        check_criteria({"speed": 1})
    with pytest.raises(InvalidRequest, match="error_rate lies between"):
        check_criteria({"error_rate": float("nan")})
    with pytest.raises(InvalidRequest, match="tpot_ratio lies between"):
        check_criteria({"tpot_ratio": 0.5})

    for name in NAMES:
        value = getattr(Criteria(), name)
        check_criteria({} if value is None else {name: value})
    rollout = trial_of(begun(tpot_ms=30)).rollout
    newer = dataclasses.replace(rollout, criteria={"tpot_ms": 30, "of_a_newer_release": 1})
    assert criteria_of(newer) == Criteria(tpot_ms=30)
    with pytest.raises(InvalidRequest, match="no criterion"):
        begun(speed=1)


def test_a_route_without_a_rollout_is_not_watched() -> None:
    assert not is_watched(Route("echo", ()).rollout, NOW)
