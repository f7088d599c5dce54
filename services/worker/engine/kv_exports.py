"""Blocks of a prompt kept for a peer that decodes: held from the moment they are computed until the shell lets go.

Owns one hold per exported request; the request itself may end, fail or be preempted meanwhile. Called by the KV cache
manager. How long a peer may take is the shell's business: it releases.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.engine.block_pool import BlockPool
from services.worker.engine.request import KVRole, Request


class KVExports:
    """Holds on computed blocks by (request, epoch)."""

    def __init__(self, pool: BlockPool, *, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._held: dict[tuple[str, int], list[tuple[int, bytes]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def block_count(self) -> int:
        """Distinct blocks held for peers."""
        return len({block for blocks in self.holdings() for block in blocks})

    def open(self, request_id: str, epoch: int) -> None:
        """Keep the blocks of this request's prompt from now on, besides those kept under this name already."""
        self._held.setdefault((request_id, epoch), [])

    def extend(self, request: Request, full_blocks: int) -> None:
        """The first `full_blocks` blocks of `request` are computed: hold those of its prompt not held yet."""
        if request.group.source.kv_role is not KVRole.EXPORT:
            return
        held = self._held.get((request.key.request_id, request.key.epoch))
        if held is None:
            return
        end = min(full_blocks, request.num_prompt_tokens // self._block_size)
        fresh = list(zip(request.blocks[:end], request.block_hashes, strict=False))[len(held) :]
        self._pool.hold([block for block, _ in fresh], tenant=request.tenant)
        held.extend(fresh)

    def blocks(self, request_id: str, epoch: int) -> Sequence[tuple[int, bytes]]:
        """The blocks held so far and their hashes, in the order of the prompt; none for an unknown request."""
        return tuple(self._held.get((request_id, epoch), ()))

    def release(self, request_id: str, epoch: int) -> bool:
        """Let go of a request's blocks; False when there is no such hold."""
        held = self._held.pop((request_id, epoch), None)
        if held is None:
            return False
        self._pool.release([block for block, _ in held])
        return True

    def release_all(self) -> None:
        """Let go of everything: its contents may be spoilt."""
        for request_id, epoch in list(self._held):
            self.release(request_id, epoch)

    def holdings(self) -> list[list[int]]:
        """The block list of each hold, for the pool's invariants."""
        return [[block for block, _ in held] for held in self._held.values()]
