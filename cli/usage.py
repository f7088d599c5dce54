"""`millrace usage`: export the ledger, look at one request."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated

import grpc
import typer
from google.protobuf import timestamp_pb2
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from cli.tenant import Address
from cli.up import fail
from cli.usage_client import Metadata, call_usage
from cli.usage_rows import Write, csv_writer, jsonl_writer, record_of

app = typer.Typer(no_args_is_help=True)


class Format(enum.Enum):
    """Shape of an export."""

    CSV = "csv"
    JSONL = "jsonl"


@app.command()
def export(
    tenant: Annotated[str, typer.Option(help="Only this tenant; every tenant unless given.")] = "",
    format: Annotated[Format, typer.Option(help="csv has a header line; jsonl is one object a line.")] = Format.CSV,
    output: Annotated[Path | None, typer.Option(help="File to write; standard output unless given.")] = None,
    since: Annotated[datetime | None, typer.Option(help="Requests that ended at or after this UTC time.")] = None,
    until: Annotated[datetime | None, typer.Option(help="Requests that ended before this UTC time.")] = None,
    after_row: Annotated[int, typer.Option(min=0, help="Rows after this row_id, the last of an earlier export.")] = 0,
    usage_address: Address = None,
) -> None:
    """Write the ledger row by row, oldest first. Memory stays flat however long it is."""
    request = pb.ExportUsageRequest(tenant=tenant, after_row_id=after_row)
    for name, moment in (("start_time", since), ("end_time", until)):
        if moment is not None:
            stamp = timestamp_pb2.Timestamp()
            stamp.FromDatetime(moment.replace(tzinfo=UTC))
            getattr(request, name).CopyFrom(stamp)
    with _target(output) as out:
        write = csv_writer(out) if format is Format.CSV else jsonl_writer(out)
        _copy(request, write, usage_address)


@app.command()
def show(
    request_id: Annotated[str, typer.Argument(help="Request id, as the x-request-id header gave it.")],
    usage_address: Address = None,
) -> None:
    """Show the ledger row of one request."""

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.GetUsageResponse:
        stub = pb_grpc.UsageServiceStub(channel)
        return await stub.GetUsage(pb.GetUsageRequest(request_id=request_id), metadata=metadata, timeout=15)

    print(json.dumps(record_of(call_usage(usage_address, work).row), indent=2, ensure_ascii=False))


def _copy(request: pb.ExportUsageRequest, write: Write, usage_address: str | None) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} rows"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("rows", total=None)

        async def work(channel: grpc.aio.Channel, metadata: Metadata) -> None:
            async for page in pb_grpc.UsageServiceStub(channel).ExportUsage(request, metadata=metadata):
                for row in page.rows:
                    write(row)
                progress.advance(task, len(page.rows))

        try:
            call_usage(usage_address, work)
        except BrokenPipeError:
            # The reader (`head`, say) has what it wanted; keep the interpreter from flushing into the closed pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _target(output: Path | None) -> Iterator[IO[str]]:
    if output is None:
        yield sys.stdout
        return
    partial = output.with_name(f".{output.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as out:
            yield out
        partial.replace(output)
    except OSError as error:
        raise fail(f"{output} cannot be written: {error.strerror}.") from error
    finally:
        partial.unlink(missing_ok=True)
