"""`millrace key`: create, change, list, rotate and revoke API keys."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from google.protobuf import duration_pb2, timestamp_pb2
from millrace.usage.v1 import usage_service_pb2 as pb
from rich.console import Console
from rich.table import Table

from cli.limit_options import BatchOnlyOption, LengthCapOption, LimitOption, limits_of, shown
from cli.tenant import Address
from cli.usage_client import call_account

app = typer.Typer(no_args_is_help=True)
KeyId = Annotated[str, typer.Argument(help="Key id, as `millrace key list` shows it.")]
Weight = Annotated[float | None, typer.Option(min=0.001, max=1000, help="In place of the tenant's.")]
Expires = Annotated[datetime | None, typer.Option(help="UTC time after which the key is refused.")]


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="Tenant the key belongs to.")],
    name: Annotated[str, typer.Option(help="Name for people.")] = "",
    project: Annotated[str, typer.Option(help="Project that usage is reported under; made if there is none.")] = "",
    model: Annotated[list[str] | None, typer.Option(help="Model the key may use; repeat it. All unless given.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="inference (unless given), usage:read; repeat it.")] = None,
    expires: Expires = None,
    limit: LimitOption = None,
    length_cap: LengthCapOption = None,
    batch_only: BatchOnlyOption = False,
    weight: Weight = None,
    usage_address: Address = None,
) -> None:
    """Create a key and print its secret, which is stored nowhere. Its limits hold beside the tenant's."""
    request = pb.CreateKeyRequest(
        tenant=tenant,
        display_name=name,
        models=model or [],
        project=project,
        limits=limits_of(limit, length_cap, batch_only=batch_only),
        weight=weight,
        scopes=scope or [],
        expire_time=stamp(expires),
    )
    print(call_account(usage_address, lambda stub, to: stub.CreateKey(request, **to)).secret)


@app.command()
def update(
    key_id: KeyId,
    limit: LimitOption = None,
    length_cap: LengthCapOption = None,
    batch_only: BatchOnlyOption = False,
    no_limits: Annotated[bool, typer.Option("--no-limits", help="Take all limits of its own away.")] = False,
    weight: Weight = None,
    usage_address: Address = None,
) -> None:
    """Change a key. Limits that are given take the place of all it had."""
    limits = limits_of(limit, length_cap, batch_only=batch_only)
    given = limits if no_limits or limits.ListFields() else None
    request = pb.UpdateKeyRequest(key_id=key_id, limits=given, weight=weight)
    key = call_account(usage_address, lambda stub, to: stub.UpdateKey(request, **to)).key
    print(f"Limits of {key.key_id}:\n{shown(key.limits)}")


@app.command("list")
def list_keys(
    tenant: Annotated[str, typer.Option(help="Only this tenant's keys.")] = "", usage_address: Address = None
) -> None:
    """List keys; secrets are not stored and so not shown."""
    table = Table("key", "tenant", "project", "name", "models", "scopes", "limits", "created", "state")
    request = pb.ListKeysRequest(tenant=tenant)
    for key in call_account(usage_address, lambda stub, to: stub.ListKeys(request, **to)).keys:
        state = "revoked" if key.HasField("revoke_time") else "active"
        if key.HasField("expire_time"):
            state += f", expires {key.expire_time.ToDatetime():%Y-%m-%d %H:%M}"
        models, scopes = ", ".join(key.models) or "all", ", ".join(key.scopes)
        created = f"{key.create_time.ToDatetime():%Y-%m-%d %H:%M}"
        names = (key.key_id, key.tenant, key.project, key.display_name)
        table.add_row(*names, models, scopes, shown(key.limits), created, state)
    Console(highlight=False).print(table)


@app.command()
def rotate(
    key_id: KeyId,
    overlap: Annotated[int, typer.Option(min=0, help="Seconds for which the old key stays valid.")] = 86_400,
    usage_address: Address = None,
) -> None:
    """Print the secret of a new key that may do what the old one may; the old one ends after the overlap."""
    request = pb.RotateKeyRequest(key_id=key_id, overlap=duration_pb2.Duration(seconds=overlap))
    answer = call_account(usage_address, lambda stub, to: stub.RotateKey(request, **to))
    print(answer.secret)
    ends = answer.old_key.expire_time.ToDatetime()
    Console(stderr=True, highlight=False).print(f"{key_id} is valid until {ends:%Y-%m-%d %H:%M:%S} UTC.")


@app.command()
def revoke(key_id: KeyId, usage_address: Address = None) -> None:
    """Revoke a key; it is refused everywhere within five seconds."""
    request = pb.RevokeKeyRequest(key_id=key_id)
    print(f"Revoked {call_account(usage_address, lambda stub, to: stub.RevokeKey(request, **to)).key.key_id}.")


def stamp(time: datetime | None) -> timestamp_pb2.Timestamp | None:
    """A UTC time as it is sent; None for none."""
    if time is None:
        return None
    sent = timestamp_pb2.Timestamp()
    sent.FromDatetime(time.replace(tzinfo=UTC))
    return sent
