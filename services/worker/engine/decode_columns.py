"""The decoding requests of a step by column, kept from one step to the next while they are the same ones.

Owns the columns of the last step. Never touches a request. Called by the step builder, once a step.
"""

from __future__ import annotations

from operator import itemgetter

import numpy as np

from services.worker.engine.outputs import NO_DECODES, DecodeRows
from services.worker.engine.request import Request

_last = itemgetter(-1)


class DecodeColumns:
    """Makes the `DecodeRows` of each step from those of the step before."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._rows = NO_DECODES

    def advance(self, requests: list[Request]) -> DecodeRows:
        """Rows of `requests`, all that decode in this step, each with one token to compute.

        Those of the last step have got one token since, unless `forget` was called.
        """
        outputs = [each.output_token_ids for each in requests]
        newest = map(_last, outputs) if all(outputs) else (each.newest_token_id for each in requests)
        if requests and requests == self._requests:
            keys, starts = self._rows.keys, [start + 1 for start in self._rows.starts]
        else:
            keys = [each.key for each in requests]
            starts = [each.num_tokens - 1 for each in requests]
        rows = DecodeRows(
            keys=keys,
            starts=starts,
            token_ids=np.fromiter(newest, np.int32, len(requests)).reshape(-1, 1),
            block_tables=[each.blocks for each in requests],
        )
        self._requests, self._rows = requests, rows
        return rows

    def forget(self) -> None:
        """The rows of this step may get more than one token."""
        self._requests = []
