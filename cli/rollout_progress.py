"""`millrace rollout status`: how a rollout is judged, and both versions' latency over time as a table and a chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import grpc
import typer
from millrace.usage.v1 import canary_service_pb2 as pb
from millrace.usage.v1 import canary_service_pb2_grpc as pb_grpc
from millrace.usage.v1 import rollout_progress_pb2
from rich.console import Console
from rich.table import Table

from cli.svg_chart import LineSeries, line_charts
from cli.tenant import Address
from cli.usage_client import Metadata, call_usage
from cli.usage_files import whole_file
from services.usage.canary.observations import Histogram

ROWS = 12
Progress = rollout_progress_pb2.RolloutProgress
Figures = rollout_progress_pb2.VersionFigures
Span = rollout_progress_pb2.PointFigures
Point = rollout_progress_pb2.RolloutPoint


def status(
    alias: Annotated[str, typer.Argument(help="Name of the route.")],
    chart: Annotated[Path | None, typer.Option(help="SVG file for charts of both versions' latency.")] = None,
    usage_address: Address = None,
) -> None:
    """Show how a rollout is judged, and both versions' latency over time."""

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.GetRolloutProgressResponse:
        request = pb.GetRolloutProgressRequest(alias=alias)
        return await pb_grpc.CanaryServiceStub(channel).GetRolloutProgress(request, metadata=metadata)

    answer = call_usage(usage_address, work)
    show(answer.progress, chart)
    for other in answer.other_releases:
        served, shown = other.manifest_digest.hex()[:12], answer.release_digest.hex()[:12]
        print(f"{other.worker_instance} serves {served}, not the release {shown} that was shown.")


def show(progress: Progress, chart: Path | None = None) -> None:
    """Print the verdict, both versions' figures and their last spans; write all spans to `chart`."""
    console = Console(highlight=False)
    old, new = _name(progress.baseline), _name(progress.candidate)
    console.print(f"{progress.alias}: step {progress.step + 1} of {old} → {new} ({progress.verdict}): {progress.why}")
    console.print(_figures(old, new, progress))
    console.print(_spans(old, new, progress.points[-ROWS:]))
    if chart is not None:
        with whole_file(chart) as out:
            out.write(charts(progress))
        print(f"Wrote {chart}.")


def charts(progress: Progress) -> str:
    """Time per output token above time to first token, in milliseconds, of both versions: an SVG document.

    A version has one colour; its median is drawn through, its 95th percentile dashed.
    """
    labels = [_clock(point) for point in progress.points]
    panels = []
    for title, measure in (("Time per output token, ms", "tpot"), ("Time to first token, ms", "ttft")):
        lines = []
        sides = ((_name(progress.baseline), _baseline), (_name(progress.candidate), _candidate))
        for colour, (name, side) in enumerate(sides):
            for word, rank in (("median", "median"), ("95th percentile", "high")):
                values = [_milliseconds(side(point), f"{measure}_{rank}_seconds") for point in progress.points]
                lines.append(LineSeries(f"{name} {word}", tuple(values), colour, dashed=rank == "high"))
        panels.append((f"{progress.alias}: {title} (clock in UTC)", lines))
    return line_charts(labels, panels)


def _figures(old: str, new: str, progress: Progress) -> Table:
    table = Table("this step", old, new)
    for name, told in _TOLD:
        table.add_row(name, told(progress.baseline_figures), told(progress.candidate_figures))
    return table


def _spans(old: str, new: str, points: Sequence[Point]) -> Table:
    table = Table("from, UTC", title="Median and 95th percentile, ms", title_justify="left")
    for name in (old, new):
        for column in ("requests", "failed", "first token", "per token"):
            table.add_column(f"{name}\n{column}", justify="right")
    for point in points:
        cells = [cell for span in (point.baseline, point.candidate) for cell in _cells(span)]
        table.add_row(_clock(point), *cells)
    return table


def _cells(span: Span) -> tuple[str, ...]:
    return (
        str(span.request_count),
        str(span.failed_count),
        _pair(_milliseconds(span, "ttft_median_seconds"), _milliseconds(span, "ttft_high_seconds")),
        _pair(_milliseconds(span, "tpot_median_seconds"), _milliseconds(span, "tpot_high_seconds")),
    )


def _milliseconds(span: Span, field: str) -> float | None:
    return 1000 * getattr(span, field) if span.HasField(field) else None  # type: ignore[arg-type]


def _pair(median: float | None, high: float | None) -> str:
    return "–" if median is None or high is None else f"{median:.1f} / {high:.1f}"


def _quantiles(distribution: rollout_progress_pb2.Distribution, scale: float) -> str:
    histogram = Histogram(distribution.buckets)
    median, high = (histogram.quantile(share) for share in (0.5, 0.95))
    return _pair(None if median is None else scale * median, None if high is None else scale * high)


_TOLD: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("requests", lambda f: f"{f.request_count:,}"),
    ("failed", lambda f: f"{f.failed_count:,}"),
    ("no token came", lambda f: f"{f.refused_count:,}"),
    ("first token, ms", lambda f: _quantiles(f.ttft_seconds, 1000)),
    ("per token, ms", lambda f: _quantiles(f.tpot_seconds, 1000)),
    ("output tokens", lambda f: _quantiles(f.output_tokens, 1)),
    ("mirrored", lambda f: f"{f.mirrored_count:,}"),
    ("greedy answers that differ", lambda f: f"{f.differing_count:,} of {f.compared_count:,}"),
    ("logprob drift, nats", lambda f: _quantiles(f.drift_nats, 1)),
)


def _name(target: object) -> str:
    return f"{target.model}@{target.version}"  # type: ignore[attr-defined]


def _clock(point: Point) -> str:
    return datetime.fromtimestamp(point.start_time.seconds, UTC).strftime("%H:%M:%S")


def _baseline(point: Point) -> Span:
    return point.baseline


def _candidate(point: Point) -> Span:
    return point.candidate
