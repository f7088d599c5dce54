"""`millrace audit`: who changed what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from google.protobuf import json_format
from millrace.usage.v1 import usage_service_pb2 as pb
from rich.console import Console
from rich.table import Table

from cli.tenant import Address
from cli.usage_client import call_account

app = typer.Typer(no_args_is_help=True)
PAGE = 500


@app.command("list")
def list_acts(
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
    after: Annotated[int, typer.Option(min=0, help="Records after this one.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, with what was before and after.")
    ] = False,
    usage_address: Address = None,
) -> None:
    """List administrative acts, oldest first."""
    table = Table("id", "time", "who", "what", "tenant", "subject", "changed")
    while True:
        records = _page(usage_address, pb.ListAuditRequest(tenant=tenant, after_audit_id=after, page_size=PAGE))
        for act in records:
            after = act.audit_id
            if as_json:
                print(json.dumps(json_format.MessageToDict(act, preserving_proto_field_name=True), ensure_ascii=False))
            else:
                time = f"{act.time.ToDatetime():%Y-%m-%d %H:%M:%S}"
                table.add_row(str(after), time, act.actor, act.action, act.tenant, act.subject, _changed(act))
        if len(records) < PAGE:
            break
    if not as_json:
        Console(highlight=False).print(table)


def _page(address: str | None, request: pb.ListAuditRequest) -> Sequence[pb.AuditRecord]:
    return call_account(address, lambda stub, to: stub.ListAudit(request, **to)).records


def _changed(act: pb.AuditRecord) -> str:
    before, after = json_format.MessageToDict(act.before), json_format.MessageToDict(act.after)
    return ", ".join(sorted(name for name in before | after if before.get(name) != after.get(name))) if before else ""
