"""What one request that waits for a peer has in hand: its slots, its call, what has come. And the channels to peers.

Owned by the remote prefills, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import grpc
from millrace.worker.v1 import worker_service_pb2 as pb
from millrace.worker.v1 import worker_service_pb2_grpc

from services.common.grpc_client import Dial
from services.worker.engine.kv_blocks import KVBlock
from services.worker.engine.kv_transfer import ImportOutcome, RemotePrefill
from services.worker.kv_moves import Name
from services.worker.kv_staging import StagingArea

MAX_CHANNELS = 64
Call = grpc.aio.StreamStreamCall[pb.PrefillRequest, pb.PrefillResponse]


class PeerChannels:
    """Channels to peers by address, those longest unused closed first."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    def stub(self, address: str) -> worker_service_pb2_grpc.WorkerServiceAsyncStub:
        """To call the worker at `address`."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._dial(address)
        self._channels.move_to_end(address)
        return worker_service_pb2_grpc.WorkerServiceStub(channel)

    async def trim(self) -> None:
        """Keep `MAX_CHANNELS`."""
        while len(self._channels) > MAX_CHANNELS:
            _, oldest = self._channels.popitem(last=False)
            await oldest.close()

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


class PeerFetch:
    """One request's staging slots, and what has come so far."""

    def __init__(self, prefill: RemotePrefill, staging: StagingArea, slots: list[int]) -> None:
        self.name: Name = (prefill.key.request_id, prefill.key.epoch)
        self.prefill = prefill
        self.slots = slots
        # Slots that the peer may write; the others wait to be granted (again).
        self.granted = set(slots)
        self.freed: list[int] = []
        self.block_count = 0
        # The peer has said that it writes no more, or was never asked.
        self.is_settled = True
        self.transport = ""
        self.call: Call | None = None
        self.reading: asyncio.Task[object] | None = None
        # What the engine said to the blocks so far.
        self.outcome = ImportOutcome.WAITING
        self.told = asyncio.Event()
        self.wake = asyncio.Event()
        self._staging = staging

    def tell(self, outcome: ImportOutcome) -> None:
        """The engine has taken blocks in, or has not. An orphan's request has ended, which ends this too."""
        if outcome is not ImportOutcome.ORPHAN:
            self.outcome = outcome
            self.told.set()

    def take_part(self, part: pb.KVPart) -> None:
        """Raises ValueError for a part of a slot that is not granted."""
        if part.slot not in self.granted:
            raise ValueError("a part of a slot that was not granted")
        self._staging.write(part.slot, part.offset, part.data)

    def take_landed(self, landed: pb.KVLanded) -> tuple[KVBlock, ...]:
        """Copies of the blocks, in order; their slots can be granted again. Raises ValueError for other slots."""
        blocks = []
        for block in landed.blocks:
            if block.slot not in self.granted:
                raise ValueError("a block in a slot that was not granted")
            self.granted.remove(block.slot)
            self.freed.append(block.slot)
            blocks.append(KVBlock(block.full_hash, self._staging.read(block.slot), block.checksum))
        self.block_count += len(blocks)
        return tuple(blocks)

    def take_freed(self) -> list[int]:
        """Slots to grant again, as long as blocks are missing."""
        freed, self.freed = self.freed, []
        missing = len(self.prefill.full_hashes) - self.block_count - len(self.granted)
        again = freed[: max(0, missing)]
        self.granted.update(again)
        return again
