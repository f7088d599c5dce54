"""What `millrace upgrade` does with processes: one at a time, the old one only once the new one is ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from cli.rolling import Rolling
from cli.stack_state import StackState, process_alive, write_state
from cli.supervisor import Child, ChildSpec, Supervisor
from services.worker.config import WorkerRole, parse_engine
from tests.helpers.waiting import until

# A process that ends when it is told to, or at once where it is told so.
SCRIPT = 'echo "error: it is $END"; if [ -n "$END" ]; then exit 2; fi; exec sleep 60'
NAMES = ("usage", "worker-1", "worker-decode-1")


class Bench:
    """A supervisor of little processes, and who upgrades them. A new one is ready once its name is in `ready`."""

    def __init__(self, folder: Path) -> None:
        argv = ["/bin/sh", "-c", SCRIPT]
        specs = [ChildSpec(name, argv, {"PATH": "/usr/bin:/bin"}, 10, str(folder / name), "OWN") for name in NAMES]
        self.supervisor = Supervisor(specs, folder, lambda _: None)
        self.ready = set(NAMES)
        self.records: list[dict[str, int]] = []
        self.rolling = Rolling(self.supervisor, self._does_as, lambda: self.records.append(self.supervisor.processes()))
        self.path = str(folder / "control.sock")

    async def _does_as(self, new: Child, old: Child) -> bool:
        assert process_alive(old.pid)
        return new.spec.name in self.ready and new.exit_code() is None

    async def ask(self, **order: Any) -> list[dict[str, Any]]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(json.dumps(order).encode() + b"\n")
        steps = [json.loads(line) async for line in reader]
        writer.close()
        return steps


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    made.supervisor.start()
    async with made.rolling.listening(made.path):
        yield made
    await made.supervisor.stop((("worker", "usage"),))
    assert not [child for child in made.supervisor.children if child.exit_code() is None]


def resolved(path: str) -> str:
    return str(Path(path).resolve())


def told(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(step["name"], step["stage"]) for step in steps]


async def test_each_process_is_replaced_by_one_that_is_ready_and_the_name_of_its_socket_stays(bench: Bench) -> None:
    before = bench.supervisor.processes()

    usage = {"MILLRACE_LOG_LEVEL": "debug", "MILLRACE_DRAIN_GRACE_S": "90"}
    steps = await bench.ask(services={"worker": {}, "usage": usage}, timeout_s=30)

    assert told(steps) == [(name, stage) for name in NAMES for stage in ("starting", "draining", "done")]
    after = bench.supervisor.processes()
    assert [name for name in NAMES if before[name] == after[name] or process_alive(before[name])] == []
    assert bench.records[-1] == after
    for child in bench.supervisor.children:
        assert child.address == "unix:" + resolved(f"{child.spec.socket}.sock")
    spec = bench.supervisor.children[0].spec
    assert (spec.env["MILLRACE_LOG_LEVEL"], spec.grace_s) == ("debug", 95)
    assert not bench.supervisor.passing


async def test_a_process_that_ends_leaves_the_old_one_and_those_after_it_alone(bench: Bench) -> None:
    before = bench.supervisor.processes()
    bench.ready.clear()

    steps = await bench.ask(services={"worker": {"END": "broken"}}, timeout_s=30)

    assert told(steps) == [("worker-1", "starting"), ("worker-1", "failed")]
    assert steps[-1]["text"] == "The new worker-1 ended with code 2: it is broken"
    assert bench.supervisor.processes() == before
    assert all(map(process_alive, before.values()))


async def test_a_process_that_is_never_ready_is_ended(bench: Bench) -> None:
    before = bench.supervisor.processes()
    bench.ready.clear()

    steps = await bench.ask(services={"usage": {}}, timeout_s=0.05)

    assert steps[-1]["text"] == "The new usage was not ready within 0.05 s."
    assert bench.supervisor.processes() == before
    assert not bench.supervisor.passing


async def test_one_upgrade_at_a_time_and_who_hangs_up_ends_it_after_the_process_under_way(bench: Bench) -> None:
    before = bench.supervisor.processes()
    bench.ready.clear()
    reader, writer = await asyncio.open_unix_connection(bench.path)
    writer.write(json.dumps({"services": {"worker": {}}, "timeout_s": 30}).encode() + b"\n")
    await reader.readline()

    refused = await bench.ask(services={"usage": {}}, timeout_s=30)
    writer.close()
    bench.ready.add("worker-1")
    await until(lambda: bench.rolling._running is None)

    assert told(refused) == [("", "failed")]
    after = bench.supervisor.processes()
    assert [name for name in NAMES if before[name] != after[name]] == ["worker-1"]


async def test_what_is_under_way_when_the_stack_stops_is_broken_off(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.ready.clear()
    bench.supervisor.start()
    async with bench.rolling.listening(bench.path):
        asking = asyncio.create_task(bench.ask(services={"usage": {}}, timeout_s=30))
        await until(lambda: bench.supervisor.passing)
        [new] = bench.supervisor.passing
    with contextlib.suppress(ConnectionError):
        await asking

    await bench.supervisor.stop((("worker", "usage"),))

    assert new.exit_code() is not None


async def test_knobs_of_the_engine_keep_the_role_of_the_worker(bench: Bench) -> None:
    await bench.ask(services={"worker": {"MILLRACE_ENGINE": "max_num_seqs=7"}}, timeout_s=30)

    engines = {c.spec.name: parse_engine(c.spec.env.get("MILLRACE_ENGINE", "")) for c in bench.supervisor.children}
    assert (engines["worker-1"].role, engines["worker-1"].max_num_seqs) == (WorkerRole.AGGREGATED, 7)
    assert (engines["worker-decode-1"].role, engines["worker-decode-1"].max_num_seqs) == (WorkerRole.DECODE, 7)


async def test_who_speaks_another_language_is_told_so(bench: Bench) -> None:
    [step] = await bench.ask(everything=True)

    assert "another version of `millrace up`" in step["text"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["redis"], "redis is not a service that can be upgraded: those are usage, worker, router, gateway."),
        (["--set", "engine"], "`engine` is not NAME=VALUE."),
        (["--set", "redis_url=redis://x"], "The stack itself chooses redis_url."),
        (["router", "--set", "engine=max_num_seqs=1"], "engine is not a setting of router."),
        ([], "The stack takes no orders: it is starting or stopping."),
    ],
)
def test_an_order_that_cannot_be_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    without = CliRunner().invoke(app, ["upgrade"])
    monkeypatch.setattr("cli.stack_state.process_alive", lambda _: True)
    write_state(tmp_path, StackState(1, "", "", "", "", "echo", {}, control=str(tmp_path / "none")))

    result = CliRunner().invoke(app, ["upgrade", *arguments])

    assert (without.exit_code, result.exit_code) == (2, 2)
    assert "No stack is running" in without.stderr
    assert result.stderr.strip() == f"error: {sentence}"
