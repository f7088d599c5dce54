"""From a price to a statement by the command line: what people type and read."""

from __future__ import annotations

import asyncio
import json
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.main import app as millrace
from cli.svg_chart import Series, bar_chart
from services.usage.config import UsageConfig
from services.usage.store import Store
from services.usage.wiring import UsageApp, build
from tests.helpers.redis import RedisProcess
from tests.helpers.usage import START, insert, make_entry

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
    assert len(bars) == 2 * 3


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


def test_a_chart_shows_nothing_that_a_name_could_smuggle_in() -> None:
    chart = bar_chart("<title>", ["2026-03-01"], [Series("<script>&", (0,))])

    assert "<script" not in chart
    ET.fromstring(chart)
