"""Client of the admission scripts in `scripts/*.lua`: queue, claims, ownership, terminals, quotas, leases, keys.

Every method is one idempotent script or one pipeline in one hash slot. Never decides policy. Raises
StoreUnavailable when Redis is away. Used by gateway, router, worker and usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.common.admission_types import (
    Claimed,
    FinishResult,
    KeyRecord,
    Ownership,
    Pool,
    PoolCaps,
    Queued,
    Refusal,
    RequestRecord,
    Reserve,
    Terminal,
    WorkerRecord,
)

if TYPE_CHECKING:
    import redis.asyncio as aioredis
    from millrace.common.v1 import admission_pb2


class AdmissionStore:
    """All state that services share."""

    def __init__(self, redis: aioredis.Redis) -> None:
        self._redis = redis

    # --- tenant slot -------------------------------------------------------------------------------------------
    async def reserve(self, ask: Reserve) -> Refusal | None:
        """Reserve requests, tokens, concurrency and budget, all or nothing; None when granted. Idempotent by id."""
        raise NotImplementedError

    async def renew_reservations(self, tenant: str, request_ids: Sequence[str]) -> None:
        """Extend reservations by 30 s."""
        raise NotImplementedError

    async def renew_budget(self, tenant: str, request_id: str, tokens: int, budget_limit: int | None) -> int:
        """Lease up to `tokens` more of the budget; returns the tokens granted, 0 when none is left."""
        raise NotImplementedError

    async def release(self, tenant: str, request_id: str) -> None:
        """Undo a reservation whose enqueue was refused; nothing is spent."""
        raise NotImplementedError

    async def settle(self, tenant: str, request_id: str, computed_tokens: int, billed_tokens: int) -> None:
        """Turn a reservation into spending; a no-op when it is gone."""
        raise NotImplementedError

    async def set_where(self, tenant: str, request_id: str, pool: Pool, gateway_instance: str) -> None:
        """Remember where a request runs, for cancel by id."""
        raise NotImplementedError

    async def get_where(self, tenant: str, request_id: str) -> tuple[Pool, str] | None:
        """Pool and gateway instance of a request of this tenant, or None."""
        raise NotImplementedError

    # --- pool slot ---------------------------------------------------------------------------------------------
    async def enqueue(
        self, pool: Pool, entry: admission_pb2.AdmissionEntry, caps: PoolCaps, *, readmit: bool = False
    ) -> Queued | Refusal:
        """Admit one request. `readmit` skips the caps and goes first in line (loss of a worker). Idempotent by id."""
        raise NotImplementedError

    async def claim(self, pool: Pool, router_instance: str, count: int) -> list[Claimed]:
        """Claim up to min(count, 32) requests in fair order, expired claims first."""
        raise NotImplementedError

    async def renew_claims(self, pool: Pool, claim_ids: Sequence[str]) -> None:
        """Extend claims that are still held by 10 s."""
        raise NotImplementedError

    async def return_claims(self, pool: Pool, claim_ids: Sequence[str]) -> None:
        """Give claims back at once (router drain): another router may take them."""
        raise NotImplementedError

    async def own(self, pool: Pool, ownerships: Sequence[Ownership]) -> None:
        """Record ownership and delete the queue entries. Idempotent; an older epoch changes nothing."""
        raise NotImplementedError

    async def read_requests(self, pool: Pool, request_ids: Sequence[str]) -> list[RequestRecord | None]:
        """Records of requests, None where none exists."""
        raise NotImplementedError

    async def finish(self, pool: Pool, terminals: Sequence[Terminal]) -> list[FinishResult]:
        """Set terminal states by compare-and-set, publish the winners' usage events, mark them unsettled."""
        raise NotImplementedError

    async def clear_unsettled(self, pool: Pool, request_ids: Sequence[str]) -> None:
        """Forget terminals whose reservation has been settled."""
        raise NotImplementedError

    async def wait_bell(self, pools: Sequence[Pool], last_ids: dict[str, str], timeout_ms: int) -> dict[str, str]:
        """Block until a bell rings or the timeout; returns the newest bell ids by pool tag (pass them back)."""
        raise NotImplementedError

    # --- registry ----------------------------------------------------------------------------------------------
    async def register_worker(self, record: WorkerRecord) -> None:
        """Write or renew a worker's lease (5 s) and make its pool known."""
        raise NotImplementedError

    async def deregister_worker(self, record: WorkerRecord) -> None:
        """Drop the lease at the end of a drain."""
        raise NotImplementedError

    async def list_workers(self) -> list[WorkerRecord]:
        """Workers whose lease is alive."""
        raise NotImplementedError

    async def list_pools(self) -> list[Pool]:
        """Every pool ever registered."""
        raise NotImplementedError

    async def renew_gateway(self, gateway_instance: str, address: str) -> None:
        """Write or renew a gateway's lease (10 s)."""
        raise NotImplementedError

    async def deregister_gateway(self, gateway_instance: str) -> None:
        """Drop a gateway's lease at the end of a drain."""
        raise NotImplementedError

    async def list_gateways(self) -> dict[str, str]:
        """Instance and address of gateways whose lease is alive."""
        raise NotImplementedError

    # --- keys --------------------------------------------------------------------------------------------------
    async def lookup_key(self, digest: bytes) -> KeyRecord | None:
        """The key with this SHA-256. Raises StoreUnavailable while the hot copy lacks its `complete` marker."""
        raise NotImplementedError

    async def replace_keys(self, keys: dict[bytes, KeyRecord]) -> None:
        """Rebuild the hot copy from truth and set its `complete` marker."""
        raise NotImplementedError

    async def put_key(self, digest: bytes, key: KeyRecord) -> None:
        """Add or change one key of the hot copy."""
        raise NotImplementedError
