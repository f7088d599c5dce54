"""The rows of the decoding requests of a step, made from columns that are kept while the requests are the same ones.

Owns the columns of the last step. Never touches a request. Called by the step builder, once a step.
"""

from __future__ import annotations

from itertools import repeat
from operator import itemgetter

import numpy as np

from services.worker.engine.outputs import ScheduledRequest
from services.worker.engine.request import Request, RequestKey

_last = itemgetter(-1)


class DecodeColumns:
    """`keys` are those of the rows made last; nobody changes that list."""

    def __init__(self) -> None:
        self.keys: list[RequestKey] = []
        self._requests: list[Request] = []
        self._starts: list[int] = []

    def advance(self, requests: list[Request]) -> list[ScheduledRequest]:
        """Rows of `requests`, all that decode in this step, each with its newest token to compute.

        Those of the last step have got one token since, unless `forget` was called.
        """
        outputs = [each.output_token_ids for each in requests]
        newest = map(_last, outputs) if all(outputs) else (each.newest_token_id for each in requests)
        if requests and requests == self._requests:
            self._starts = [start + 1 for start in self._starts]
        else:
            self._requests = requests
            self.keys = [each.key for each in requests]
            self._starts = [each.num_tokens - 1 for each in requests]
        token_ids = np.fromiter(newest, np.int32, len(requests)).reshape(-1, 1)
        tables = [each.blocks for each in requests]
        # No line of Python a row.
        return list(map(ScheduledRequest, self.keys, self._starts, token_ids, tables, repeat(True)))

    def forget(self) -> None:
        """The rows of this step may get more than one token."""
        self._requests, self.keys = [], []
