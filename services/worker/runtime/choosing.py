"""One token from one row of logits: temperature, min-p, top-k, top-p, then Gumbel-max among what is left.

Owns the meaning of the filters. The compiled chooser (`kernels/cpu/sample.h`) is tested against this one.
Ties go to the lower token id. Filters apply in the order min-p, top-k, top-p, each on what the one before left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.worker.runtime.noise import gumbel

NO_TOKEN = None
# A 32-bit uniform gives Gumbel noise from -3.1 to 22.9: a token further below the best can never win.
NOISE_SPAN = 26.5


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """How to choose at one position; `noise_key` from `noise.noise_key`. `temperature` 0 takes the largest logit."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    noise_key: int


class Chooser(Protocol):
    """Chooses for many rows at once."""

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
        """Token ids for rows of `logits` (n, vocab) float32; None where no token is allowed or a logit is NaN."""
        ...


class NumpyChooser:
    """The reference, row by row."""

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
        """See `Chooser`."""
        rows = logits.numpy()
        return [choose_token(rows[index], draw) for index, draw in enumerate(draws)]


def choose_token(logits: npt.NDArray[np.float32], draw: Draw) -> int | None:
    """The chosen id of one row (vocab,), or None when no token is allowed or a logit is NaN."""
    best = int(np.argmax(logits))
    top = float(logits[best])
    if not math.isfinite(top):
        return NO_TOKEN
    if draw.temperature == 0.0 or draw.top_k == 1:
        return best
    ids, scaled = _candidates(logits, top, draw)
    perturbed = scaled + gumbel(draw.noise_key, ids)
    return int(ids[int(np.argmax(perturbed))])


def _candidates(
    logits: npt.NDArray[np.float32], top: float, draw: Draw
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids and scaled logits (0 is the best) of the tokens that pass every filter; ids ascending when none is on."""
    floor = -math.inf
    if draw.min_p > 0.0:
        floor = math.log(draw.min_p)
    scaled = (logits.astype(np.float64) - top) / draw.temperature
    if draw.top_p >= 1.0 and draw.top_k == 0:
        ids = np.flatnonzero(scaled >= max(floor, -NOISE_SPAN))
        return ids, scaled[ids]
    ids = np.flatnonzero(scaled >= floor) if floor > -math.inf else np.flatnonzero(np.isfinite(scaled))
    if 0 < draw.top_k < len(ids):
        threshold = np.partition(scaled[ids], len(ids) - draw.top_k)[len(ids) - draw.top_k]
        ids = ids[scaled[ids] >= threshold]
    order = np.lexsort((ids, -scaled[ids]))
    ids = ids[order]
    if draw.top_k:
        ids = ids[: draw.top_k]
    if draw.top_p < 1.0:
        mass = np.cumsum(np.exp(scaled[ids]))
        keep = int(np.searchsorted(mass, draw.top_p * mass[-1])) + 1
        ids = ids[:keep]
    return ids, scaled[ids]
