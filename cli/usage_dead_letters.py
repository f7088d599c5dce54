"""`millrace usage dead-letters`: what the ledger could not take, and another try."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc

from cli.tenant import Address
from cli.usage_client import Metadata, call_usage
from cli.usage_shapes import show_table


def dead_letters(
    replay: Annotated[bool, typer.Option("--replay", help="Try each again: what can be read now becomes a row.")]
    = False,
    usage_address: Address = None,
) -> None:  # fmt: skip
    """List events that could not become ledger rows, with their reasons; exit code 1 while there are any."""

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> tuple[int, list[pb.DeadLetter]]:
        stub = pb_grpc.UsageServiceStub(channel)
        taken = 0
        if replay:
            taken = (await stub.ReplayDeadLetters(pb.ReplayDeadLettersRequest(), metadata=metadata)).taken_count
        page = await stub.ListDeadLetters(pb.ListDeadLettersRequest(), metadata=metadata)
        letters = list(page.letters)
        while page.next_page_token:
            request = pb.ListDeadLettersRequest(page_token=page.next_page_token)
            page = await stub.ListDeadLetters(request, metadata=metadata)
            letters += page.letters
        return taken, letters

    taken, letters = call_usage(usage_address, work)
    if replay:
        print(f"{taken:,} became rows.")
    if not letters:
        print("There is no dead letter.")
        return
    rows = [[each.stream, each.entry_id, each.request_id, each.reason] for each in letters]
    show_table(["stream", "entry", "request", "reason"], rows, left=4)
    raise typer.Exit(1)
