"""`millrace rollout status` against a running usage service: words, tables and charts of what the controller kept."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as aioredis
from click.testing import Result

from cli.svg_chart import LineSeries, line_charts
from services.common.routes import RouteTable
from services.usage import rollout as steps
from services.usage.canary.controller import ProgressStore
from services.usage.canary.trial import Trial
from services.usage.config import UsageConfig
from services.usage.wiring import UsageApp
from tests.helpers.canaries import Version
from tests.helpers.redis import RedisProcess
from tests.helpers.rollout_command import rollout, running_usage
from tests.helpers.rollouts import NEW, OLD, Fleet

TOKEN = "root-token-for-tests"
SVG = "{http://www.w3.org/2000/svg}"
NOW = 1_700_000_000.0


@pytest.fixture
async def app(tmp_path: Path, redis_server: RedisProcess) -> AsyncIterator[UsageApp]:
    config = UsageConfig(
        redis_url=redis_server.url,
        database_url=f"sqlite:///{tmp_path}/usage.sqlite3",
        data_dir=str(tmp_path / "data"),
        admin_token=TOKEN,
    )
    async with running_usage(config) as running:
        yield running


async def run(app: UsageApp, *arguments: str, token: str = TOKEN) -> Result:
    return await rollout(app, token, "status", *arguments)


async def keep_a_rollout(redis: aioredis.Redis) -> None:
    """Twenty seconds of a new version that is too slow, as the controller keeps them."""
    table = steps.start(RouteTable(), "echo", steps.Plan(NEW, OLD, step_percents=(20, 100)), now=NOW)
    route = table.routes["echo"]
    assert route.rollout is not None
    trial, fleet = Trial(route, route.rollout), Fleet({NEW: Version(tpot_s=0.041)}, seed=1)
    for second in range(20):
        trial.observe(fleet.serve(table, 40, NOW + second), NOW + second)
    await ProgressStore(redis).write(trial.progress([], NOW + 20))


async def test_a_rollout_shows_its_verdict_and_both_versions_latency_over_time(
    app: UsageApp, redis_client: aioredis.Redis, tmp_path: Path
) -> None:
    await keep_a_rollout(redis_client)
    chart = tmp_path / "rollout.svg"

    shown = await run(app, "echo", "--chart", str(chart))

    assert shown.exit_code == 0, shown.output
    first = shown.stdout.splitlines()[0]
    assert first.startswith("echo: step 1 of echo@1 → echo@2 (fail): time per output token:")
    spans = [line for line in shown.stdout.splitlines() if line.startswith("│ 22:13:")]
    assert len(spans) == 9
    drawn = ET.fromstring(chart.read_text())
    assert len(list(drawn.iter(f"{SVG}path"))) == 8
    assert len(list(drawn.iter(f"{SVG}circle"))) == 8 * 9
    titles = [title.text or "" for title in drawn.iter(f"{SVG}title")]
    assert any(title.startswith("echo@2 median, 22:13:2") for title in titles)


async def test_a_rollout_that_nobody_judged_and_a_caller_without_the_right_get_one_sentence(app: UsageApp) -> None:
    unknown = await run(app, "echo")
    stranger = await run(app, "echo", token="wrong-token-for-tests")

    assert (unknown.exit_code, stranger.exit_code) == (2, 2)
    assert "No rollout of `echo` was judged yet." in unknown.output
    assert "Traceback" not in stranger.output


def test_a_line_has_gaps_where_there_is_nothing_and_names_are_escaped() -> None:
    drawn = ET.fromstring(line_charts(["a", "b", "c"], [("<p>", [LineSeries("<&>", (1.0, None, 2.5), 0)])]))

    [path] = drawn.iter(f"{SVG}path")
    assert path.attrib["d"].count("M") == 2
    assert len(list(drawn.iter(f"{SVG}circle"))) == 2


def test_a_chart_of_nothing_is_a_chart() -> None:
    assert len(list(ET.fromstring(line_charts([], [("empty", [LineSeries("a", (), 0)])])).iter(f"{SVG}path"))) == 1
