"""From a price to a statement by the command line: what people type and read."""

from __future__ import annotations

import asyncio
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import Result
from typer.testing import CliRunner

from cli.main import app as millrace
from cli.svg_chart import Series, bar_chart
from services.usage import ledger, schema
from services.usage.attempts import insert_worker_rows, parse_report
from services.usage.config import UsageConfig
from services.usage.ledger import DeadLetter, insert_dead_letters
from services.usage.store import Store
from services.usage.wiring import UsageApp, build
from tests.helpers.redis import RedisProcess
from tests.helpers.usage import START, insert, make_attempt, make_entry, make_event, make_time, report_of

TOKEN = "root-token-for-tests"


@pytest.fixture
async def app(tmp_path: Path, redis_server: RedisProcess) -> AsyncIterator[UsageApp]:
    url = f"sqlite:///{tmp_path}/usage.sqlite3"
    config = UsageConfig(
        redis_url=redis_server.url, database_url=url, data_dir=str(tmp_path / "data"), admin_token=TOKEN
    )
    running = build(config)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
def database_url(tmp_path: Path, app: UsageApp) -> str:
    """Of the running service."""
    return f"sqlite:///{tmp_path}/usage.sqlite3"


async def run(app: UsageApp, *arguments: str) -> Result:
    """One command, in a thread of its own: it runs its own loop."""
    argv = [*arguments, "--usage-address", app.address]
    return await asyncio.to_thread(CliRunner().invoke, millrace, argv, env={"MILLRACE_ADMIN_TOKEN": TOKEN})


async def test_a_price_a_statement_a_correction_and_a_report(app: UsageApp, store: Store, tmp_path: Path) -> None:
    day = timedelta(days=1)
    names = ("acme", "zeta")
    made = [
        make_entry(f"r{n}", names[n % 2], prompt=1_000_000, completion=0, end_time=START + n % 3 * day)
        for n in range(12)
    ]
    insert(store, made)
    chart = tmp_path / "report.svg"

    done = await run(app, "price", "set", "echo", "--prompt", "0.15", "--from", "2026-01-01")
    while await app.rater.rate_next():
        pass
    first = await run(app, "usage", "statement", "acme", "--day", "2026-03-01", "--format", "jsonl")
    cheaper = await run(app, "price", "set", "echo", "--prompt", "0.1", "--from", "2026-01-01")
    again = await run(app, "price", "rate-again")
    second = await run(app, "usage", "query", "--tenant", "acme", "--by", "day", "--format", "csv")
    listed = await run(app, "price", "list")
    report = await run(
        app, "usage", "report", *names, "--since", "2026-03-01", "--until", "2026-03-03", "--chart", str(chart)
    )

    for result in (done, first, cheaper, again, second, listed, report):
        assert result.exit_code == 0, result.output
    statement = json.loads(first.stdout.splitlines()[-1])
    assert (statement["model"], statement["requests"], statement["cost"]) == ("echo", 2, {"USD": "0.30"})
    assert again.stdout == "12 requests now cost something else.\n"
    assert second.stdout.splitlines()[1] == "2026-03-01,2,2000000,0,0,0,0.20 USD"
    assert all(name in report.stdout for name in names)
    bars = [e for e in ET.fromstring(chart.read_text()).iter("{http://www.w3.org/2000/svg}rect") if len(e)]
    # Tokens and cost, by tenant and day.
    assert len(bars) == 2 * 2 * 3
    assert "Cost a day in USD" in chart.read_text()


async def test_what_answers_cost_and_what_differs_is_read_by_the_command_line(app: UsageApp, store: Store) -> None:
    insert(store, [make_entry("a1"), make_entry("a2"), make_entry("z1", "zeta")])
    parts = [make_attempt("a1"), make_attempt("a2"), make_attempt("z1", "zeta", tokens=(0, 7)), make_time(1)]
    rows = parse_report(report_of(*parts).SerializeToString())
    store.write_sync(lambda connection: insert_worker_rows(connection, [rows], START))
    span = ("--since", "2026-03-01", "--until", "2026-03-02")

    done = await run(app, "price", "set", "echo", "--accelerator-hour", "36", "--from", "2026-01-01")
    costs = await run(app, "usage", "costs", "--by", "tenant", "--format", "jsonl")
    workers = await run(app, "usage", "workers", "--format", "csv")
    report = await run(app, "usage", "report", "acme", "zeta", *span)
    explained = await run(app, "usage", "reconcile", *span, "--jsonl")
    totals = await run(app, "usage", "reconcile", *span, "--tenant", "acme")
    store.write_sync(lambda connection: connection.execute(sa.delete(schema.ledger).where(schema.ledger.c.row_id == 1)))
    wrong = await run(app, "usage", "reconcile", *span)

    for result in (done, costs, workers, report, explained, totals):
        assert result.exit_code == 0, result.output
    assert done.stdout == "Set accelerator_hour of echo to 36.00 USD an hour.\n"
    acme = json.loads(costs.stdout.splitlines()[0])
    assert (acme["tenant"], acme["accelerator_cost"], acme["per_completed"]) == ("acme", "0.02 USD", "0.01 USD")
    assert acme["per_million_tokens"] == "666.666667 USD"
    assert workers.stdout.splitlines()[1] == "echo,1,1,4.000,6.000,40.0%,0.04 USD,0.06 USD"
    assert "Cost and goodput" in report.stdout
    assert "Workers" in report.stdout
    [drift] = [json.loads(line) for line in explained.stdout.splitlines()]
    assert (drift["request_id"], drift["cause"], drift["worker"], drift["ledger"]) == ("z1", "beyond stop", 7, 5)
    assert "z1" not in totals.stdout
    assert wrong.exit_code == 1
    assert "a1  missing event: gateway –, worker 5, ledger –; 1 attempts told" in wrong.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("price", "set", "echo", "--prompt", "0.0000001"), "more than six decimals"),
        (("price", "set", "echo", "--prompt", "NaN"), "not an amount"),
        (("price", "set", "echo"), "at least one price"),
        (("usage", "query", "--by", "colour"), "group_by takes"),
        (("usage", "query", "--tag", "team"), "name=value"),
        (("usage", "verify"), "Name a file or a --day."),
    ],
)
async def test_a_mistake_is_one_sentence(app: UsageApp, arguments: tuple[str, ...], sentence: str) -> None:
    result = await run(app, *arguments)

    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


async def test_dead_letters_are_listed_until_another_try_takes_them(app: UsageApp, store: Store) -> None:
    letter = DeadLetter("mr:usage", "1-0", "tenant is empty", make_event("r1").SerializeToString())
    store.write_sync(lambda c: insert_dead_letters(c, [letter], START))

    listed = await run(app, "usage", "dead-letters")
    tried = await run(app, "usage", "dead-letters", "--replay")

    assert listed.exit_code == 1
    assert all(text in listed.stdout for text in ("mr:usage", "1-0", "r1", "tenant is empty"))
    assert (tried.exit_code, tried.stdout) == (0, "1 became rows.\nThere is no dead letter.\n")


async def test_letters_of_many_pages_are_each_listed_and_tried(
    app: UsageApp, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "LETTER_PAGE", 2)
    letters = [
        DeadLetter(stream, f"{n}-0", "tenant is empty", make_event(f"{stream}{n}").SerializeToString())
        for stream in ("a", "b")
        for n in range(1, 4)
    ]
    store.write_sync(lambda c: insert_dead_letters(c, letters, START))

    listed = await run(app, "usage", "dead-letters")
    tried = await run(app, "usage", "dead-letters", "--replay")

    assert re.findall(r"[ab]\d", listed.stdout) == ["a1", "a2", "a3", "b1", "b2", "b3"]
    assert tried.stdout == "6 became rows.\nThere is no dead letter.\n"


def test_a_chart_shows_nothing_that_a_name_could_smuggle_in() -> None:
    chart = bar_chart("<title>", ["2026-03-01"], [Series("<script>&", (0,))])

    assert "<script" not in chart
    ET.fromstring(chart)
