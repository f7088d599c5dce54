"""Blocks inside the Prefill stream itself: in parts that respect message limits, at the pace that the receiver reads.

The stream carries the bytes, so what comes late is dropped with it and no slot ever needs quarantine.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.worker.v1 import worker_service_pb2 as pb

from services.common.lifecycle import crash_point
from services.worker.engine.kv_blocks import KVBlock
from services.worker.kv_transport import BlockSender, Write

PART_BYTES = 1 << 20


class GrpcTransfer:
    """See `KVTransfer`."""

    name = "grpc"
    is_one_sided = False

    def offer(self, start: pb.PrefillStart) -> None:
        """Nothing to add."""

    def accepts(self, start: pb.PrefillStart) -> bool:
        """Always."""
        return True

    async def sender(self, start: pb.PrefillStart, write: Write) -> BlockSender:
        """See `KVTransfer.sender`."""
        return _StreamSender(write)

    async def fence(self) -> None:
        """What comes late is dropped with its stream."""

    async def close(self) -> None:
        """Nothing is held."""


class _StreamSender:
    def __init__(self, write: Write) -> None:
        self._write = write

    async def send(self, blocks: Sequence[tuple[int, KVBlock]]) -> None:
        """See `BlockSender.send`. A write returns when there is room in the stream's window."""
        for slot, block in blocks:
            for offset in range(0, len(block.payload), PART_BYTES):
                data = block.payload[offset : offset + PART_BYTES]
                await self._write(pb.PrefillResponse(part=pb.KVPart(slot=slot, offset=offset, data=data)))
                crash_point("transfer.midway")

    async def close(self) -> None:
        """Nothing is under way between two writes."""
