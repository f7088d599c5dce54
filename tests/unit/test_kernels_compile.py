"""The Triton kernels compile, with no device, for two generations of them; the interpreter is laxer than a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from services.worker.kernels import fp8_rows, gated, paged_attention, rms_norm, rotary_kv, sampling

INTEGERS = {"positions", "query_starts", "tables", "table_stride", "tile_requests", "tile_firsts", "tile_count",
            "count", "slots"}
FLOATS = {"part_out", "part_max", "part_sum", "cosines", "sines", "norms", "residual", "weight", "delta_weight",
          "scales"}
SCALARS = {"scale": "fp32", "eps": "fp32", "heads": "i32", "block_stride": "i32", "head_stride": "i32",
           "mixed_stride": "i32", "width": "i32", "stride": "i32"}

def ahead(kernel, architecture, constants, **types):
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        pointer = "*i32" if name in INTEGERS else "*fp32" if name in FLOATS else "*bf16"
        kind = types.get(name) or SCALARS.get(name) or pointer
        signature[name] = "constexpr" if name in constants else kind
        if kind.startswith("*") or name.endswith("stride"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    aligned = {key: value for key, value in aligned.items() if kernel.arg_names[key[0]] not in constants}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": True}).asm["ptx"]

def attention(architecture, parts, window, rows):
    constants = dict(GROUP=4, HEAD_DIM=128, DIM=128, BLOCK_SIZE=16, TOKENS=rows // 4, ROWS=rows, COLUMNS=64,
                     WINDOW=window, PARTS=parts, PRECISION="tf32", WIDENS=False)
    return ahead(paged_attention._attend, architecture, constants)

for architecture in (80, 90):
    decode = attention(architecture, 8, 0, 16)
    # Sixteen bytes a thread and copy: what the block table gathers is still read in whole runs.
    assert "cp.async.cg" in decode, "keys and values are not read in whole runs"
    assert "mma.sync" in decode or "wgmma" in decode
    attention(architecture, 1, 512, 64)
    ahead(paged_attention._join, architecture, dict(HEAD_DIM=128, DIM=128, PARTS=8))
    for has_norm in (False, True):
        constants = dict(HEADS=8, KV_HEADS=2, HEAD_DIM=128, DIM=128, BLOCK_SIZE=16, HAS_NORM=has_norm)
        ahead(rotary_kv._rotate_and_write, architecture, constants)
        constants = dict(COLUMNS=4096, HAS_DELTA=has_norm, NORMS_DELTA=has_norm)
        ahead(rms_norm._add_and_norm, architecture, constants)
        ahead(gated._gate, architecture, dict(COLUMNS=1024, IS_GELU=has_norm))
    ahead(sampling._choose, architecture, dict(COLUMNS=512), count="i32", out="*i32", logits="*fp32", draws="*fp64")
constants = dict(COLUMNS=4096, LARGEST=448.0, LEAST=1e-12)
for architecture in (89, 90):
    assert "cvt.rn.satfinite.e4m3x2" in ahead(fp8_rows._round_rows, architecture, constants, out="*fp8e4nv")
"""


@pytest.mark.slow
def test_every_kernel_compiles_for_two_generations_of_devices(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.lstrip()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
