"""`millrace key`: create, list and revoke API keys."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import grpc
import typer
from google.protobuf import timestamp_pb2
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc
from rich.console import Console
from rich.table import Table

from cli.tenant import Address
from cli.usage_client import Metadata, call_usage

app = typer.Typer(no_args_is_help=True)


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="Tenant the key belongs to.")],
    name: Annotated[str, typer.Option(help="Name for people.")] = "",
    project: Annotated[str, typer.Option(help="Project that usage is reported under.")] = "",
    model: Annotated[list[str] | None, typer.Option(help="Model the key may use; repeat it. All unless given.")] = None,
    expires: Annotated[datetime | None, typer.Option(help="UTC time after which the key is refused.")] = None,
    usage_address: Address = None,
) -> None:
    """Create a key and print its secret. It is shown this once and stored nowhere."""
    request = pb.CreateKeyRequest(tenant=tenant, display_name=name, models=model or [], project=project)
    if expires is not None:
        stamp = timestamp_pb2.Timestamp()
        stamp.FromDatetime(expires.replace(tzinfo=UTC))
        request.expire_time.CopyFrom(stamp)

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.CreateKeyResponse:
        return await pb_grpc.AccountServiceStub(channel).CreateKey(request, metadata=metadata, timeout=15)

    print(call_usage(usage_address, work).secret)


@app.command("list")
def list_keys(
    tenant: Annotated[str, typer.Option(help="Only this tenant's keys.")] = "", usage_address: Address = None
) -> None:
    """List keys; secrets are not stored and so not shown."""

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.ListKeysResponse:
        stub = pb_grpc.AccountServiceStub(channel)
        return await stub.ListKeys(pb.ListKeysRequest(tenant=tenant), metadata=metadata, timeout=15)

    table = Table("key", "tenant", "project", "name", "models", "created", "state")
    for key in call_usage(usage_address, work).keys:
        state = "revoked" if key.HasField("revoke_time") else "active"
        if key.HasField("expire_time"):
            state += f", expires {key.expire_time.ToDatetime():%Y-%m-%d %H:%M}"
        models = ", ".join(key.models) or "all"
        created = f"{key.create_time.ToDatetime():%Y-%m-%d %H:%M}"
        table.add_row(key.key_id, key.tenant, key.project, key.display_name, models, created, state)
    Console(highlight=False).print(table)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="Key id, as `millrace key list` shows it.")],
    usage_address: Address = None,
) -> None:
    """Revoke a key; it is refused everywhere within five seconds."""

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.RevokeKeyResponse:
        stub = pb_grpc.AccountServiceStub(channel)
        return await stub.RevokeKey(pb.RevokeKeyRequest(key_id=key_id), metadata=metadata, timeout=15)

    print(f"Revoked {call_usage(usage_address, work).key.key_id}.")
