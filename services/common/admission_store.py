"""Client of the admission scripts in `scripts/*.lua`: queue, claims, ownership, terminals, quotas, leases, keys.

Every method is one idempotent script or one pipeline in one hash slot. Never decides policy. Raises
StoreUnavailable when Redis is away. Used by gateway, router, worker and usage.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any

import redis.asyncio as aioredis
from millrace.common.v1 import admission_pb2, common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_scripts import ScriptRunner, pool_key, slot_key, store_errors
from services.common.admission_types import (
    Claimed,
    FinishResult,
    KeyRecord,
    Ownership,
    Pool,
    PoolCaps,
    Queued,
    QuotaLimits,
    Refusal,
    RequestRecord,
    Reserve,
    Spent,
    Terminal,
    Unsettled,
    WorkerRecord,
    record_of,
)
from services.common.block_hash import pack_tokens
from services.common.clock import Clock, SystemClock
from services.common.errors import StoreUnavailable
from services.common.key_records import dump_key, load_key
from services.common.redis_client import MAX_BLOCK_MS
from services.common.streams import pairs

BATCH = 32
CLAIM_LEASE_MS = 10_000
WORKER_LEASE_MS = 5_000
GATEWAY_LEASE_MS = 10_000
# A batch entry of this age has the share of an interactive one.
AGING_MS = 30_000
# Output expected at admission, per choice; `finish` trues up.
EXPECTED_OUTPUT_TOKENS = 256
_RECORD = ("state", "epoch", "owner", "gw", "attempt", "terminal", "reason", "tenant", "claim", "event")
_WORKERS = [slot_key("registry", name) for name in ("workers", "worker_info", "pools")]
_GATEWAYS = [slot_key("registry", name) for name in ("gateways", "gateway_info", "pools")]
_KEYS = slot_key("keys", "table")
_CAPS, _LIMITS = (operator.attrgetter(*(f.name for f in dataclasses.fields(kind))) for kind in (PoolCaps, QuotaLimits))
_EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()


def usage_stream(pool: Pool) -> str:
    """Key of the pool's usage stream; each entry's field `e` is a serialized UsageEvent."""
    return pool_key(pool, "usage")


def priority_name(priority_class: common_pb2.PriorityClass.ValueType) -> str:
    """Class as it stands in keys."""
    return "batch" if priority_class == common_pb2.PRIORITY_CLASS_BATCH else "interactive"


def queued_cost(entry: admission_pb2.AdmissionEntry) -> int:
    """Tokens that a claim charges: prompt, received prefix and expected output."""
    output = min(entry.sampling.max_token_count, EXPECTED_OUTPUT_TOKENS) * max(1, entry.sampling.choice_count)
    return len(entry.token_ids) + sum(len(p.token_ids) for p in entry.prefix) + output


class AdmissionStore:
    """All state that services share. `now_ms` replaces Redis TIME in tests; `clock` dates prebuilt usage events."""

    def __init__(
        self, redis: aioredis.Redis, *, now_ms: Callable[[], int] | None = None, clock: Clock | None = None
    ) -> None:
        self._redis: Any = redis
        scripts = ScriptRunner(redis, now_ms)
        self._run, self._command = scripts.run, scripts.command
        self._now_ms = now_ms
        self._clock = clock if clock is not None else SystemClock()

    # --- tenant slot -------------------------------------------------------------------------------------------
    async def reserve(self, ask: Reserve) -> Refusal | None:
        """Reserve requests, tokens, concurrency and budget, all or nothing; None when granted. Idempotent by id.

        `ask.where` is remembered for cancel by id; settle and release forget it.
        """
        tokens = (ask.prompt_tokens, ask.output_tokens, ask.lease_tokens)
        where = "" if ask.where is None else f"{ask.where[1]}|{ask.where[0].tag}"
        args = (ask.request_id, ask.key_id, *tokens, *ask.prices, where, *_limit_args(ask))
        reply = await self._run("reserve", [slot_key(ask.tenant, "live")], *args)
        if not reply:
            return None
        return Refusal(reply[0].decode(), int(reply[1]), reply[3].decode(), of_key=reply[2] != b"")

    async def renew_reservations(self, tenant: str, request_ids: Sequence[str]) -> None:
        """Extend reservations by 30 s."""
        for ids in _batches(request_ids):
            await self._run("renew", [slot_key(tenant, "live")], *ids)

    async def renew_budget(self, ask: Reserve, tokens: int) -> int:
        """Lease up to `tokens` of the budgets on top of the `ask.lease_tokens` held; returns the tokens granted."""
        args = (ask.request_id, ask.key_id, ask.prompt_tokens, ask.lease_tokens, tokens, *ask.prices)
        return int(await self._run("renew_budget", [slot_key(ask.tenant, "live")], *args, *_limit_args(ask)))

    async def raise_spent(self, tenant: str, key_id: str, spent: Spent, settled: Spent) -> None:
        """Say what the ledger has billed a tenant (empty `key_id`) or a key: its budgets admit from then on.

        `settled` is what it had billed when all of that was settled; where spending is known, only that counts.
        """
        args = (*_spent_args(spent), *_spent_args(settled))
        await self._run("spent", [slot_key(tenant, "live")], key_id, *args)

    async def release(self, tenant: str, request_id: str) -> None:
        """Undo a reservation whose enqueue was refused; nothing is spent."""
        await self._run("settle", [slot_key(tenant, "live")], request_id, None, 0)

    async def settle(self, tenant: str, request_id: str, computed_tokens: int, billed_tokens: int) -> None:
        """Turn a reservation into spending; a no-op when it is gone."""
        await self._run("settle", [slot_key(tenant, "live")], request_id, computed_tokens, billed_tokens)

    async def get_where(self, tenant: str, request_id: str) -> tuple[Pool, str] | None:
        """Pool and gateway instance of a request of this tenant, or None."""
        with store_errors():
            value = await self._redis.get(slot_key(tenant, f"where:{request_id}"))
        if value is None:
            return None
        gateway_instance, _, tag = value.decode().partition("|")
        return Pool.from_tag(tag), gateway_instance

    # --- pool slot ---------------------------------------------------------------------------------------------
    async def enqueue(
        self,
        pool: Pool,
        entry: admission_pb2.AdmissionEntry,
        caps: PoolCaps,
        *,
        readmit: bool = False,
        remaining_ms: int | None = None,
    ) -> Queued | Refusal:
        """Admit one request. Idempotent by id and attempt: the same again answers as the first time did.

        `readmit` (loss of a worker) skips the caps and goes first in line; `entry.attempt` must be above the last one,
        and epochs of earlier attempts are fenced from here on. Refusal SUPERSEDED: the request has ended; POISONED: it
        is what `entry.lost_workers` died of.
        `remaining_ms` sets the deadline from Redis' own time; without it `entry.deadline_ms` counts (0 = one hour).
        """
        head = (entry.request_id, priority_name(entry.priority_class), entry.tenant, queued_cost(entry))
        weight = entry.weight if entry.weight > 0 else 1.0
        owner = (entry.gateway_instance, max(1, entry.attempt), int(readmit))
        lost = " ".join(entry.lost_workers)
        event = self._prebuilt_event(pool, entry, remaining_ms).SerializeToString()
        reply = await self._run(
            "enqueue",
            [pool_key(pool, "q"), slot_key(pool.tag, f"req:{entry.request_id}")],
            *(*head, weight, entry.deadline_ms, remaining_ms, *owner, event, entry.SerializeToString()),
            *(*_CAPS(caps), lost, max(1, entry.sampling.choice_count), _ask_digest(entry)),
        )
        if reply[0] == b"":
            return Refusal(reply[1].decode(), int(reply[2]))
        return Queued(reply[0].decode(), int(reply[1]))

    async def claim(self, pool: Pool, router_instance: str, count: int, *, workers: int = 1) -> list[Claimed]:
        """Claim up to min(count, 32) requests in fair order, expired claims first; of a tenant with caps no more than
        `workers` may hold."""
        args = (router_instance, min(count, BATCH), CLAIM_LEASE_MS, AGING_MS, workers)
        reply = await self._run("claim", [pool_key(pool, "q")], *args)
        return [
            Claimed(member.decode(), number, remaining, admission_pb2.AdmissionEntry.FromString(body), body, waited)
            for member, number, remaining, waited, body in reply
        ]

    async def renew_claims(self, pool: Pool, claim_ids: Sequence[str]) -> None:
        """Extend claims that are still held by 10 s."""
        for ids in _batches(claim_ids):
            await self._run("lease", [pool_key(pool, "q")], CLAIM_LEASE_MS, *ids)

    async def return_claims(self, pool: Pool, claim_ids: Sequence[str]) -> None:
        """Give claims back at once (router drain): another router may take them."""
        for ids in _batches(claim_ids):
            await self._run("lease", [pool_key(pool, "q")], 0, *ids)

    async def close_claims(self, pool: Pool, claims: Sequence[Claimed]) -> None:
        """Take claims out of the queue for their gateways to choose a version again. Idempotent."""
        for batch in _batches(claims):
            args = [arg for c in batch for arg in (c.entry.request_id, c.claim_id)]
            await self._run("close", [pool_key(pool, "q")], *args)

    async def forget_closed(self, pool: Pool, request_id: str) -> None:
        """Drop a closed request that goes on in another pool."""
        with store_errors():
            pipe = self._redis.pipeline(transaction=True)
            pipe.hdel(pool_key(pool, "live"), request_id)
            pipe.delete(pool_key(pool, f"req:{request_id}"))
            await pipe.execute()

    async def own(self, pool: Pool, ownerships: Sequence[Ownership]) -> None:
        """Record ownership and delete the queue entries. Idempotent; an older epoch changes nothing."""
        for batch in _batches(ownerships):
            args = [arg for o in batch for arg in (o.request_id, o.epoch, o.worker_instance)]
            await self._run("own", [pool_key(pool, "q")], *args)

    async def read_requests(self, pool: Pool, request_ids: Sequence[str]) -> list[RequestRecord | None]:
        """Records of requests, None where none exists."""
        with store_errors():
            pipe = self._redis.pipeline(transaction=False)
            for request_id in request_ids:
                pipe.hmget(pool_key(pool, f"req:{request_id}"), _RECORD)
            rows = await pipe.execute() if request_ids else []
        return [record_of(request_id, row) for request_id, row in zip(request_ids, rows, strict=True)]

    async def finish(self, pool: Pool, terminals: Sequence[Terminal]) -> list[FinishResult]:
        """Set terminal states by compare-and-set, publish the winners' usage events, mark them unsettled.

        A request that has not ended and whose epoch is above the caller's answers state UNSPECIFIED, won false.
        """
        results: list[FinishResult] = []
        for batch in _batches(terminals):
            args = [arg for t in batch for arg in _terminal_args(t)]
            for won, state, tenant, computed, billed in await self._run("finish", [pool_key(pool, "q")], *args):
                results.append(FinishResult(bool(won), state, tenant.decode(), computed, billed))
        return results

    async def clear_unsettled(self, pool: Pool, request_ids: Sequence[str]) -> None:
        """Forget terminals whose reservation has been settled."""
        if request_ids:
            await self._command("ZREM", pool_key(pool, "unsettled"), *request_ids)

    async def list_unsettled(self, pool: Pool, min_age_ms: int, count: int = 256) -> list[Unsettled]:
        """Terminals of at least this age whose reservation nobody settled yet (the reaper does)."""
        limit = await self.time_ms() - min_age_ms
        with store_errors():
            ids = await self._redis.zrangebyscore(pool_key(pool, "unsettled"), "-inf", limit, start=0, num=count)
            pipe = self._redis.pipeline(transaction=False)
            for request_id in ids:
                pipe.hmget(pool_key(pool, f"req:{request_id.decode()}"), ("tenant", "computed", "billed"))
            rows = await pipe.execute() if ids else []
        return [
            Unsettled(request_id.decode(), (row[0] or b"").decode(), int(row[1] or 0), int(row[2] or 0))
            for request_id, row in zip(ids, rows, strict=True)
        ]

    async def list_live(self, pool: Pool) -> dict[str, str]:
        """Gateway instance of every request that has not ended, by request id."""
        with store_errors():
            return {k.decode(): v.decode() async for k, v in self._redis.hscan_iter(pool_key(pool, "live"), count=500)}

    async def count_queued(self, pool: Pool) -> int:
        """Requests of the pool that no worker owns yet."""
        with store_errors():
            return int(await self._redis.hget(pool_key(pool, "q"), "n") or 0)

    async def wait_bell(self, pools: Sequence[Pool], last_ids: dict[str, str], timeout_ms: int) -> dict[str, str]:
        """Block until a bell rings or the timeout (2 s at most); returns the newest bell ids by pool tag (pass them
        back). A pool without a last id answers for its newest ring, so that none is missed."""
        keys = {pool_key(pool, "bell"): pool.tag for pool in pools}
        with store_errors():
            streams = {key: last_ids.get(tag, "0") for key, tag in keys.items()}
            reply = await self._redis.xread(streams, block=max(1, min(timeout_ms, MAX_BLOCK_MS)))
        newest = {keys[key.decode()]: entries[-1][0].decode() for key, entries in pairs(reply)}
        return {**last_ids, **newest}

    async def time_ms(self) -> int:
        """Redis TIME in milliseconds (or the test's)."""
        if self._now_ms is not None:
            return self._now_ms()
        with store_errors():
            seconds, micros = await self._redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def uptime(self) -> tuple[int, str]:
        """Seconds since Redis started, and its run id with its role (a change means: publish the outbox again)."""
        with store_errors():
            info = {**await self._redis.info("server"), **await self._redis.info("replication")}
        return int(info["uptime_in_seconds"]), f"{info['run_id']}/{info['role']}"

    # --- registry ----------------------------------------------------------------------------------------------
    async def register_worker(self, record: WorkerRecord) -> None:
        """Write or renew a worker's lease (5 s) and make its pool known."""
        value = json.dumps({**dataclasses.asdict(record), "pool": record.pool.tag})
        await self._run("members", _WORKERS, "renew", record.instance, value, WORKER_LEASE_MS, record.pool.tag)

    async def deregister_worker(self, record: WorkerRecord) -> None:
        """Drop the lease at the end of a drain."""
        await self._run("members", _WORKERS, "drop", record.instance)

    async def list_workers(self) -> list[WorkerRecord]:
        """Workers whose lease is alive."""
        values = (await self._run("members", _WORKERS, "list"))[1::2]
        # A worker of a later version may say more than is known here.
        known = WorkerRecord.__dataclass_fields__.keys()
        fields = [{k: v for k, v in json.loads(value).items() if k in known} for value in values]
        return [WorkerRecord(**{**f, "pool": Pool.from_tag(f["pool"])}) for f in fields]

    async def list_pools(self) -> list[Pool]:
        """Every pool ever registered."""
        with store_errors():
            return [Pool.from_tag(tag.decode()) for tag in sorted(await self._command("SMEMBERS", _WORKERS[2]))]

    async def renew_gateway(self, gateway_instance: str, address: str) -> None:
        """Write or renew a gateway's lease (10 s)."""
        await self._run("members", _GATEWAYS, "renew", gateway_instance, address, GATEWAY_LEASE_MS, None)

    async def deregister_gateway(self, gateway_instance: str) -> None:
        """Drop a gateway's lease at the end of a drain."""
        await self._run("members", _GATEWAYS, "drop", gateway_instance)

    async def list_gateways(self) -> dict[str, str]:
        """Instance and address of gateways whose lease is alive."""
        flat = [value.decode() for value in await self._run("members", _GATEWAYS, "list")]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    # --- keys --------------------------------------------------------------------------------------------------
    async def lookup_key(self, digest: bytes) -> KeyRecord | None:
        """The key with this SHA-256. Raises StoreUnavailable while the hot copy lacks its `complete` marker."""
        with store_errors():
            complete, value = await self._command("HMGET", _KEYS, "complete", digest.hex())
        if complete is None:
            raise StoreUnavailable("The table of keys is being rebuilt.", retry_after_s=1.0)
        return None if value is None else load_key(value)

    async def replace_keys(self, keys: dict[bytes, KeyRecord]) -> None:
        """Rebuild the hot copy from truth and set its `complete` marker."""
        rows = {digest.hex(): dump_key(key) for digest, key in keys.items()}
        with store_errors():
            pipe = self._redis.pipeline(transaction=True)
            pipe.delete(_KEYS)
            pipe.hset(_KEYS, mapping={**rows, "complete": "1"})
            await pipe.execute()

    async def put_key(self, digest: bytes, key: KeyRecord) -> None:
        """Add or change one key of the hot copy."""
        with store_errors():
            await self._redis.hset(_KEYS, digest.hex(), dump_key(key))

    def _prebuilt_event(
        self, pool: Pool, entry: admission_pb2.AdmissionEntry, remaining_ms: int | None
    ) -> usage_event_pb2.UsageEvent:
        """The event of a request that ends unseen by its gateway: expired in the queue, nothing billed."""
        event = usage_event_pb2.UsageEvent(
            request_id=entry.request_id,
            tenant=entry.tenant,
            project=entry.project,
            key_id=entry.key_id,
            model=entry.model,
            pool=common_pb2.PoolRef(model=pool.model, pool=pool.pool, shard=pool.shard),
            priority_class=entry.priority_class,
            length_class=entry.length_class,
            terminal_state=common_pb2.TERMINAL_STATE_EXPIRED,
            error_reason="DEADLINE_EXCEEDED",
            attempt=max(1, entry.attempt),
            gateway_instance=entry.gateway_instance,
            traceparent=entry.traceparent,
        )
        event.delivered.prompt_token_count = len(entry.token_ids)
        event.billed.SetInParent()
        now_ms = int(self._clock.wall() * 1000)
        deadline_ms = entry.deadline_ms or now_ms
        event.times.admit_time.FromMilliseconds(now_ms)
        event.times.end_time.FromMilliseconds(deadline_ms if remaining_ms is None else now_ms + remaining_ms)
        return event


def _ask_digest(entry: admission_pb2.AdmissionEntry) -> str:
    """The same for a request that comes back after a refusal, under whatever id."""
    digest = hashlib.blake2b(pack_tokens(entry.token_ids), digest_size=12)
    sampling = entry.sampling
    digest.update(f"{entry.tenant}\0{entry.key_id}\0{sampling.max_token_count}\0{sampling.choice_count}".encode())
    return digest.hexdigest()


def _batches(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[i : i + BATCH] for i in range(0, len(items), BATCH)]


def _limit_args(ask: Reserve) -> tuple[int | None, ...]:
    return _LIMITS(ask.limits) + (_LIMITS(ask.key_limits) if ask.key_id else ())


def _spent_args(spent: Spent) -> tuple[int, ...]:
    day, month = spent.day.toordinal() - _EPOCH_DAY, spent.day.year * 12 + spent.day.month - 1
    return spent.total_tokens, day, spent.day_tokens, spent.day_nanos, month, spent.month_tokens, spent.month_nanos


def _terminal_args(t: Terminal) -> tuple[str | int | bytes, ...]:
    billed = t.event.billed.prompt_token_count + t.event.billed.completion_token_count
    event = t.event.SerializeToString()
    return t.request_id, t.tenant, t.epoch, int(t.state), t.computed_tokens, billed, t.event.error_reason, event
