"""What every transport of KV blocks must do: the right bytes in the right slots, bounded, and an end that is an end."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from millrace.worker.v1 import worker_service_pb2 as pb

from services.worker.engine.kv_blocks import KVBlock, KVLayout, is_intact, sealed
from services.worker.kv_staging import StagingArea
from services.worker.kv_transport import BlockSender, KVTransfer, TransferError
from services.worker.runtime.transfers.grpc_stream import GrpcTransfer
from services.worker.runtime.transfers.nixl import NixlTransfer, nixl_module

LAYOUT = KVLayout("float32", (3, 1000, 100), 4)  # 1.2 MB: more than one part of a stream
BATCH = 2


class Ends:
    """A receiver and a sender of the same transport, in one process."""

    def __init__(self, name: str) -> None:
        self.staging = StagingArea(block_bytes=LAYOUT.block_bytes, area_bytes=8 * LAYOUT.block_bytes)
        self.stream_open = True
        self.receiver, self.sender_side = self._make(name, self.staging), self._make(name, self.staging_of_sender())

    def staging_of_sender(self) -> StagingArea:
        return StagingArea(block_bytes=LAYOUT.block_bytes, area_bytes=4 * LAYOUT.block_bytes)

    def _make(self, name: str, staging: StagingArea) -> KVTransfer:
        if name == "grpc":
            return GrpcTransfer()
        api = nixl_module()
        assert api is not None
        return NixlTransfer(api, staging, agent=f"test-{random.randbytes(8).hex()}", batch=BATCH)

    async def write(self, message: pb.PrefillResponse) -> None:
        """The stream between them; what comes after its end is lost."""
        if self.stream_open:
            self.staging.write(message.part.slot, message.part.offset, message.part.data)
        await asyncio.sleep(0)

    async def sender(self) -> BlockSender:
        start = pb.PrefillStart()
        self.receiver.offer(start)
        assert self.sender_side.accepts(start)
        return await self.sender_side.sender(start, self.write)

    def holds(self, slot: int, block: KVBlock) -> bool:
        return is_intact(block._replace(payload=self.staging.read(slot)), LAYOUT)


@pytest.fixture(params=["grpc", pytest.param("nixl", marks=pytest.mark.skipif(nixl_module() is None, reason="nixl"))])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    made = Ends(request.param)
    yield made
    await made.sender_side.close()
    await made.receiver.close()
    made.staging.check_invariants()


def make_block(number: int) -> KVBlock:
    return sealed(bytes([number]) * 32, random.Random(number).randbytes(LAYOUT.block_bytes), LAYOUT)


async def test_each_block_lies_whole_in_its_slot_when_send_returns(ends: Ends) -> None:
    slots = ends.staging.lease(5)
    blocks = [make_block(number) for number in range(5)]
    sender = await ends.sender()

    # More at once than one batch, out of the order of slots, and a slot used again.
    await sender.send(list(zip(slots[::-1], blocks, strict=True)))
    first = [ends.holds(slot, block) for slot, block in zip(slots[::-1], blocks, strict=True)]
    again = make_block(9)
    await sender.send([(slots[2], again)])
    await sender.close()

    assert first == [True] * 5
    assert ends.holds(slots[2], again)
    assert ends.holds(slots[0], blocks[4])
    assert not ends.staging.memory[[slot for slot in range(8) if slot not in slots]].any()


async def test_two_senders_at_once_do_not_mix(ends: Ends) -> None:
    slots = ends.staging.lease(4)
    blocks = [make_block(number) for number in range(4)]
    senders = [await ends.sender(), await ends.sender()]

    await asyncio.gather(
        senders[0].send(list(zip(slots[:2], blocks[:2], strict=True))),
        senders[1].send(list(zip(slots[2:], blocks[2:], strict=True))),
    )
    for sender in senders:
        await sender.close()

    assert all(ends.holds(slot, block) for slot, block in zip(slots, blocks, strict=True))


async def test_nothing_is_written_after_a_cancelled_sender_has_closed(ends: Ends) -> None:
    slots = ends.staging.lease(8)
    sender = await ends.sender()
    sending = asyncio.create_task(sender.send([(slot, make_block(slot)) for slot in slots]))
    await asyncio.sleep(0)
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending

    await sender.close()
    ends.staging.memory[:] = 7
    other = await ends.sender()
    await other.send([(slots[0], make_block(1))])
    await other.close()

    assert ends.holds(slots[0], make_block(1))
    assert (ends.staging.memory[slots[1:]] == 7).all()


async def test_nothing_lands_after_a_fence_until_the_receiver_is_asked_again(ends: Ends) -> None:
    slots = ends.staging.lease(2)
    late = await ends.sender()
    await late.send([(slots[0], make_block(1))])
    ends.stream_open = False
    await ends.receiver.fence()
    ends.staging.memory[:] = 7

    with contextlib.suppress(TransferError):
        await late.send([(slots[0], make_block(2))])
    await late.close()
    assert (ends.staging.memory == 7).all()

    ends.stream_open = True
    sender = await ends.sender()
    await sender.send([(slots[1], make_block(3))])
    await sender.close()
    assert ends.holds(slots[1], make_block(3))
