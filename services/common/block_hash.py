"""Identity of a KV block: a 256-bit hash chained over everything its keys and values depend on.

Pure, no dependencies. The worker's cache keys by the whole hash, gateways send its first 8 bytes for routing; both
must be given the same model version, adapter digest and tenant salt. Never takes any of them from a client.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

HASH_SIZE = 32
TRUNCATED_SIZE = 8
TOKEN_SIZE = 4

_MODEL, _ADAPTER, _SALT, _PARENT, _TOKENS = b"M", b"A", b"S", b"P", b"T"
_LENGTH = struct.Struct("<Q")


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + _LENGTH.pack(len(value)) + value


_PARENT_PREFIX = _PARENT + _LENGTH.pack(HASH_SIZE)


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as unsigned 32-bit little-endian. Raises OverflowError for an id outside 0 … 2**32 - 1."""
    packed = array("I", token_ids)
    if packed.itemsize != TOKEN_SIZE:
        raise RuntimeError("this platform's unsigned int is not 4 bytes")
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def root_hash(*, model_version: str, adapter_digest: bytes, tenant_salt: bytes) -> bytes:
    """The parent (32 bytes) of a sequence's first block.

    `adapter_digest` is over the adapter's content, empty for the base model, so a reload under an old name is new.
    """
    fields = _field(_MODEL, model_version.encode()) + _field(_ADAPTER, adapter_digest) + _field(_SALT, tenant_salt)
    return hashlib.sha256(fields).digest()


def block_hash(parent: bytes, packed_tokens: bytes) -> bytes:
    """Hash (32 bytes) of one block: `parent` is the hash before it, `packed_tokens` as `pack_tokens` gives them."""
    if len(parent) != HASH_SIZE:
        raise ValueError(f"parent must be {HASH_SIZE} bytes")
    return hashlib.sha256(_PARENT_PREFIX + parent + _field(_TOKENS, packed_tokens)).digest()


def chain_hashes(parent: bytes, packed_tokens: bytes, *, block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `packed_tokens` in order; a partial last block has none.

    Raises ValueError for a parent that is no hash or a block size below 1.
    """
    if block_size < 1:
        raise ValueError("block_size must be at least 1")
    if len(parent) != HASH_SIZE:
        raise ValueError(f"parent must be {HASH_SIZE} bytes")
    width = block_size * TOKEN_SIZE
    tokens_prefix = _TOKENS + _LENGTH.pack(width)
    sha256 = hashlib.sha256
    hashes: list[bytes] = []
    for offset in range(0, len(packed_tokens) - width + 1, width):
        parent = sha256(_PARENT_PREFIX + parent + tokens_prefix + packed_tokens[offset : offset + width]).digest()
        hashes.append(parent)
    return hashes


def truncated(full_hash: bytes) -> int:
    """The routing form: the first 8 bytes as an unsigned little-endian integer."""
    return int.from_bytes(full_hash[:TRUNCATED_SIZE], "little")


def pack_truncated(full_hashes: Sequence[bytes]) -> bytes:
    """First 8 bytes of each hash, joined: how a worker says what it has cached."""
    return b"".join(full[:TRUNCATED_SIZE] for full in full_hashes)


def unpack_truncated(packed: bytes) -> tuple[int, ...]:
    """The routing form of each hash that `pack_truncated` joined; a torn last one is left out."""
    count = len(packed) // TRUNCATED_SIZE
    return struct.unpack(f"<{count}Q", packed[: count * TRUNCATED_SIZE])
