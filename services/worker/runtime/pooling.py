"""The embedding of a prompt: the mean of its last hidden states, gathered chunk by chunk, at unit length. Pure."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


class MeanPool:
    """Sum of hidden states in the order of positions, in float64: the same bits however the prompt is cut."""

    def __init__(self) -> None:
        self.count = 0
        self._sum: npt.NDArray[np.float64] | None = None

    def add(self, hidden: npt.NDArray[np.float32]) -> None:
        """Take the next positions, (n, width)."""
        if self._sum is None:
            self._sum = np.zeros(hidden.shape[1])
        # One row after the other: the order of the additions is part of the result.
        for row in hidden:
            self._sum += row
        self.count += len(hidden)

    def unit_vector(self) -> bytes:
        """The mean at unit length as little-endian float32; zeros stay zeros. Raises ValueError with nothing pooled."""
        if self._sum is None:
            raise ValueError("nothing was pooled")
        mean = self._sum / self.count
        length = math.sqrt(float(np.sum(mean * mean)))
        return bytes((mean / length if length else mean).astype("<f4").tobytes())
