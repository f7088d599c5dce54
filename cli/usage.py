"""`millrace usage`: export the ledger, sum it, look at one request, check what was exported."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import grpc
import typer
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from cli.price import stamp
from cli.tenant import Address
from cli.up import fail
from cli.usage_client import Metadata, call_usage
from cli.usage_costs import costs, workers
from cli.usage_dead_letters import dead_letters
from cli.usage_files import (
    PARQUET,
    LineWriter,
    ParquetWriter,
    RowWriter,
    SealWriter,
    file_digest,
    seal_path,
    whole_file,
)
from cli.usage_reconcile import reconcile
from cli.usage_sums import query, report, statement, tags_of
from cli.usage_verify import Tampered, verify_file
from services.usage.records import record_of

app = typer.Typer(no_args_is_help=True)


class Format(enum.Enum):
    """Shape of an export."""

    CSV = "csv"
    JSONL = "jsonl"
    PARQUET = "parquet"
    CLOUDEVENTS = "cloudevents"
    LAGO = "lago"


Take = Callable[[pb.ExportUsageResponse], None]
Since = Annotated[datetime | None, typer.Option(help="Requests that ended at or after this UTC time.")]
Until = Annotated[datetime | None, typer.Option(help="Requests that ended before this UTC time.")]


@app.command()
def export(
    tenant: Annotated[str, typer.Option(help="Only this tenant; every tenant unless given.")] = "",
    project: Annotated[str, typer.Option(help="Only this project.")] = "",
    key: Annotated[str, typer.Option(help="Only this key id.")] = "",
    model: Annotated[str, typer.Option(help="Only this model, or model@version.")] = "",
    tag: Annotated[list[str] | None, typer.Option(help="Only requests with this tag=value; repeat for more.")] = None,
    format: Annotated[Format, typer.Option(help="One record a line but for parquet; csv has a header.")] = Format.CSV,
    output: Annotated[Path | None, typer.Option(help="File to write; standard output unless given.")] = None,
    since: Since = None,
    until: Until = None,
    after_row: Annotated[int, typer.Option(min=0, help="Rows after this row_id, the last of an earlier export.")] = 0,
    state: Annotated[Path | None, typer.Option(help="File that keeps the cursor: go on where it says.")] = None,
    usage_address: Address = None,
) -> None:
    """Write the ledger row by row, oldest first. Memory stays flat however long it is.

    With --output the signed digests of the rows lie in <output>.seal, for `millrace usage verify`.
    """
    name, _, version = model.partition("@")
    request = pb.ExportUsageRequest(
        tenant=tenant,
        project=project,
        key_id=key,
        model=name,
        version=version,
        metadata=tags_of(tag),
        after_row_id=after_row,
        start_time=None if since is None else stamp(since),
        end_time=None if until is None else stamp(until),
    )
    if state is not None and state.exists():
        request.cursor = state.read_text().strip()
    if output is None:
        cursor = _to_stdout(request, format.value, usage_address)
    else:
        cursor = _to_file(request, format.value, output, usage_address)
    if state is not None:
        with whole_file(state) as out:
            out.write(cursor + "\n")


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


@app.command()
def verify(
    file: Annotated[Path | None, typer.Argument(help="File that `millrace usage export --output` wrote.")] = None,
    day: Annotated[str, typer.Option(help="A UTC day of the database instead, as 2026-03-01.")] = "",
    format: Annotated[Format | None, typer.Option(help="Format of the file, where its name does not say it.")] = None,
    key: Annotated[str, typer.Option(help="Public key that must have signed, in hexadecimal.")] = "",
    usage_address: Address = None,
) -> None:
    """Check that rows are as they were signed; names the first one that is altered or missing (exit code 1)."""
    if (file is None) == (day == ""):
        raise fail("Name a file or a --day.")
    if file is None:
        _verify_day(day, usage_address)
        return
    try:
        expected = bytes.fromhex(key) if key else None
    except ValueError:
        raise fail("--key is not hexadecimal.") from None
    try:
        seal = verify_file(file, None if format is None else format.value, expected)
    except Tampered as finding:
        _say_tampered(str(finding))
        raise typer.Exit(1) from None
    print(f"{file}: {seal.row_count:,} rows are as they were signed by {seal.public_key.hex()}.")


app.command()(query)
app.command()(statement)
app.command()(report)
app.command()(costs)
app.command()(workers)
app.command()(reconcile)
app.command()(dead_letters)


def _verify_day(day: str, usage_address: str | None) -> None:
    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.VerifyDayResponse:
        return await pb_grpc.UsageServiceStub(channel).VerifyDay(pb.VerifyDayRequest(day=day), metadata=metadata)

    answer = call_usage(usage_address, work)
    if answer.finding:
        _say_tampered(f"{day}: {answer.finding}")
        raise typer.Exit(1)
    print(f"{day}: {answer.seal.row_count:,} rows are as they were signed by {answer.seal.public_key.hex()}.")


def _say_tampered(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="red", markup=False)


def _to_stdout(request: pb.ExportUsageRequest, format: str, usage_address: str | None) -> str:
    try:
        writer: RowWriter = ParquetWriter(sys.stdout.buffer) if format == PARQUET else LineWriter(sys.stdout, format)
        last = _copy(request, lambda page: writer.write(page.rows), usage_address)
        writer.close()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`head`, say) has what it wanted; keep the interpreter from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    return last.cursor


def _to_file(request: pb.ExportUsageRequest, format: str, output: Path, usage_address: str | None) -> str:
    beside = seal_path(output)
    # The digests take their place last: without them a file says nothing, with them it is whole.
    with contextlib.suppress(OSError):
        beside.unlink(missing_ok=True)
    with whole_file(beside) as seal_out:
        seals = SealWriter(seal_out)
        with _writer(output, format) as writer:

            def take(page: pb.ExportUsageResponse) -> None:
                writer.write(page.rows)
                seals.add(page)

            last = _copy(request, take, usage_address)
        seals.close(last.seal, file_digest(output))
    return last.cursor


@contextlib.contextmanager
def _writer(output: Path, format: str) -> Iterator[RowWriter]:
    with whole_file(output, binary=format == PARQUET) as out:
        writer: RowWriter = ParquetWriter(out) if format == PARQUET else LineWriter(out, format)
        yield writer
        writer.close()


def _copy(request: pb.ExportUsageRequest, take: Take, usage_address: str | None) -> pb.ExportUsageResponse:
    """Hand every page to `take`; returns the last message, with cursor and seal."""
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.fields[rows]:,} rows"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("rows", total=None, rows=0)

        async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.ExportUsageResponse:
            page, rows = pb.ExportUsageResponse(), 0
            async for page in pb_grpc.UsageServiceStub(channel).ExportUsage(request, metadata=metadata):
                take(page)
                if page.rows:
                    rows += len(page.rows)
                    progress.update(task, total=page.last_row_id, completed=page.rows[-1].row_id, rows=rows)
            return page

        return call_usage(usage_address, work)
