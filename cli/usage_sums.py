"""Sums of the ledger: `millrace usage query`, `statement` and `report`."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from millrace.usage.v1 import usage_service_pb2 as pb
from rich.console import Console
from rich.table import Table

from cli.price import amount, stamp
from cli.svg_chart import Series, bar_chart
from cli.tenant import Address
from cli.up import fail
from cli.usage_costs import ask_usage, cost_tables
from cli.usage_files import whole_file
from cli.usage_shapes import GROUPS, Shape

NUMBERS = ("requests", "prompt", "cached", "completion", "reasoning")


def query(
    group_by: Annotated[list[str] | None, typer.Option("--by", help=GROUPS)] = None,
    tenant: Annotated[str, typer.Option(help="Only this tenant.")] = "",
    project: Annotated[str, typer.Option(help="Only this project.")] = "",
    key: Annotated[str, typer.Option(help="Only this key id.")] = "",
    model: Annotated[str, typer.Option(help="Only this model, or model@version.")] = "",
    tag: Annotated[list[str] | None, typer.Option(help="Only requests with this tag=value; repeat for more.")] = None,
    since: Annotated[datetime | None, typer.Option(help="Requests that ended at or after this UTC time.")] = None,
    until: Annotated[datetime | None, typer.Option(help="Requests that ended before this UTC time.")] = None,
    format: Annotated[Shape, typer.Option(help="table for people, csv or jsonl for programs.")] = Shape.TABLE,
    usage_address: Address = None,
) -> None:  # fmt: skip
    """Sum requests, tokens and cost by any groups."""
    name, _, version = model.partition("@")
    pairs = [text.partition("=") for text in tag or ()]
    if any(not separator for _, separator, _ in pairs):
        raise fail("A tag is written as name=value.")
    request = pb.QueryUsageRequest(
        tenant=tenant,
        project=project,
        key_id=key,
        model=name,
        version=version,
        metadata={name: value for name, _, value in pairs},
        start_time=None if since is None else stamp(since),
        end_time=None if until is None else stamp(until),
        group_by=group_by or (),
    )
    _write(group_by or [], ask_usage(request, usage_address), format)


def statement(
    tenant: Annotated[str, typer.Argument(help="Tenant.")],
    day: Annotated[datetime, typer.Option(formats=["%Y-%m-%d"], help="UTC day, as 2026-03-01.")],
    format: Annotated[Shape, typer.Option(help="table for people, csv or jsonl for programs.")] = Shape.TABLE,
    usage_address: Address = None,
) -> None:
    """One tenant's statement of one day: every project, model and version with its tokens and cost, and the total."""
    _write(["project", "model", "version"], _day(tenant, day, usage_address), format)


def report(
    tenants: Annotated[list[str], typer.Argument(help="Tenants to set side by side.")],
    since: Annotated[datetime, typer.Option(formats=["%Y-%m-%d"], help="First UTC day.")],
    until: Annotated[datetime, typer.Option(formats=["%Y-%m-%d"], help="Last UTC day, included.")],
    chart: Annotated[Path | None, typer.Option(help="SVG file for a chart of tokens by day.")] = None,
    usage_address: Address = None,
) -> None:
    """Statements of some tenants by day as a table, and as a chart; what their answers cost us, and idle time."""
    days = _days(since.date(), until.date())
    series = []
    for tenant in tenants:
        request = pb.QueryUsageRequest(
            tenant=tenant,
            start_time=stamp(since),
            end_time=stamp(until + timedelta(days=1)),
            group_by=["day", "model"],
        )
        groups = ask_usage(request, usage_address)
        Console(highlight=False).print(_table(["day", "model"], groups, title=tenant))
        series.append(Series(tenant, _tokens_by_day(groups, days)))
    for table in cost_tables(tenants, stamp(since), stamp(until + timedelta(days=1)), usage_address):
        Console(highlight=False).print(table)
    if chart is not None:
        labels = [day.isoformat() for day in days]
        with whole_file(chart) as out:
            out.write(bar_chart("Billed tokens a day", labels, series, short_label=lambda day: day[5:]))
        print(f"Wrote {chart}.")


def _day(tenant: str, day: datetime, usage_address: str | None) -> Sequence[pb.UsageGroup]:
    request = pb.QueryUsageRequest(
        tenant=tenant,
        start_time=stamp(day.replace(tzinfo=UTC)),
        end_time=stamp(day.replace(tzinfo=UTC) + timedelta(days=1)),
        group_by=["project", "model", "version"],
    )
    return ask_usage(request, usage_address)


def _days(first: date, last: date) -> list[date]:
    if not 0 <= (last - first).days < 366:
        raise fail("--until lies at most a year after --since.")
    return [first + timedelta(days=number) for number in range((last - first).days + 1)]


def _tokens_by_day(groups: Sequence[pb.UsageGroup], days: Sequence[date]) -> tuple[int, ...]:
    sums = dict.fromkeys((day.isoformat() for day in days), 0)
    for group in groups:
        sums[group.keys[0]] += group.billed.prompt_token_count + group.billed.completion_token_count
    return tuple(sums.values())


def _numbers(group: pb.UsageGroup) -> tuple[int, ...]:
    billed = group.billed
    counts = (billed.prompt_token_count, billed.cached_token_count, billed.completion_token_count)
    return (group.request_count, *counts, billed.reasoning_token_count)


def _costs(group: pb.UsageGroup) -> dict[str, int]:
    return {
        cost.currency: cost.prompt_micros + cost.cached_micros + cost.completion_micros + cost.reasoning_micros
        for cost in group.costs
    }


def _write(names: Sequence[str], groups: Sequence[pb.UsageGroup], shape: Shape) -> None:
    if shape is Shape.TABLE:
        Console(highlight=False).print(_table(names, groups))
        return
    fields = [*names, *NUMBERS, "cost"]
    if shape is Shape.JSONL:
        for group in groups:
            row = (*group.keys, *_numbers(group), _amounts(_costs(group)))
            print(json.dumps(dict(zip(fields, row, strict=True)), ensure_ascii=False))
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows((*group.keys, *_numbers(group), _money(_costs(group))) for group in groups)


def _table(names: Sequence[str], groups: Sequence[pb.UsageGroup], title: str = "") -> Table:
    table = Table(*names, title=title or None, show_footer=len(groups) > 1)
    sums = [0] * len(NUMBERS)
    total: dict[str, int] = {}
    for group in groups:
        sums = [one + other for one, other in zip(sums, _numbers(group), strict=True)]
        for currency, micros in _costs(group).items():
            total[currency] = total.get(currency, 0) + micros
    for name, count in zip(NUMBERS, sums, strict=True):
        table.add_column(name, f"{count:,}", justify="right")
    table.add_column("cost", _money(total), justify="right")
    for group in groups:
        table.add_row(*group.keys, *(f"{count:,}" for count in _numbers(group)), _money(_costs(group)))
    return table


def _amounts(costs: dict[str, int]) -> dict[str, str]:
    return {currency: amount(micros) for currency, micros in costs.items()}


def _money(costs: dict[str, int]) -> str:
    return ", ".join(f"{text} {currency}" for currency, text in _amounts(costs).items())
