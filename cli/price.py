"""`millrace price`: what tokens cost, and which plan a tenant has."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated

import grpc
import typer
from google.protobuf import timestamp_pb2
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc
from rich.console import Console
from rich.table import Table

from cli.tenant import Address
from cli.up import fail
from cli.usage_client import Metadata, call_usage

app = typer.Typer(no_args_is_help=True)
MICROS = 1_000_000
Start = Annotated[datetime | None, typer.Option("--from", help="Holds from this UTC time on; from now unless given.")]
PER_MILLION = "Units of the currency a million tokens, at most six decimals, for example 0.15."


@app.command("set")
def set_price(
    model: Annotated[str, typer.Argument(help="Model, or model@version for one version.")],
    prompt: Annotated[str | None, typer.Option(help=PER_MILLION)] = None,
    cached: Annotated[str | None, typer.Option(help="Prompt tokens from the cache; as --prompt unless set.")] = None,
    completion: Annotated[str | None, typer.Option(help=PER_MILLION)] = None,
    reasoning: Annotated[str | None, typer.Option(help="Reasoning tokens; as --completion unless set.")] = None,
    accelerator_hour: Annotated[str | None, typer.Option(help="What an hour of one of its workers costs us.")] = None,
    priority_class: Annotated[str, typer.Option("--class", help="interactive or batch; both unless given.")] = "",
    plan: Annotated[str, typer.Option(help="Only tenants of this plan; every tenant unless given.")] = "",
    currency: Annotated[str, typer.Option(help="ISO 4217 code.")] = "USD",
    start: Start = None,
    until: Annotated[
        datetime | None, typer.Option(help="Holds before this UTC time; without end unless given.")
    ] = None,
    usage_address: Address = None,
) -> None:
    """Set prices of a model from a moment on. Nothing is edited: a later price takes the place of an earlier one."""
    name, _, version = model.partition("@")
    given = {"prompt": prompt, "cached": cached, "completion": completion, "reasoning": reasoning}
    given["accelerator_hour"] = accelerator_hour
    prices = [
        pb.Price(
            plan=plan,
            model=name,
            version=version,
            priority_class=priority_class,
            token_kind=kind,
            currency=currency,
            micros_per_million=micros(text),
            start_time=stamp(start),
            end_time=None if until is None else stamp(until),
        )
        for kind, text in given.items()
        if text is not None
    ]
    if not prices:
        raise fail("Name at least one price: --prompt, --cached, --completion, --reasoning or --accelerator-hour.")

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.SetPricesResponse:
        stub = pb_grpc.PriceServiceStub(channel)
        return await stub.SetPrices(pb.SetPricesRequest(prices=prices), metadata=metadata, timeout=15)

    for price in call_usage(usage_address, work).prices:
        unit = "an hour" if price.token_kind.endswith("_hour") else "a million"
        print(f"Set {price.token_kind} of {model} to {amount(price.micros_per_million)} {price.currency} {unit}.")


@app.command("list")
def list_prices(usage_address: Address = None) -> None:
    """List every price ever set; of two with one start, the lower one holds."""

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.ListPricesResponse:
        stub = pb_grpc.PriceServiceStub(channel)
        return await stub.ListPrices(pb.ListPricesRequest(), metadata=metadata, timeout=15)

    table = Table("model", "version", "class", "plan", "kind", "a million (or an hour)", "from", "until")
    for price in call_usage(usage_address, work).prices:
        until = price.end_time.ToJsonString() if price.HasField("end_time") else "–"
        cost = f"{amount(price.micros_per_million)} {price.currency}"
        selectors = (price.version, price.priority_class, price.plan)
        table.add_row(
            price.model, *(text or "any" for text in selectors), price.token_kind, cost,
            price.start_time.ToJsonString(), until,
        )  # fmt: skip
    Console(highlight=False).print(table)


@app.command()
def plan(
    tenant: Annotated[str, typer.Argument(help="Tenant.")],
    plan: Annotated[str, typer.Argument(help="Name of the plan, as prices name it.")],
    start: Start = None,
    usage_address: Address = None,
) -> None:
    """Give a tenant a plan from a moment on."""
    request = pb.SetPlanRequest(tenant=tenant, plan=plan, start_time=stamp(start))

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.SetPlanResponse:
        return await pb_grpc.PriceServiceStub(channel).SetPlan(request, metadata=metadata, timeout=15)

    call_usage(usage_address, work)
    print(f"{tenant} has the plan {plan} from {request.start_time.ToJsonString()} on.")


@app.command("rate-again")
def rate_again(
    since: Annotated[datetime | None, typer.Option(help="Requests that ended at or after this UTC time.")] = None,
    until: Annotated[datetime | None, typer.Option(help="Requests that ended before this UTC time.")] = None,
    usage_address: Address = None,
) -> None:
    """Rate requests by the prices set now; what changes is added as an adjustment."""
    request = pb.RateAgainRequest(
        start_time=None if since is None else stamp(since), end_time=None if until is None else stamp(until)
    )

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.RateAgainResponse:
        return await pb_grpc.PriceServiceStub(channel).RateAgain(request, metadata=metadata)

    print(f"{call_usage(usage_address, work).changed_row_count} requests now cost something else.")


def micros(text: str) -> int:
    """`0.15` → 150,000. Exits with one sentence for what is no amount of whole micro-units."""
    try:
        exact = Decimal(text) * MICROS
        whole = int(exact)
    except (InvalidOperation, ValueError, OverflowError):
        raise fail(f"{text} is not an amount.") from None
    if exact != whole:
        raise fail(f"{text} has more than six decimals.")
    return whole


def amount(micro_units: int) -> str:
    """Micro-units as a decimal number with at least two places."""
    sign, rest = ("-" if micro_units < 0 else ""), abs(micro_units)
    places = f"{rest % MICROS:06d}".rstrip("0").ljust(2, "0")
    return f"{sign}{rest // MICROS:,}.{places}"


def stamp(moment: datetime | None) -> timestamp_pb2.Timestamp:
    """A UTC time as the wire has it; now for None."""
    made = timestamp_pb2.Timestamp()
    made.FromDatetime(datetime.now(UTC) if moment is None else moment.replace(tzinfo=moment.tzinfo or UTC))
    return made
