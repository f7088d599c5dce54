"""One step of a rollout under judgement: the judge, the plot, and both as a message that a restarted controller reads.

Pure: time comes in as unix seconds. Owned by the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from google.protobuf import timestamp_pb2
from millrace.usage.v1 import rollout_progress_pb2 as pb
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_types import SHADOW_TENANT
from services.common.route_wire import target_message
from services.common.routes import Rollout, RolloutState, Route, Target
from services.usage.canary.criteria import criteria_of
from services.usage.canary.judge import Judge, Verdict
from services.usage.canary.observations import Histogram, Observation, Tally
from services.usage.canary.points import Figures, Point, Timeline
from services.usage.canary.sightings import Match, observation_of


class Trial:
    """Judges the events of one step. `timeline` outlives the step."""

    def __init__(self, route: Route, rollout: Rollout, timeline: Timeline | None = None) -> None:
        self.alias = route.alias
        self.rollout = rollout
        self.timeline = timeline if timeline is not None else Timeline()
        self.judge = Judge(criteria_of(rollout))
        pinned = frozenset(route.pins) - {SHADOW_TENANT}
        self._match = Match(rollout.baseline, rollout.candidate, rollout.step_time, pinned)

    def is_of(self, rollout: Rollout) -> bool:
        """Whether this is still the step that the route table names."""
        return key_of(self.rollout) == key_of(rollout)

    def observe(self, events: Sequence[usage_event_pb2.UsageEvent], now: float) -> int:
        """Take what ended since the last call; returns how many of it counted."""
        found = [observation_of(event, self._match) for event in events]
        seen: list[Observation] = [each for each in found if each is not None]
        if seen:
            self.judge.observe(seen)
        self.timeline.add(seen, now)
        return len(seen)

    def verdict(self) -> Verdict:
        """The judge's, now."""
        return self.judge.verdict()

    # --- across restarts -----------------------------------------------------------------------------------------
    def progress(self, places: Sequence[tuple[str, str]], now: float) -> pb.RolloutProgress:
        """All of it, and how far the usage streams were read."""
        verdict = self.verdict()
        return pb.RolloutProgress(
            alias=self.alias,
            baseline=target_message(self.rollout.baseline),
            candidate=target_message(self.rollout.candidate),
            step=self.rollout.step,
            step_time=_stamp(self.rollout.step_time),
            baseline_figures=_figures(self.judge.baseline),
            candidate_figures=_figures(self.judge.canary),
            checks=[
                pb.CheckState(
                    figure=check.name,
                    request_count=check.count,
                    evidence=[pb.LogRatios(values=part.logs) for part in check.parts],
                )
                for check in self.judge.checks
            ],
            verdict=verdict.call.value,
            why=verdict.why,
            figure=verdict.figure,
            point_seconds=self.timeline.span_s,
            points=[_point(point) for point in self.timeline.points],
            places=[pb.StreamPlace(stream=stream, entry_id=entry_id) for stream, entry_id in places],
            update_time=_stamp(now),
        )

    def restore(self, kept: pb.RolloutProgress) -> bool:
        """Go on where an earlier controller stood; False (and only the plot is taken) where it was at another step."""
        same_rollout = (target_message(self.rollout.baseline), target_message(self.rollout.candidate)) == (
            kept.baseline,
            kept.candidate,
        )
        if not same_rollout:
            return False
        self.timeline = Timeline(kept.point_seconds, [_point_of(point) for point in kept.points])
        here = [(check.name, len(check.parts)) for check in self.judge.checks]
        if kept.step_time != _stamp(self.rollout.step_time) or kept.step != self.rollout.step:
            return False
        if here != [(state.figure, len(state.evidence)) for state in kept.checks]:
            # Another release judged by other figures.
            return False
        self.judge.baseline, self.judge.canary = _tally(kept.baseline_figures), _tally(kept.candidate_figures)
        for check, state in zip(self.judge.checks, kept.checks, strict=True):
            check.count = state.request_count
            for part, ratios in zip(check.parts, state.evidence, strict=True):
                part.logs = list(ratios.values)
        return True


def key_of(rollout: Rollout) -> tuple[Target, Target, int, float]:
    """What makes two rollouts the same step."""
    return rollout.baseline, rollout.candidate, rollout.step, rollout.step_time


def is_watched(rollout: Rollout | None, now: float) -> bool:
    """Whether the controller looks: while it runs, and for one more bake time after the last step.

    A promotion by hand has no reason, and whoever gave it wants no second opinion.
    """
    if rollout is None:
        return False
    baking = rollout.reason != "" and now - rollout.step_time < rollout.bake_s
    return rollout.state is RolloutState.RUNNING or (rollout.state is RolloutState.PROMOTED and baking)


_MEASURES: tuple[tuple[Literal["ttft", "tpot", "output", "cost", "drift"], str], ...] = (
    ("ttft", "ttft_seconds"),
    ("tpot", "tpot_seconds"),
    ("output", "output_tokens"),
    ("cost", "cost_tokens"),
    ("drift", "drift_nats"),
)


def _figures(tally: Tally) -> pb.VersionFigures:
    figures = pb.VersionFigures(
        request_count=tally.requests,
        failed_count=tally.failed,
        refused_count=tally.refused,
        mirrored_count=tally.mirrored,
        compared_count=tally.compared,
        differing_count=tally.differing,
    )
    for name, field in _MEASURES:
        histogram: Histogram = getattr(tally, name)
        getattr(figures, field).buckets.update(histogram.buckets)
    return figures


def _tally(figures: pb.VersionFigures) -> Tally:
    histograms = {name: Histogram(getattr(figures, field).buckets) for name, field in _MEASURES}
    return Tally(
        figures.request_count,
        figures.failed_count,
        figures.refused_count,
        figures.mirrored_count,
        figures.compared_count,
        figures.differing_count,
        **histograms,
    )


def _point(point: Point) -> pb.RolloutPoint:
    return pb.RolloutPoint(
        start_time=_stamp(point.start), baseline=_span(point.baseline), candidate=_span(point.candidate)
    )


def _point_of(point: pb.RolloutPoint) -> Point:
    start = point.start_time.seconds + point.start_time.nanos / 1e9
    return Point(start, _span_of(point.baseline), _span_of(point.candidate))


def _span(figures: Figures) -> pb.PointFigures:
    span = pb.PointFigures(request_count=figures.requests, failed_count=figures.failed)
    if figures.ttft is not None:
        span.ttft_median_seconds, span.ttft_high_seconds = figures.ttft
    if figures.tpot is not None:
        span.tpot_median_seconds, span.tpot_high_seconds = figures.tpot
    return span


def _span_of(span: pb.PointFigures) -> Figures:
    return Figures(
        span.request_count,
        span.failed_count,
        (span.ttft_median_seconds, span.ttft_high_seconds) if span.HasField("ttft_median_seconds") else None,
        (span.tpot_median_seconds, span.tpot_high_seconds) if span.HasField("tpot_median_seconds") else None,
    )


def _stamp(seconds: float) -> timestamp_pb2.Timestamp:
    stamp = timestamp_pb2.Timestamp()
    stamp.FromMilliseconds(round(seconds * 1000))
    return stamp
