"""`millrace admin-key`: create, list and revoke keys of administrators."""

from __future__ import annotations

from typing import Annotated

import typer
from millrace.usage.v1 import usage_service_pb2 as pb
from rich.console import Console
from rich.table import Table

from cli.key import Expires, KeyId, stamp
from cli.tenant import Address
from cli.usage_client import call_account

app = typer.Typer(no_args_is_help=True)


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Who acts with it, as audit records say.")],
    expires: Expires = None,
    usage_address: Address = None,
) -> None:
    """Create a key of an administrator and print its secret, which is stored nowhere."""
    request = pb.CreateAdminKeyRequest(name=name, expire_time=stamp(expires))
    print(call_account(usage_address, lambda stub, to: stub.CreateAdminKey(request, **to)).secret)


@app.command("list")
def list_keys(usage_address: Address = None) -> None:
    """List keys of administrators; secrets are not stored and so not shown."""
    table = Table("key", "name", "created", "state")
    answer = call_account(usage_address, lambda stub, to: stub.ListAdminKeys(pb.ListAdminKeysRequest(), **to))
    for key in answer.keys:
        state = "revoked" if key.HasField("revoke_time") else "active"
        table.add_row(key.key_id, key.name, f"{key.create_time.ToDatetime():%Y-%m-%d %H:%M}", state)
    Console(highlight=False).print(table)


@app.command()
def revoke(key_id: KeyId, usage_address: Address = None) -> None:
    """Revoke a key of an administrator, at once."""
    request = pb.RevokeAdminKeyRequest(key_id=key_id)
    print(f"Revoked {call_account(usage_address, lambda stub, to: stub.RevokeAdminKey(request, **to)).key.key_id}.")
