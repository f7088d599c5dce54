"""Which version a name gives: routes, withdrawn versions, keys with limits; pools by rule; the copy on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from millrace.common.v1 import common_pb2

from services.common.admission_types import Pool, WorkerRecord
from services.common.errors import ModelNotFound, NoWorker
from services.common.route_watch import OLDER_READINGS, RouteWatch
from services.common.route_wire import to_json
from services.common.routes import PoolRule, Route, RouteTable, Target, WeightedTarget
from services.gateway.generation import RouteAsk, ServedModel, WorkClass
from services.gateway.model_directory import WorkerDirectory
from tests.helpers.echo_generation import served

V1, V2 = Target("m", "1"), Target("m", "2")


class Directory(WorkerDirectory):
    """A directory whose cards need no worker."""

    def __init__(self) -> None:
        self.table = RouteTable()
        super().__init__(routes=lambda: self.table)

    async def _fetch(self, record: WorkerRecord) -> ServedModel:
        return dataclasses.replace(served(record.model, record.version), pool=record.pool)

    async def serve(self, *versions: str, pool: str = "default") -> None:
        records = [WorkerRecord(f"w{v}", "", "m", v, Pool("m", pool), "aggregated") for v in versions]
        await self.update(records)

    def version(self, name: str, ask: RouteAsk | None = None) -> str:
        return self.resolve(name, ask if ask is not None else RouteAsk("acme", "key")).card.model.version


@pytest.fixture
async def directory() -> Directory:
    made = Directory()
    await made.serve("1", "2")
    return made


def route(alias: str, weight_1: int, weight_2: int) -> Route:
    return Route(alias, (WeightedTarget(V1, weight_1), WeightedTarget(V2, weight_2)))


async def test_a_route_decides_for_its_name_and_an_exact_version_goes_past_it(directory: Directory) -> None:
    directory.table = RouteTable(routes={"m": route("m", 1, 0), "chat": route("chat", 0, 1)})

    assert directory.version("m") == "1"
    assert directory.version("chat") == "2"
    assert directory.version("m@2") == "2"
    assert sorted(directory.aliases()) == ["chat", "m"]


async def test_a_version_without_a_worker_gets_nothing_by_weight(directory: Directory) -> None:
    directory.table = RouteTable(routes={"m": route("m", 1, 99)})

    await directory.serve("1")

    assert {directory.version("m", RouteAsk("acme", str(i))) for i in range(50)} == {"1"}
    with pytest.raises(NoWorker):
        directory.resolve("m@2")


async def test_a_withdrawn_version_is_not_there_under_any_name(directory: Directory) -> None:
    before = directory.version("m")
    directory.table = RouteTable(withdrawn=frozenset({Target("m", before)}))
    await directory.serve("1", "2")

    assert directory.version("m") != before
    assert [model.card.model.version for model in directory.models()] == [directory.version("m")]
    with pytest.raises(ModelNotFound):
        directory.resolve(f"m@{before}")


async def test_while_workers_may_be_missing_an_unknown_name_comes_again_and_a_withdrawn_one_does_not(
    directory: Directory,
) -> None:
    directory.table = RouteTable(withdrawn=frozenset({V1}))

    directory.settled = False

    for name in ("m@3", "other"):
        with pytest.raises(NoWorker):
            directory.resolve(name)
    with pytest.raises(ModelNotFound):
        directory.resolve("m@1")


async def test_weights_are_drawn_among_the_versions_that_the_caller_may_use(directory: Directory) -> None:
    directory.table = RouteTable(routes={"m": route("m", 1, 99)})

    ask = RouteAsk("acme", "key", allowed=lambda t: t == V1)

    assert directory.version("m", ask) == "1"


async def test_rules_name_a_pool_that_serves_the_version_or_nothing_changes(directory: Directory) -> None:
    rules = (PoolRule("big", length_class=common_pb2.LENGTH_CLASS_LONG), PoolRule("vip", tenant="acme"))
    directory.table = RouteTable(pool_rules=rules)
    long = WorkClass(common_pb2.PRIORITY_CLASS_INTERACTIVE, common_pb2.LENGTH_CLASS_LONG)
    await directory.update(
        [WorkerRecord(f"w{p}", "", "m", "1", Pool("m", p), "aggregated") for p in ("default", "vip")]
    )

    model = directory.resolve("m")

    assert directory.place(model, "acme", long).pool == Pool("m", "vip")
    assert directory.place(model, "other", long).pool == Pool("m", "default")


async def test_a_version_whose_pool_lost_its_workers_is_found_in_another(directory: Directory) -> None:
    await directory.serve("1", pool="other")

    assert directory.resolve("m@1").pool == Pool("m", "other")


class Documents:
    """A route store that holds what a test puts into it."""

    def __init__(self) -> None:
        self.held: bytes | None = None

    async def document(self) -> bytes | None:
        return self.held


async def test_the_last_table_stays_when_the_store_loses_it_and_over_a_restart(tmp_path: Path) -> None:
    store, table = Documents(), RouteTable(3, {"m": route("m", 1, 1)})
    watch = RouteWatch(store, tmp_path / "routes.json")  # type: ignore[arg-type]
    store.held = to_json(table).encode()
    assert await watch.refresh()
    assert not await watch.refresh()

    store.held = None
    assert not await watch.refresh()
    again = RouteWatch(store, tmp_path / "routes.json")  # type: ignore[arg-type]
    again.load()

    assert watch.table == again.table == table


async def test_an_older_table_counts_only_where_nobody_puts_the_last_one_back(tmp_path: Path) -> None:
    store, last, older = Documents(), RouteTable(3, {"m": route("m", 1, 0)}), RouteTable(2, {"m": route("m", 0, 1)})
    watch = RouteWatch(store, tmp_path / "routes.json")  # type: ignore[arg-type]
    store.held = to_json(last).encode()
    await watch.refresh()

    store.held = to_json(older).encode()
    assert [await watch.refresh() for _ in range(OLDER_READINGS - 1)] == [False] * (OLDER_READINGS - 1)
    store.held = to_json(last).encode()
    assert not await watch.refresh()
    assert watch.table == last

    store.held = to_json(older).encode()
    assert [await watch.refresh() for _ in range(OLDER_READINGS)] == [False] * (OLDER_READINGS - 1) + [True]
    assert watch.table == older


async def test_a_table_or_a_copy_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    store, table = Documents(), RouteTable(3, {"m": route("m", 1, 1)})
    watch = RouteWatch(store, tmp_path / "routes.json")  # type: ignore[arg-type]
    store.held = to_json(table).encode()
    await watch.refresh()

    store.held = b'{"routes": [{"alias": "no targets"}]}'
    assert not await watch.refresh()
    (tmp_path / "routes.json").write_text("{")
    again = RouteWatch(store, tmp_path / "routes.json")  # type: ignore[arg-type]
    again.load()

    assert watch.table == table
    assert again.table == RouteTable()
