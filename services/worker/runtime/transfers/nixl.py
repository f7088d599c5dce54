"""Blocks by NIXL: the sender writes them into the receiver's staging memory (UCX: RDMA, shared memory, TCP).

Owns this process's agent, the registration of the staging area, and memory to send from. A write cannot be recalled: it
ends, or the receiver closes its agent (`fence`). Transports that write into another process's memory without its help
are left out, since nothing could fence them. Only this file imports nixl, which is an optional extra.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import structlog
from millrace.worker.v1 import worker_service_pb2 as pb

from services.common.lifecycle import crash_point
from services.worker.engine.kv_blocks import KVBlock
from services.worker.kv_staging import StagingArea
from services.worker.kv_transport import BlockSender, TransferError, Write

# What a write may take once its sender is to close, before the receiver is cut off.
CLOSE_S = 5.0
MAX_REMOTES = 64
_POLL_S = 0.001
# How long the agent's own thread sleeps when nothing is to be done; what comes wakes it. NIXL's own default is not at
# all, which takes a core for good.
_SLEEP_US = 10_000
_ENVIRONMENT = {"UCX_TLS": "^cma,xpmem,knem", "UCX_WARN_UNUSED_ENV_VARS": "n", "NIXL_LOG_LEVEL": "WARN"}


def nixl_module() -> Any | None:
    """The library, ready to use; None where the extra `transfer` is not installed."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import nixl._api as api
    except ImportError:
        return None
    if not isinstance(api.nixlBind, _Bindings):
        api.nixlBind = _Bindings(api.nixlBind)
    return api


class _Bindings:
    """NIXL's bindings, but that an agent's thread sleeps: `nixl_agent` leaves no way to say so."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        """An agent that has this config but for the sleep of its thread."""
        config.pthrDelay = _SLEEP_US
        return self._bindings.nixlAgent(name, config)


class NixlTransfer:
    """See `KVTransfer`. Sends from an area as large as the staging area."""

    name = "nixl"
    is_one_sided = True

    def __init__(self, api: Any, staging: StagingArea, *, agent: str, batch: int) -> None:
        """`batch`: blocks that one sender has under way. Raises TransferError when NIXL has no way to move bytes."""
        self._api = api
        self._staging = staging
        self._source = StagingArea(block_bytes=staging.block_bytes, area_bytes=staging.memory.nbytes)
        self._batch = batch
        self._name = agent
        self._incarnation = 0
        self._remotes: dict[str, bytes] = {}
        self._open()

    def offer(self, start: pb.PrefillStart) -> None:
        """See `KVTransfer.offer`."""
        memory = self._staging.memory
        start.nixl.agent = self._agent.name
        start.nixl.agent_metadata = self._agent.get_agent_metadata()
        start.nixl.base_address = memory.ctypes.data
        start.nixl.slot_byte_count = self._staging.block_bytes

    def accepts(self, start: pb.PrefillStart) -> bool:
        """See `KVTransfer.accepts`."""
        return start.HasField("nixl") and start.nixl.slot_byte_count == self._source.block_bytes

    async def sender(self, start: pb.PrefillStart, write: Write) -> BlockSender:
        """See `KVTransfer.sender`."""
        target = start.nixl
        if self._remotes.get(target.agent) != target.agent_metadata:
            # A receiver that closed its agent comes back under the next number.
            same = target.agent.rpartition("-")[0]
            gone = [each for each in self._remotes if each.rpartition("-")[0] == same]
            for agent in gone + list(self._remotes)[: max(0, len(self._remotes) + 1 - MAX_REMOTES)]:
                self.forget(agent)
            try:
                await asyncio.to_thread(self._agent.add_remote_agent, target.agent_metadata)
            except Exception as error:
                raise TransferError(f"the receiver's agent is not reachable ({type(error).__name__})") from error
            self._remotes[target.agent] = target.agent_metadata
        slots = self._source.lease(self._batch)
        if not slots:
            raise TransferError("there is no memory to send from")
        return _NixlSender(self, target, slots)

    async def fence(self) -> None:
        """See `KVTransfer.fence`. Takes as long as it takes to start an agent, about half a second."""
        await asyncio.to_thread(self._close)
        await asyncio.to_thread(self._open)

    async def close(self) -> None:
        """See `KVTransfer.close`."""
        self._close()

    # --- for the senders -----------------------------------------------------------------------------------------
    def post(self, target: pb.NixlTarget, pairs: Sequence[tuple[int, int]]) -> Any:
        """Start to write source slots into the receiver's slots; returns the handle. Raises what NIXL raises."""
        size, agent = self._source.block_bytes, self._agent
        base = self._source.memory.ctypes.data
        local = agent.get_xfer_descs([(base + source * size, size, 0) for source, _ in pairs], "DRAM")
        there = [(target.base_address + slot * size, size, 0) for _, slot in pairs]
        remote = agent.get_xfer_descs(there, "DRAM")
        handle = agent.initialize_xfer("WRITE", local, remote, target.agent)
        agent.transfer(handle)
        return handle

    def is_under_way(self, handle: Any) -> bool:
        """False once written. Raises TransferError when it failed."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise TransferError(f"a write failed ({type(error).__name__})") from error
        if state not in ("PROC", "DONE"):
            raise TransferError("a write failed")
        return bool(state == "PROC")

    def fill(self, slot: int, payload: bytes) -> None:
        """Put a block into a source slot."""
        self._source.write(slot, 0, payload)

    def release(self, handle: Any, slots: Sequence[int]) -> None:
        """The sender is done with these."""
        try:
            if handle is not None and self._agent is not None:
                self._agent.release_xfer_handle(handle)
        except Exception as error:
            structlog.get_logger().warning("nixl_release_failed", error=type(error).__name__)
        self._source.release(slots)

    def forget(self, agent: str) -> None:
        """Cut a receiver off: nothing is written to it any more."""
        if self._remotes.pop(agent, None) is not None:
            try:
                self._agent.remove_remote_agent(agent)
            except Exception as error:
                structlog.get_logger().info("nixl_remove_failed", error=type(error).__name__)

    def _open(self) -> None:
        self._incarnation += 1
        api = self._api
        try:
            self._agent = api.nixl_agent(
                f"{self._name}-{self._incarnation}",
                api.nixl_agent_config(
                    True, False, 0, backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
                ),
            )
            areas = [(each.memory.ctypes.data, each.memory.nbytes, 0, "") for each in (self._staging, self._source)]
            self._registered = self._agent.register_memory(areas, "DRAM")
        except Exception as error:
            raise TransferError(f"NIXL cannot be used ({type(error).__name__})") from error

    def _close(self) -> None:
        if self._agent is None:
            return
        for agent in list(self._remotes):
            self.forget(agent)
        try:
            self._agent.deregister_memory(self._registered)
        except Exception as error:
            structlog.get_logger().warning("nixl_deregister_failed", error=type(error).__name__)
        # An agent that nobody holds is closed, whatever is registered.
        self._agent = self._registered = None


class _NixlSender:
    def __init__(self, transfer: NixlTransfer, target: pb.NixlTarget, slots: list[int]) -> None:
        self._transfer = transfer
        self._target = target
        self._slots = slots
        self._handle: Any = None

    async def send(self, blocks: Sequence[tuple[int, KVBlock]]) -> None:
        """See `BlockSender.send`."""
        for first in range(0, len(blocks), len(self._slots)):
            part = blocks[first : first + len(self._slots)]
            pairs = [(source, slot) for source, (slot, _) in zip(self._slots, part, strict=False)]
            for (source, _), (_, block) in zip(pairs, part, strict=True):
                self._transfer.fill(source, block.payload)
            try:
                self._handle = self._transfer.post(self._target, pairs)
            except Exception as error:
                self._transfer.forget(self._target.agent)
                raise TransferError(f"a write failed ({type(error).__name__})") from error
            crash_point("transfer.midway")
            await self._written(self._handle)
            handle, self._handle = self._handle, None
            self._transfer.release(handle, ())

    async def _written(self, handle: Any) -> None:
        while self._transfer.is_under_way(handle):  # noqa: ASYNC110 - NIXL has no event to wait for
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """See `BlockSender.close`. A write that does not end cuts the receiver off."""
        slots, self._slots = self._slots, []
        handle, self._handle = self._handle, None
        if not slots:
            return
        try:
            if handle is not None:
                async with asyncio.timeout(CLOSE_S):
                    await self._written(handle)
        except (TransferError, TimeoutError):
            self._transfer.forget(self._target.agent)
        finally:
            self._transfer.release(handle, slots)
