"""Distinct tuples have distinct keys, also where plain concatenation would not tell them apart."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from services.common.block_hash import block_hash, chain_hashes, pack_tokens, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=12)
# Few distinct bytes, the tags and lengths of the encoding among them: collisions would be found if there were any.
BYTES = st.lists(st.sampled_from([b"", b"a", b"A", b"M", b"S", b"\x00", b"\x01", b"S\x00\x00"]), max_size=4).map(
    b"".join
)
FIELDS = st.tuples(st.text("aAMS\x00\x01", max_size=4), BYTES, BYTES)


@given(FIELDS, FIELDS)
@example(("m", b"a", b"b"), ("m", b"ab", b""))
@example(("m", b"", b"ab"), ("ma", b"", b"b"))
@example(("m", b"S\x00", b""), ("m", b"", b"S\x00"))
def test_roots_are_equal_only_for_equal_fields(
    first: tuple[str, bytes, bytes], second: tuple[str, bytes, bytes]
) -> None:
    first_root = root_hash(model_version=first[0], adapter_digest=first[1], tenant_salt=first[2])
    second_root = root_hash(model_version=second[0], adapter_digest=second[1], tenant_salt=second[2])

    assert (first_root == second_root) == (first == second)


@given(st.binary(min_size=32, max_size=32), TOKENS, st.binary(min_size=32, max_size=32), TOKENS)
def test_blocks_are_equal_only_for_equal_parents_and_tokens(
    parent: bytes, tokens: list[int], other_parent: bytes, other_tokens: list[int]
) -> None:
    for parents, contents in (
        ((parent, other_parent), (tokens, other_tokens)),
        ((parent, parent), (tokens, other_tokens)),
        ((parent, other_parent), (tokens, tokens)),
    ):
        hashes = [block_hash(each, pack_tokens(content)) for each, content in zip(parents, contents, strict=True)]
        assert (hashes[0] == hashes[1]) == (parents[0] == parents[1] and contents[0] == contents[1])


@given(TOKENS, st.integers(1, 5))
def test_a_chain_is_its_blocks_hashed_one_by_one(tokens: list[int], block_size: int) -> None:
    parent = root_hash(model_version="m", adapter_digest=b"", tenant_salt=b"s")
    expected = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = block_hash(parent, pack_tokens(tokens[start : start + block_size]))
        expected.append(parent)

    root = root_hash(model_version="m", adapter_digest=b"", tenant_salt=b"s")
    assert chain_hashes(root, pack_tokens(tokens), block_size=block_size) == expected


@given(TOKENS.filter(bool), st.data())
def test_changing_one_token_changes_its_block_and_every_later_one_only(tokens: list[int], data: st.DataObject) -> None:
    root = root_hash(model_version="m", adapter_digest=b"", tenant_salt=b"s")
    index = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[index] ^= 1

    before = chain_hashes(root, pack_tokens(tokens), block_size=2)
    after = chain_hashes(root, pack_tokens(changed), block_size=2)

    assert [old == new for old, new in zip(before, after, strict=True)] == [
        block < index // 2 for block in range(len(before))
    ]
