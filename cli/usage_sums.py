"""Sums of the ledger: `millrace usage query`, `statement` and `report`."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from millrace.usage.v1 import usage_service_pb2 as pb

from cli.price import MICROS, amount, stamp
from cli.svg_chart import BarPanel, Series, bar_charts
from cli.tenant import Address
from cli.up import fail
from cli.usage_costs import ask_usage, show_costs
from cli.usage_files import whole_file
from cli.usage_shapes import GROUPS, NOTHING, Shape, show_table

NUMBERS = ("requests", "prompt", "cached", "completion", "reasoning")
# Of the numbers: part of the one before.
PARTS = ("cached", "reasoning")


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
    request = pb.QueryUsageRequest(
        tenant=tenant,
        project=project,
        key_id=key,
        model=name,
        version=version,
        metadata=tags_of(tag),
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
    title = f"Statement of {tenant}, {day:%Y-%m-%d} (UTC)"
    _write(["project", "model", "version"], _day(tenant, day, usage_address), format, title)


def report(
    tenants: Annotated[list[str], typer.Argument(help="Tenants to set side by side.")],
    since: Annotated[datetime, typer.Option(formats=["%Y-%m-%d"], help="First UTC day.")],
    until: Annotated[datetime, typer.Option(formats=["%Y-%m-%d"], help="Last UTC day, included.")],
    chart: Annotated[Path | None, typer.Option(help="SVG file for a chart of tokens and cost by day.")] = None,
    usage_address: Address = None,
) -> None:
    """Statements of some tenants by day as tables, and as a chart; what their answers cost us, and idle time."""
    days = _days(since.date(), until.date())
    begin, end = stamp(since), stamp(until + timedelta(days=1))
    span = f"{since:%Y-%m-%d} to {until:%Y-%m-%d} (UTC)"
    statements: dict[str, Sequence[pb.UsageGroup]] = {}
    for tenant in tenants:
        request = pb.QueryUsageRequest(tenant=tenant, start_time=begin, end_time=end, group_by=["day", "model"])
        statements[tenant] = ask_usage(request, usage_address)
    whole = [_sum([tenant], groups) for tenant, groups in statements.items()]
    _show(["tenant"], whole, f"Billed {span}")
    for tenant, groups in statements.items():
        _show(["day", "model"], groups, f"{tenant}, {span}")
    show_costs(tenants, begin, end, usage_address)
    if chart is not None:
        with whole_file(chart) as out:
            out.write(_chart(statements, days, span))
        print(f"Wrote {chart}.")


def _chart(statements: Mapping[str, Sequence[pb.UsageGroup]], days: Sequence[date], span: str) -> str:
    def by_day(value: Callable[[pb.UsageGroup], int]) -> list[Series]:
        series = []
        for tenant, groups in statements.items():
            sums = dict.fromkeys((day.isoformat() for day in days), 0)
            for group in groups:
                sums[group.keys[0]] += value(group)
            series.append(Series(tenant, tuple(sums.values())))
        return series

    tokens = by_day(lambda group: group.billed.prompt_token_count + group.billed.completion_token_count)
    panels = [BarPanel(f"Billed tokens a day, {span}", tokens)]
    for currency in sorted({name for groups in statements.values() for group in groups for name in _costs(group)}):
        costs = by_day(lambda group, currency=currency: _costs(group).get(currency, 0))  # type: ignore[misc]
        panels.append(BarPanel(f"Cost a day in {currency}, {span}", costs, unit=MICROS))
    return bar_charts([day.isoformat() for day in days], panels, short_label=lambda day: day[5:])


def tags_of(texts: Sequence[str] | None) -> dict[str, str]:
    """Tags as they are typed; exits with a sentence for one without a value."""
    pairs = [text.partition("=") for text in texts or ()]
    if any(not separator for _, separator, _ in pairs):
        raise fail("A tag is written as name=value.")
    return {name: value for name, _, value in pairs}


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


def _numbers(group: pb.UsageGroup) -> tuple[int, ...]:
    billed = group.billed
    counts = (billed.prompt_token_count, billed.cached_token_count, billed.completion_token_count)
    return (group.request_count, *counts, billed.reasoning_token_count)


def _costs(group: pb.UsageGroup) -> dict[str, int]:
    costs: dict[str, int] = {}
    for cost in group.costs:
        parts = cost.prompt_micros + cost.cached_micros + cost.completion_micros + cost.reasoning_micros
        costs[cost.currency] = costs.get(cost.currency, 0) + parts
    return costs


def _write(names: Sequence[str], groups: Sequence[pb.UsageGroup], shape: Shape, title: str = "") -> None:
    if shape is Shape.TABLE:
        _show(names, groups, title)
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


def _sum(keys: Sequence[str], groups: Sequence[pb.UsageGroup]) -> pb.UsageGroup:
    """One group of all of them."""
    whole = pb.UsageGroup(keys=keys)
    for group in groups:
        whole.request_count += group.request_count
        for field in whole.billed.DESCRIPTOR.fields:
            setattr(whole.billed, field.name, getattr(whole.billed, field.name) + getattr(group.billed, field.name))
        whole.costs.extend(group.costs)
    return whole


def _show(names: Sequence[str], groups: Sequence[pb.UsageGroup], title: str = "") -> None:
    """A table with a total; of the kinds of tokens those that there are."""
    whole = _sum((), groups)
    kept = [place for place, count in enumerate(_numbers(whole)) if count or NUMBERS[place] not in PARTS]

    def cells(group: pb.UsageGroup) -> list[str]:
        return [*(str(_numbers(group)[place]) for place in kept), _money(_costs(group))]

    total = ["Total", *[""] * (len(names) - 1), *cells(whole)] if len(groups) > 1 else []
    rows = [[*group.keys, *cells(group)] for group in groups]
    show_table([*names, *(NUMBERS[place] for place in kept), "cost"], rows, left=len(names), title=title, total=total)
    if any(_numbers(group)[1] + _numbers(group)[3] and not group.costs for group in groups):
        print(f"{NOTHING} no price held. `millrace price rate-again` rates by prices that were set since.")


def _amounts(costs: dict[str, int]) -> dict[str, str]:
    return {currency: amount(micros) for currency, micros in costs.items()}


def _money(costs: dict[str, int]) -> str:
    return ", ".join(f"{text} {currency}" for currency, text in _amounts(costs).items())
