"""Who calls: bearer keys by SHA-256 digest, through a short cache. Never stores, logs or compares a secret itself.

Deny by default: unknown, revoked and expired keys are 401; a store that cannot be asked is 503, never 401, unless the
key was known a moment ago (last known good).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
from collections import OrderedDict
from typing import Protocol

from services.common.admission_types import KeyRecord
from services.common.clock import Clock
from services.common.errors import PermissionDenied, StoreUnavailable, Unauthenticated

CACHE_S = 2.0
LAST_KNOWN_GOOD_S = 60.0
MAX_SECRET_CHARS = 256
INFERENCE, USAGE_READ = "inference", "usage:read"
_DENIED = {
    INFERENCE: "This API key may not ask for inference.",
    USAGE_READ: "This API key may not read usage.",
}
_MAX_CACHED = 8_192


class KeyStore(Protocol):
    """The part of the admission store that the key ring asks."""

    async def lookup_key(self, digest: bytes) -> KeyRecord | None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    digest: bytes
    key: KeyRecord | None
    read_at: float


class CachedKeyRing:
    """Answers from the cache for 2 s; one question to the store at a time for each key."""

    def __init__(self, store: KeyStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._cache: OrderedDict[bytes, _Known] = OrderedDict()
        self._asking: dict[bytes, asyncio.Future[_Known]] = {}

    async def authenticate(self, authorization: str | None, scope: str = INFERENCE) -> KeyRecord:
        """The key behind `Bearer <secret>`. Raises Unauthenticated, PermissionDenied for a key of another scope, or
        StoreUnavailable when it cannot be known."""
        return await self.of_digest(digest_of(authorization), scope)

    async def of_digest(self, digest: bytes, scope: str = INFERENCE) -> KeyRecord:
        """The key whose secret has this digest: for work that outlives its request. Raises as `authenticate`."""
        known = self._cache.get(digest)
        if known is None or self._clock.monotonic() - known.read_at >= CACHE_S:
            known = await self._ask(digest, known)
        key = known.key
        # The dictionary found it by hash; the whole digest decides, in constant time.
        if key is None or not hmac.compare_digest(known.digest, digest):
            raise Unauthenticated("The API key is not valid.")
        if key.revoked:
            raise Unauthenticated("The API key was revoked.")
        if key.expires_at is not None and self._clock.wall() >= key.expires_at:
            raise Unauthenticated("The API key has expired.")
        if scope not in key.scopes:
            raise PermissionDenied(_DENIED[scope])
        return key

    async def _ask(self, digest: bytes, known: _Known | None) -> _Known:
        asking = self._asking.get(digest)
        if asking is None:
            asking = asyncio.ensure_future(self._read(digest))
            self._asking[digest] = asking
            asking.add_done_callback(lambda _: self._asking.pop(digest, None))
        try:
            return await asyncio.shield(asking)
        except StoreUnavailable:
            if known is not None and known.key and self._clock.monotonic() - known.read_at < LAST_KNOWN_GOOD_S:
                return known
            raise

    async def _read(self, digest: bytes) -> _Known:
        known = _Known(digest, await self._store.lookup_key(digest), self._clock.monotonic())
        self._cache[digest] = known
        self._cache.move_to_end(digest)
        if len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)
        return known


def digest_of(authorization: str | None) -> bytes:
    """SHA-256 of the secret in `Bearer <secret>`. Raises Unauthenticated."""
    return hashlib.sha256(_secret_of(authorization).encode()).digest()


def _secret_of(authorization: str | None) -> str:
    scheme, _, secret = (authorization or "").strip().partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise Unauthenticated("Send the API key as `Authorization: Bearer <key>`.")
    if len(secret) > MAX_SECRET_CHARS or not secret.isascii() or not secret.isprintable():
        raise Unauthenticated("The API key is not valid.")
    return secret
