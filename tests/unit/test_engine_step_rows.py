"""Rows of a step: those by column are the same rows whichever way they are looked at."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.engine.outputs import DecodeRows, ScheduledRequest, StepRows
from services.worker.engine.request import RequestKey
from tests.helpers.engine import EngineRig, make_request, prompt, tokens


def plain(row: ScheduledRequest) -> tuple[object, ...]:
    return (row.key, row.start, row.token_ids.tolist(), row.block_table, row.samples, row.draft_count)


@pytest.fixture
def rows() -> StepRows:
    """Two rows that decode, then a chunk."""
    keys = [RequestKey(name, 0, 1) for name in "abc"]
    decodes = DecodeRows(keys[:2], [7, 3], tokens(41, 42).reshape(2, 1), [(5, 6), (9,)])
    return StepRows(decodes, [ScheduledRequest(keys[2], 0, tokens(1, 2), (4,), False)])


def test_rows_by_column_come_first_and_sample_after_their_one_token(rows: StepRows) -> None:
    assert [plain(row) for row in rows] == [
        (RequestKey("a", 0, 1), 7, [41], (5, 6), True, 0),
        (RequestKey("b", 0, 1), 3, [42], (9,), True, 0),
        (RequestKey("c", 0, 1), 0, [1, 2], (4,), False, 0),
    ]


def test_a_row_is_the_same_by_index_from_either_end_and_by_slice(rows: StepRows) -> None:
    each = [plain(row) for row in rows]

    assert [plain(rows[index]) for index in range(len(rows))] == each
    assert [plain(rows[index]) for index in range(-len(rows), 0)] == each
    assert [plain(row) for row in rows[1:]] == each[1:]


@pytest.mark.parametrize("index", [3, -4])
def test_a_row_beyond_the_ends_is_an_error(rows: StepRows, index: int) -> None:
    with pytest.raises(IndexError):
        rows[index]


def test_an_earlier_decision_stays_as_it_was_while_the_requests_go_on() -> None:
    rig = EngineRig()
    rig.add(make_request("a", prompt(4), max_tokens=6))
    rig.add(make_request("b", prompt(5, seed=1), max_tokens=6))
    rig.step(2)
    early, before = rig.last, [plain(row) for row in rig.last.scheduled]

    rig.run()

    assert len(early.decodes) == 2
    assert [plain(row) for row in early.scheduled] == before
    assert (early.decodes.token_ids.dtype, early.decodes.token_ids.shape) == (np.int32, (2, 1))
