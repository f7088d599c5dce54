"""GGUF: every encoding reads back, every lie in the header is one sentence and costs no memory."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.models.decoder import DecoderTensors
from services.worker.models.errors import ModelLoadError
from services.worker.models.gguf_file import read_gguf
from services.worker.models.gguf_loader import load_gguf
from services.worker.models.registry import decoder_tensors
from services.worker.models.rope import rope_tables

Kind = gguf.GGMLQuantizationType
HIDDEN, WIDE, HEADS, LAYERS = 256, 256, 4, 1
TOKENS = ["<s>", "</s>", *(chr(code) for code in range(33, 127))]
SHAPES = {
    "token_embd.weight": (len(TOKENS), HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate.weight": (WIDE, HIDDEN),
    "blk.0.ffn_up.weight": (WIDE, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, WIDE),
}


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    seed = sum(name.encode())
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def write(
    path: Path,
    *,
    kind: Kind = Kind.F32,
    without: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    pre: str = "smollm",
    metadata: dict[str, int] | None = None,
) -> Path:
    """A tiny Llama; matrices in `kind`, norms in F32."""
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "llama.block_count": LAYERS,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": WIDE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS // 2,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **(metadata or {}),
    }
    for key, number in numbers.items():
        writer.add_uint32(key, number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges([])
    tensors = {name: values(name, shape) for name, shape in SHAPES.items() if name not in without} | (extra or {})
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or kind is Kind.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, stored(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


K_QUANTS = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)


def stored(tensor: np.ndarray, kind: Kind) -> np.ndarray:
    """The tensor in `kind`; for K-quants, which the package cannot write, blocks of bits with small scales."""
    if kind not in K_QUANTS:
        return np.asarray(gguf.quantize(tensor, kind))
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = tensor.shape
    blocks = np.random.default_rng(rows).integers(0, 256, (rows * columns // block, size)).astype(np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
    for at in {Kind.Q2_K: (-4, -2), Kind.Q3_K: (-2,), Kind.Q6_K: (-2,)}.get(kind, (0, 2)):
        blocks[:, at % size : at % size + 2] = scale
    return blocks.reshape(rows, -1)


def load(path: Path) -> DecoderTensors:
    checkpoint = load_gguf(path)
    return decoder_tensors(checkpoint.config, checkpoint.tensors)


@pytest.mark.parametrize(
    ("kind", "error"),
    [(Kind.F32, 0.0), (Kind.F16, 0.002), (Kind.BF16, 0.02), (Kind.Q8_0, 0.02), (Kind.Q4_1, 0.25), (Kind.Q4_0, 0.4)],
)
def test_every_plain_encoding_reads_back(tmp_path: Path, kind: Kind, error: float) -> None:
    tensors = load(write(tmp_path / "m.gguf", kind=kind))
    for name, read in (
        ("token_embd.weight", tensors.embedding),
        ("blk.0.attn_v.weight", tensors.layers[0].value),
        ("blk.0.ffn_down.weight", tensors.layers[0].down),
    ):
        assert np.abs(read.float32() - values(name, SHAPES[name])).max() <= error


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_read_as_the_package_decodes_them(tmp_path: Path, kind: Kind) -> None:
    tensors = load(write(tmp_path / "m.gguf", kind=kind))
    shape = SHAPES["blk.0.ffn_up.weight"]
    expected = gguf.dequantize(stored(np.empty(shape, np.float32), kind), kind)
    read = tensors.layers[0].up.float32()
    assert read.shape == shape
    assert np.array_equal(read, expected)
    assert np.unique(read).size > 8


def test_query_and_key_rows_are_put_back_from_pairs_to_halves(tmp_path: Path) -> None:
    tensors = load(write(tmp_path / "m.gguf"))
    for name, heads, read in (
        ("blk.0.attn_q.weight", HEADS, tensors.layers[0].query),
        ("blk.0.attn_k.weight", HEADS // 2, tensors.layers[0].key),
    ):
        source = values(name, SHAPES[name])
        size = len(source) // heads
        for head in range(heads):
            mine, theirs = read.float32()[head * size :][:size], source[head * size :][:size]
            assert np.array_equal(mine[: size // 2], theirs[0::2])
            assert np.array_equal(mine[size // 2 :], theirs[1::2])


def test_a_model_without_output_matrix_uses_its_embedding(tmp_path: Path) -> None:
    tied = load(write(tmp_path / "tied.gguf"))
    head = values("output.weight", SHAPES["token_embd.weight"])
    own = load(write(tmp_path / "own.gguf", extra={"output.weight": head}))
    assert tied.lm_head is tied.embedding
    assert np.array_equal(own.lm_head.float32(), head)


def test_rope_freqs_divide_the_frequencies(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HIDDEN // HEADS // 2).astype(np.float32)
    plain = load(write(tmp_path / "plain.gguf")).config.rope
    scaled = load(write(tmp_path / "scaled.gguf", extra={"rope_freqs.weight": factors})).config.rope
    assert scaled.freq_factors == tuple(factors.tolist())
    angles = [
        np.arctan2(table[1].numpy()[1], table[0].numpy()[1])
        for table in (rope_tables(plain, 2), rope_tables(scaled, 2))
    ]
    assert np.allclose(angles[0] / factors, angles[1], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"without": ("blk.0.ffn_up.weight",)}, "no tensor layers.0.up_proj.weight"),
        ({"without": ("token_embd.weight",)}, "no tensor token_embd.weight"),
        ({"extra": {"blk.0.mystery.weight": np.ones(4, np.float32)}}, "does not use: blk.0.mystery.weight"),
        ({"extra": {"blk.1.attn_norm.weight": np.ones(HIDDEN, np.float32)}}, "does not use: layers.1.input_norm"),
        ({"extra": {"output_norm.weight": np.ones(8, np.float32)}}, "has shape"),
        ({"extra": {"output_norm.weight": np.full(HIDDEN, np.nan, np.float32)}}, "not finite"),
        ({"extra": {"rope_freqs.weight": np.zeros(32, np.float32)}}, "not all positive"),
        ({"extra": {"rope_freqs.weight": np.ones(3, np.float32)}}, "do not fit"),
        ({"pre": "somebody-elses"}, "pre-tokenizer somebody-elses is not known"),
        ({"metadata": {"llama.block_count": 4_000_000_000}}, "layer count is 4000000000"),
        ({"metadata": {"llama.attention.head_count": 0}}, "head count is 0"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "cannot share"),
        ({"metadata": {"llama.embedding_length": 4_000_000_000}}, "outside 1 to"),
        ({"metadata": {"llama.context_length": 0}}, "context length is 0"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 5000}}, "outside the vocabulary"),
        ({"metadata": {"general.alignment": 7}}, "alignment 7"),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_one_sentence(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    path = write(tmp_path / "m.gguf", **changes)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def header(*, version: int = 3, tensors: int = 0, entries: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + body


def text(value: bytes, *, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(*, dimensions: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, count: int | None = None) -> bytes:
    sizes = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    head = text(b"t") + struct.pack("<I", len(dimensions) if count is None else count)
    return header(tensors=1, body=head + sizes + struct.pack("<IQ", kind, offset))


HUGE = 2**64 - 1
LIES = {
    "empty": b"",
    "magic": b"GGML" + b"\0" * 40,
    "version": header(version=9),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "tensor count": header(tensors=HUGE),
    "metadata count": header(entries=HUGE),
    "truncated metadata": header(entries=4000),
    "truncated tensors": header(tensors=60000),
    "key length": header(entries=1, body=text(b"k", length=HUGE)),
    "key not text": header(entries=1, body=text(b"\xff\xfe")),
    "string length": header(entries=1, body=text(b"k") + struct.pack("<I", 8) + text(b"", length=1 << 23)),
    "string overflow": header(entries=1, body=text(b"k") + struct.pack("<I", 8) + text(b"", length=HUGE)),
    "array length": header(entries=1, body=text(b"k") + struct.pack("<IIQ", 9, 4, HUGE)),
    "array past the end": header(entries=1, body=text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 21)),
    "strings past the end": header(entries=1, body=text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 21)),
    "array of arrays": header(entries=1, body=text(b"k") + struct.pack("<IIQ", 9, 9, 1)),
    "value type": header(entries=1, body=text(b"k") + struct.pack("<I", 77)),
    "key twice": header(entries=2, body=(text(b"k") + struct.pack("<II", 4, 1)) * 2),
    "no dimensions": tensor(dimensions=()),
    "many dimensions": tensor(count=HUGE & 0xFFFFFFFF),
    "zero dimension": tensor(dimensions=(32, 0)),
    "huge dimension": tensor(dimensions=(HUGE,)),
    "product overflows": tensor(dimensions=(1 << 31, 1 << 31, 1 << 31, 1 << 31)),
    "encoding": tensor(kind=9999),
    "half a block": tensor(dimensions=(33,), kind=2),
    "offset past the end": tensor(offset=1 << 40),
    "offset overflows": tensor(offset=HUGE - 31),
    "offset not aligned": tensor(offset=5),
    "data missing": tensor(dimensions=(1024,)),
}


@pytest.mark.parametrize("name", sorted(LIES))
def test_a_lying_header_is_one_sentence_and_no_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(LIES[name])
    tracemalloc.start()
    with pytest.raises(ModelLoadError, match=r"m\.gguf") as caught:
        load_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert peak < 4 << 20


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no model file .*gone\.gguf"):
        load_gguf(tmp_path / "gone.gguf")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", kind=Kind.Q8_0).read_bytes()
    path = tmp_path / "cut.gguf"
    for cut in [*range(0, 3000, 97), len(whole) // 2, len(whole) - 40]:
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelLoadError):
            load(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_header_loads_or_is_refused_and_nothing_else(tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    source = tmp_path / "source.gguf"
    if not source.exists():
        write(source, kind=Kind.Q8_0)
    damaged = bytearray(source.read_bytes())
    for at, value in edits:
        damaged[at] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(bytes(damaged))
    # Anything but success or this refusal fails the test.
    with contextlib.suppress(ModelLoadError):
        load(path)


def test_reading_maps_the_file_and_copies_no_weights(tmp_path: Path) -> None:
    big = np.zeros((2048, 4096), dtype=np.float32)
    path = write(tmp_path / "m.gguf", extra={"output.weight": big})
    tracemalloc.start()
    file = read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert file.tensors["output.weight"].data.nbytes == big.nbytes
    assert peak < big.nbytes // 8
