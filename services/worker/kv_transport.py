"""The port for moving blocks between workers, and what both sides of a transfer agree on first.

A receiver leases slots and names them to the sender; the sender puts one block into each and says so on the Prefill
stream, whose order is the order of the blocks. What moves the bytes is a transport behind `KVTransfer`: gRPC streaming
always, NIXL where both sides have it. Called by the prefill desk (sender) and by the remote prefills (receiver).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from millrace.worker.v1 import worker_service_pb2 as pb

from services.worker.engine.kv_blocks import KVBlock, KVLayout
from services.worker.kv_staging import StagingArea

Write = Callable[[pb.PrefillResponse], Awaitable[None]]


class TransferError(Exception):
    """Blocks cannot be put where they should go; the text has no request content."""


class BlockSender(Protocol):
    """The sending side of one request."""

    async def send(self, blocks: Sequence[tuple[int, KVBlock]]) -> None:
        """Put each block's bytes into the receiver's slot; they are there when this returns. Raises TransferError."""
        ...

    async def close(self) -> None:
        """Return once nothing can be written any more, whatever became of what was being sent."""
        ...


class KVTransfer(Protocol):
    """One way to move blocks. `name` labels metrics.

    `is_one_sided`: the sender writes into slots by itself. A slot is then certain to be written no more only when the
    sender has said that it ended, or after `fence`.
    """

    name: str
    is_one_sided: bool

    def offer(self, start: pb.PrefillStart) -> None:
        """As receiver: add to the request what a sender needs to write into the staging area."""
        ...

    def accepts(self, start: pb.PrefillStart) -> bool:
        """As sender: True when the receiver can be written to in this way."""
        ...

    async def sender(self, start: pb.PrefillStart, write: Write) -> BlockSender:
        """As sender: get ready for one request; `write` puts messages into its stream. Raises TransferError."""
        ...

    async def fence(self) -> None:
        """As receiver: cut off every sender, so that nothing that is under way can land any more.

        Raises TransferError when no block can be taken in afterwards; it may be tried again.
        """
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


def layout_message(layout: KVLayout, *, block_size: int) -> pb.KVLayout:
    """A layout on the wire."""
    return pb.KVLayout(
        dtype=layout.dtype, shape=layout.shape, value_byte_count=layout.value_bytes, block_size=block_size
    )


def share_of(staging: StagingArea, *, batch_bytes: int) -> int:
    """Slots that one request leases: two batches of blocks, or a quarter of the area if that is more."""
    batch = max(1, batch_bytes // staging.block_bytes)
    return max(2 * batch, staging.slot_count // 4)


@dataclasses.dataclass(frozen=True, slots=True)
class Reception:
    """How a worker takes blocks in. `lease_s`: how long each side waits for a sign of the other."""

    transfer: KVTransfer
    staging: StagingArea
    layout: KVLayout
    lease_s: float
