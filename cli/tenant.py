"""`millrace tenant`: create and list tenants."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc
from rich.console import Console
from rich.table import Table

from cli.usage_client import ADDRESS_HELP, Metadata, call_usage

app = typer.Typer(no_args_is_help=True)
Address = Annotated[str | None, typer.Option("--usage-address", envvar="MILLRACE_USAGE_ADDRESS", help=ADDRESS_HELP)]


@app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Name: letters, digits, dots, dashes and underscores.")],
    display_name: Annotated[str, typer.Option(help="Name for people.")] = "",
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="No limit unless given.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Prompt and output; no limit if absent.")] = None,
    concurrent_requests: Annotated[int | None, typer.Option(min=1, help="No limit unless given.")] = None,
    budget_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in all; no limit unless given.")] = None,
    weight: Annotated[float, typer.Option(min=0.001, max=1000, help="Share against other tenants.")] = 1.0,
    usage_address: Address = None,
) -> None:
    """Create a tenant."""
    limits = pb.Limits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent_request_count=concurrent_requests,
        budget_token_count=budget_tokens,
    )
    request = pb.CreateTenantRequest(tenant=tenant, display_name=display_name, limits=limits, weight=weight)

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.CreateTenantResponse:
        return await pb_grpc.AccountServiceStub(channel).CreateTenant(request, metadata=metadata, timeout=15)

    created = call_usage(usage_address, work).tenant
    print(f"Created tenant {created.tenant}. Next: millrace key create --tenant {created.tenant}")


@app.command("list")
def list_tenants(usage_address: Address = None) -> None:
    """List tenants and their limits."""

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.ListTenantsResponse:
        stub = pb_grpc.AccountServiceStub(channel)
        return await stub.ListTenants(pb.ListTenantsRequest(), metadata=metadata, timeout=15)

    table = Table("tenant", "name", "weight", "requests/min", "tokens/min", "concurrent", "budget")
    for tenant in call_usage(usage_address, work).tenants:
        limits = tenant.limits
        names = ("requests_per_minute", "tokens_per_minute", "concurrent_request_count", "budget_token_count")
        shown = [str(getattr(limits, n)) if limits.HasField(n) else "–" for n in names]  # type: ignore[arg-type]
        table.add_row(tenant.tenant, tenant.display_name, f"{tenant.weight:g}", *shown)
    Console(highlight=False).print(table)
