"""Sums of the ledger on both databases: every group, every filter, costs that agree with the rows."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest

from services.common.clock import SystemClock
from services.common.errors import InvalidRequest
from services.usage.events import LedgerEntry
from services.usage.prices import Price
from services.usage.queries import Group, query_usage
from services.usage.rating import Rater
from services.usage.selection import Selection
from services.usage.store import Store
from tests.helpers.usage import START, insert, make_event, parse

HOUR = timedelta(hours=1)


def entries() -> list[LedgerEntry]:
    made = []
    for number in range(60):
        event = make_event(f"r{number:02}", "ab"[number % 2], prompt=number, end_time=START + number * HOUR)
        event.project = f"p{number % 3}"
        event.model.version = str(number % 4)
        if number % 5:
            event.metadata["te'am"] = f"team {number % 5}"
        made.append(parse(event))
    return made


def ask(store: Store, chosen: Selection, *group_by: str) -> list[Group]:
    return store.read_sync(lambda connection: query_usage(connection, chosen, group_by))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("tenant", lambda e: e.tenant),
        ("project", lambda e: e.event.project),
        ("key", lambda e: e.event.key_id),
        ("model", lambda e: e.event.model.model),
        ("version", lambda e: e.event.model.version),
        ("day", lambda e: e.end_time.strftime("%Y-%m-%d")),
        ("hour", lambda e: e.end_time.strftime("%Y-%m-%dT%H:00Z")),
        ("metadata.te'am", lambda e: e.event.metadata.get("te'am", "")),
    ],
)
def test_each_group_sums_the_rows_that_have_its_key(store: Store, name: str, key: object) -> None:
    made = entries()
    insert(store, made)
    counts: Counter[str] = Counter()
    prompts: Counter[str] = Counter()
    for entry in made:
        counts[key(entry)] += 1  # type: ignore[operator]
        prompts[key(entry)] += entry.billed.prompt  # type: ignore[operator]

    groups = ask(store, Selection(), name)

    assert [(group.keys, group.request_count, group.billed.prompt) for group in groups] == [
        ((text,), counts[text], prompts[text]) for text in sorted(counts)
    ]


@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [
        (Selection(), 60),
        (Selection("a"), 30),
        (Selection(project="p1", version="2"), 5),
        (Selection(tags={"te'am": "team 2"}), 12),
        (Selection(start=START + 10 * HOUR, end=START + 20 * HOUR), 10),
        (Selection(key_id="nothing"), 0),
    ],
)
def test_filters_narrow_together(store: Store, chosen: Selection, wanted: int) -> None:
    insert(store, entries())

    (group,) = ask(store, chosen)

    assert group.request_count == wanted


async def test_costs_follow_the_same_groups_and_sum_to_the_whole(store: Store) -> None:
    insert(store, entries())
    rater = Rater(store, SystemClock())
    price = Price(0, "", "echo", "", "", "prompt", "USD", 333_333, START - HOUR)
    await rater.set_prices([price])
    while await rater.rate_next():
        pass

    groups = ask(store, Selection("b"), "project", "day", "metadata.te'am")
    (whole,) = ask(store, Selection("b"))

    assert sum(group.costs["USD"].total for group in groups if group.costs) == whole.costs["USD"].total
    assert whole.costs["USD"].total == sum((2 * n * 333_333 + 10**6) // (2 * 10**6) for n in range(1, 60, 2))


@pytest.mark.parametrize(
    ("group_by", "tags", "param"),
    [
        (("colour",), {}, "group_by"),
        (("day", "day"), {}, "group_by"),
        (("metadata.",), {}, "metadata"),
        (('metadata.a"b',), {}, "metadata"),
        ((), {"a\\b": "x"}, "metadata"),
    ],
)
def test_a_group_that_does_not_exist_is_refused(
    store: Store, group_by: tuple[str, ...], tags: dict[str, str], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(store, Selection(tags=tags), *group_by)

    assert caught.value.param == param
