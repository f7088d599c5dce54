"""The compiled CPU kernels agree with their references and do not care what is beside a row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.kernels.cpu import PACK_Q8_FROM_F32, CpuKernels, load_kernels
from services.worker.kernels.cpu_build import KernelUnavailableError, build, instruction_sets
from services.worker.runtime.choosing import Draw, choose_token
from services.worker.runtime.native_forward import NativeChooser

CACHE = Path.home() / ".cache" / "millrace" / "kernels"


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    try:
        return load_kernels(CACHE, 2)
    except KernelUnavailableError as error:
        pytest.skip(str(error))


def draws() -> list[Draw]:
    return [
        Draw(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, noise_key=key * 0x9E3779B97F4A7C15 % 2**64)
        for key in range(1, 5)
        for temperature in (0.0, 0.3, 1.0, 2.5)
        for top_k, top_p, min_p in ((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (40, 0.8, 0.02))
    ]


def test_the_compiled_chooser_takes_the_tokens_of_the_reference(kernels: CpuKernels) -> None:
    wanted = draws()
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 3, (len(wanted), 4099)).astype(np.float32))

    chosen = NativeChooser(kernels).choose(logits, wanted)

    assert chosen == [choose_token(row, draw) for row, draw in zip(logits.numpy(), wanted, strict=True)]


def test_a_row_without_an_allowed_token_or_with_nan_gives_none_and_harms_no_other(kernels: CpuKernels) -> None:
    logits = torch.zeros((3, 100))
    logits[0] = -torch.inf
    logits[1, 7] = torch.nan
    logits[2, 9] = 1.0
    draw = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, noise_key=1)

    assert NativeChooser(kernels).choose(logits, [draw] * 3) == [None, None, 9]


def test_packing_refuses_inputs_that_are_not_whole_groups(kernels: CpuKernels) -> None:
    with pytest.raises(ValueError, match="whole groups"):
        kernels.pack(PACK_Q8_FROM_F32, np.zeros((16, 33), dtype=np.float32), 16, 33)


def test_without_a_compiler_the_reason_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    levels = instruction_sets()
    if not levels:
        pytest.skip("this CPU runs none of the levels")
    monkeypatch.setattr("shutil.which", lambda name: None)

    with pytest.raises(KernelUnavailableError, match="no C\\+\\+ compiler"):
        build(levels[0], tmp_path)
