"""`millrace tenant`: create, change and list tenants and their projects."""

from __future__ import annotations

from typing import Annotated

import typer
from millrace.usage.v1 import usage_service_pb2 as pb
from rich.console import Console
from rich.table import Table

from cli.limit_options import BatchOnlyOption, LengthCapOption, LimitOption, limits_of, shown
from cli.usage_client import ADDRESS_HELP, call_account

app = typer.Typer(no_args_is_help=True)
Address = Annotated[str | None, typer.Option("--usage-address", envvar="MILLRACE_USAGE_ADDRESS", help=ADDRESS_HELP)]
Name = Annotated[str, typer.Argument(help="Name: letters, digits, dots, dashes and underscores.")]
Weight = Annotated[float | None, typer.Option(min=0.001, max=1000, help="Share against other tenants; 1 at first.")]


@app.command()
def create(
    tenant: Name,
    display_name: Annotated[str, typer.Option(help="Name for people.")] = "",
    limit: LimitOption = None,
    length_cap: LengthCapOption = None,
    batch_only: BatchOnlyOption = False,
    weight: Weight = None,
    usage_address: Address = None,
) -> None:
    """Create a tenant. What has no limit is unlimited."""
    limits = limits_of(limit, length_cap, batch_only=batch_only)
    request = pb.CreateTenantRequest(tenant=tenant, display_name=display_name, limits=limits, weight=weight)
    created = call_account(usage_address, lambda stub, to: stub.CreateTenant(request, **to)).tenant
    print(f"Created tenant {created.tenant}. Next: millrace key create --tenant {created.tenant}")


@app.command()
def update(
    tenant: Name,
    display_name: Annotated[str | None, typer.Option(help="Name for people.")] = None,
    limit: LimitOption = None,
    length_cap: LengthCapOption = None,
    batch_only: BatchOnlyOption = False,
    no_limits: Annotated[bool, typer.Option("--no-limits", help="Take all limits away.")] = False,
    weight: Weight = None,
    usage_address: Address = None,
) -> None:
    """Change a tenant. Limits that are given take the place of all it had."""
    limits = limits_of(limit, length_cap, batch_only=batch_only)
    given = limits if no_limits or limits.ListFields() else None
    request = pb.UpdateTenantRequest(tenant=tenant, display_name=display_name, limits=given, weight=weight)
    updated = call_account(usage_address, lambda stub, to: stub.UpdateTenant(request, **to)).tenant
    print(f"Limits of {updated.tenant}:\n{shown(updated.limits)}")


@app.command("list")
def list_tenants(usage_address: Address = None) -> None:
    """List tenants and their limits."""
    table = Table("tenant", "name", "weight", "limits")
    answer = call_account(usage_address, lambda stub, to: stub.ListTenants(pb.ListTenantsRequest(), **to))
    for tenant in answer.tenants:
        table.add_row(tenant.tenant, tenant.display_name, f"{tenant.weight:g}", shown(tenant.limits))
    Console(highlight=False).print(table)


@app.command("create-project")
def create_project(
    tenant: Name,
    project: Name,
    display_name: Annotated[str, typer.Option(help="Name for people.")] = "",
    usage_address: Address = None,
) -> None:
    """Create a project, under which the usage of its keys is reported."""
    request = pb.CreateProjectRequest(tenant=tenant, project=project, display_name=display_name)
    created = call_account(usage_address, lambda stub, to: stub.CreateProject(request, **to)).project
    print(f"Created project {created.project} of {created.tenant}.")


@app.command()
def projects(
    tenant: Annotated[str, typer.Argument(help="Only this tenant's.")] = "", usage_address: Address = None
) -> None:
    """List projects."""
    table = Table("tenant", "project", "name")
    request = pb.ListProjectsRequest(tenant=tenant)
    for project in call_account(usage_address, lambda stub, to: stub.ListProjects(request, **to)).projects:
        table.add_row(project.tenant, project.project, project.display_name)
    Console(highlight=False).print(table)
