"""`millrace up` by roles: which workers the stack has, and what it is told when nobody would answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import stack
from cli.main import app
from cli.stack import StackError, StackOptions, lay_out
from cli.up import _roles
from services.worker.config import WorkerRole, parse_engine


def workers_of(home: Path, **counts: int) -> dict[str, WorkerRole]:
    roles = {WorkerRole(name): count for name, count in counts.items()}
    layout = lay_out(StackOptions(home, "127.0.0.1", 8000, 8001, "echo", roles, "info"), 3)
    engines = {s.name: s.env["MILLRACE_ENGINE"] for s in layout.specs if s.name.startswith("worker")}
    return {name: parse_engine(knobs).role for name, knobs in engines.items()}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLRACE_ENGINE", raising=False)
    monkeypatch.setattr(stack, "find_redis_server", lambda: "redis-server")


def test_each_role_gets_its_processes(tmp_path: Path) -> None:
    assert workers_of(tmp_path, aggregated=1) == {"worker-1": WorkerRole.AGGREGATED}
    assert workers_of(tmp_path, prefill=1, decode=2) == {
        "worker-prefill-1": WorkerRole.PREFILL,
        "worker-decode-1": WorkerRole.DECODE,
        "worker-decode-2": WorkerRole.DECODE,
    }


def test_knobs_of_the_environment_hold_for_every_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_ENGINE", "max_num_seqs=7")
    layout = lay_out(StackOptions(tmp_path, "127.0.0.1", 8000, 8001, "echo", {WorkerRole.DECODE: 1}, "info"), 3)
    (worker,) = (spec for spec in layout.specs if spec.name == "worker-decode-1")
    engine = parse_engine(worker.env["MILLRACE_ENGINE"])

    assert (engine.max_num_seqs, engine.role) == (7, WorkerRole.DECODE)


def test_a_role_in_the_environment_and_on_the_command_line_is_one_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_ENGINE", "role=decode")

    with pytest.raises(StackError, match="leave it out"):
        workers_of(tmp_path, decode=1)


@pytest.mark.parametrize(
    ("given", "aggregated"), [((None, 0, 0), 1), ((None, 1, 1), 0), ((2, 1, 0), 2), ((None, 0, 1), 0)]
)
def test_a_worker_of_no_role_is_the_default_only_without_roles(
    given: tuple[int | None, int, int], aggregated: int
) -> None:
    assert _roles(*given)[WorkerRole.AGGREGATED] == aggregated


@pytest.mark.parametrize("options", [["--prefill", "2"], ["--workers", "0"]])
def test_a_stack_that_answers_nobody_is_refused_in_a_sentence(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["up", *options])

    assert result.exit_code == 2
    assert "add --decode N or --workers N" in result.output + result.stderr
