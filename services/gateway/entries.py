"""Builds queue entries: what a router and a worker need to run a request. Called at admission, and when a version is
chosen again. Never touches Redis.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac

from millrace.common.v1 import admission_pb2, common_pb2

from services.common.admission_types import KeyRecord, Pool, PoolCaps
from services.common.block_hash import chain_hashes, pack_tokens, root_hash, truncated
from services.common.lifecycle import new_ulid
from services.common.routes import prompt_digest
from services.gateway.generation import ValidRequest
from services.gateway.metering import length_class
from services.gateway.targets import LatencyTargets

# Above this many prompt tokens the block hashes are computed in a thread.
_THREAD_TOKENS = 8_192
_MAX_SALTS = 4_096


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """This gateway's own part of every entry. `cache_secret` never leaves the process."""

    gateway_instance: str
    cache_secret: bytes
    caps: PoolCaps
    targets: LatencyTargets


class EntryMaker:
    """Makes entries of this gateway."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._salts: dict[str, bytes] = {}

    async def make(self, key: KeyRecord, request: ValidRequest) -> admission_pb2.AdmissionEntry:
        """The entry of a first attempt, under the request's own id or a new one."""
        if len(request.prompt_token_ids) > _THREAD_TOKENS:
            return await asyncio.to_thread(self._made, key, request)
        return self._made(key, request)

    def _salt_of(self, tenant: str) -> bytes:
        salt = self._salts.get(tenant)
        if salt is None:
            salt = hmac.digest(self._settings.cache_secret, b"cache-salt\0" + tenant.encode(), hashlib.sha256)
            if len(self._salts) >= _MAX_SALTS:
                self._salts.clear()
            self._salts[tenant] = salt
        return salt

    def _made(self, key: KeyRecord, request: ValidRequest) -> admission_pb2.AdmissionEntry:
        card, pool, prompt = request.model.card, request.model.pool, request.prompt_token_ids
        salt = self._salt_of(key.tenant)
        return admission_pb2.AdmissionEntry(
            request_id=request.request_id or new_ulid(),
            tenant=key.tenant,
            key_id=key.key_id,
            project=key.project,
            model=card.model,
            pool=_pool_ref(pool),
            priority_class=common_pb2.PRIORITY_CLASS_BATCH if key.batch_only else request.priority_class,
            length_class=length_class(len(prompt), request.sampling.max_token_count),
            tokenizer_digest=card.tokenizer_digest,
            token_ids=prompt,
            sampling=request.sampling,
            gateway_instance=self._settings.gateway_instance,
            cache_salt=salt,
            block_hashes=_block_hashes(request, salt),
            resume_policy=request.resume_policy,
            weight=key.weight,
            attempt=1,
            tenant_slot_cap=key.worker_slots,
            tenant_block_cap=key.worker_blocks,
            route=request.route,
            prompt_digest=prompt_digest(card.tokenizer_digest, card.chat_template, add_bos=card.add_bos),
        )


def _block_hashes(request: ValidRequest, salt: bytes) -> list[int]:
    card = request.model.card
    version = f"{card.model.model}@{card.model.version}:{card.model.manifest_digest.hex()}"
    root = root_hash(model_version=version, adapter_digest=b"", tenant_salt=salt)
    hashes = chain_hashes(root, pack_tokens(request.prompt_token_ids), block_size=card.block_size)
    return [truncated(full) for full in hashes]


def _pool_ref(pool: Pool) -> common_pb2.PoolRef:
    return common_pb2.PoolRef(model=pool.model, pool=pool.pool, shard=pool.shard)
