"""Block hashes are a wire format between gateways, routers and workers: these bytes must never change."""

from __future__ import annotations

import pytest

from services.common.block_hash import block_hash, chain_hashes, pack_tokens, pack_truncated, root_hash, truncated

ROOT = "39405245483eac3013f25666452e754ca30922e49876fecc8260f1da17e061a2"
ROOT_OF_ADAPTER = "a1397718e1cf5e26ed27069419ff9e4624444a22912b91806ca2376f91294894"
CHAIN = [
    "510288d751d202b18108d1e79d6169371e7e76c5da313d2c06678e814b3e692d",
    "662c1146ec228b6aaaff8d70c564a23533a2f838def944035513b791d291aa2b",
]


def test_the_golden_root_is_unchanged() -> None:
    root = root_hash(model_version="smollm2@1", adapter_digest=b"", tenant_salt=b"salt-of-a")
    adapted = root_hash(model_version="smollm2@1", adapter_digest=bytes(range(32)), tenant_salt=b"salt-of-a")

    assert root.hex() == ROOT
    assert adapted.hex() == ROOT_OF_ADAPTER


def test_the_golden_chain_and_its_routing_form_are_unchanged() -> None:
    packed = pack_tokens([1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9])

    hashes = chain_hashes(bytes.fromhex(ROOT), packed, block_size=4)

    assert [each.hex() for each in hashes] == CHAIN
    assert [truncated(each) for each in hashes] == [12754988343616864849, 7677268387966299238]
    assert pack_truncated(hashes) == bytes.fromhex(CHAIN[0][:16] + CHAIN[1][:16])


def test_tokens_are_packed_as_little_endian_32_bit() -> None:
    assert pack_tokens([1, 0x01020304]) == b"\x01\x00\x00\x00\x04\x03\x02\x01"


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_id_outside_32_bits_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token_id])


def test_what_is_no_hash_is_no_parent() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        chain_hashes(b"short", b"", block_size=4)
    with pytest.raises(ValueError, match="32 bytes"):
        block_hash(b"", b"")


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size"):
        chain_hashes(bytes(32), b"", block_size=0)
