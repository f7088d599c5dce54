"""`millrace rollout` as an operator uses it: every command says what stands now, or in one sentence why not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as aioredis
from click.testing import Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.common.admission_store import AdmissionStore
from services.common.admission_types import Pool, WorkerRecord
from services.common.route_store import RouteStore
from services.usage.canary.controller import ProgressStore
from services.usage.canary.trial import Trial
from services.usage.config import UsageConfig
from services.usage.seals import Signer
from services.usage.wiring import UsageApp
from tests.helpers.redis import RedisProcess
from tests.helpers.releases import evaluated, signed
from tests.helpers.rollout_command import rollout, running_usage

ROOT = "root-token-for-tests"
SIGNER = Signer(Ed25519PrivateKey.generate())
RELEASE = evaluated("2")
START = ("start", "m", "--from", "1", "--to", "2")
FORCED = ("--force", "--why", "faster")


@pytest.fixture
async def app(tmp_path: Path, redis_server: RedisProcess) -> AsyncIterator[UsageApp]:
    config = UsageConfig(
        redis_url=redis_server.url,
        database_url=f"sqlite:///{tmp_path}/usage.sqlite3",
        data_dir=str(tmp_path / "data"),
        admin_token=ROOT,
        release_keys=SIGNER.public_key.hex(),
    )
    async with running_usage(config) as running:
        yield running


@pytest.fixture
def release(tmp_path: Path) -> Path:
    file = tmp_path / "release.json"
    file.write_text(signed(RELEASE, SIGNER).to_json())
    return file


async def run(app: UsageApp, *arguments: object) -> Result:
    return await rollout(app, ROOT, *arguments)


def cells(answer: Result) -> list[list[str]]:
    """The rows of the table that was printed."""
    assert answer.exit_code == 0, answer.output
    return [[c.strip() for c in line.split("│")[1:-1]] for line in answer.stdout.splitlines() if line.startswith("│")]


async def test_pause_resume_promote_and_rollback_show_what_stands(app: UsageApp) -> None:
    shown = [
        cells(await run(app, *START, *FORCED)),
        cells(await run(app, "pause", "m", "--why", "lunch")),
        cells(await run(app, "resume", "m")),
        cells(await run(app, "promote", "m", "--to", "25", *FORCED)),
        cells(await run(app, "rollback", "m", "--why", "it is slow")),
    ]

    old, new = "m@1", "m@2"
    assert shown == [
        [["m", old, "99", ""], ["m", new, "1", "running"]],
        [["m", old, "99", ""], ["m", new, "1", "paused: lunch"]],
        [["m", old, "99", ""], ["m", new, "1", "running"]],
        [["m", old, "75", ""], ["m", new, "25", "running"]],
        [["m", old, "100", ""], ["m", new, "withdrawn", "rolled back: it is slow"]],
    ]


async def test_routes_and_history_tell_who_did_what_and_restore_puts_it_back(app: UsageApp) -> None:
    await run(app, *START, *FORCED)
    await run(app, "rollback", "m", "--why", "it is slow")
    restored = await run(app, "restore", "1")

    routes = cells(await run(app, "routes"))
    history = cells(await run(app, "history"))
    newest = cells(await run(app, "history", "--count", "1"))

    assert restored.stdout.strip() == "Revision 3 has the routes of revision 1."
    assert routes == [["m", "m@1", "99", ""], ["m", "m@2", "1", "running"]]
    assert [(row[0], row[2], row[3]) for row in history] == [
        ("3", "root", "restored revision 1"),
        ("2", "root", "it is slow"),
        ("1", "root", "forced without an evaluated release: faster"),
    ]
    assert newest == history[:1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("pause", "m"), "There is no rollout of `m`."),
        (("resume", "m"), "There is no rollout of `m`."),
        (("rollback", "m"), "There is no rollout of `m`."),
        (("promote", "m"), "There is no rollout of `m`."),
        (("restore", "7"), "There is no revision 7."),
        (("start", "m", "--to", "2", *FORCED), "`m` has no route: name the baseline."),
        (("start", "m", "--from", "2", "--to", "2", *FORCED), "`m` is served by m@2 already."),
    ],
)
async def test_what_cannot_be_done_is_one_sentence(app: UsageApp, arguments: tuple[str, ...], sentence: str) -> None:
    answer = await run(app, *arguments)

    assert answer.exit_code == 2
    assert sentence in answer.output
    assert "Traceback" not in answer.output


async def test_the_key_of_nobody_changes_nothing(app: UsageApp) -> None:
    answer = await rollout(app, "another-token-for-tests", *START, *FORCED)

    assert answer.exit_code == 2
    assert cells(await run(app, "routes")) == []


async def a_worker_of_version_2(redis: aioredis.Redis, digest: str) -> None:
    record = WorkerRecord("worker-2", "unix:/none", "m", "2", Pool("m", "default"), "aggregated", digest)
    await AdmissionStore(redis).register_worker(record)


async def test_a_version_whose_workers_serve_another_release_is_not_promoted(
    app: UsageApp, redis_client: aioredis.Redis, release: Path
) -> None:
    begun = await run(app, *START, "--release", release)
    await a_worker_of_version_2(redis_client, "ab" * 32)
    refused = await run(app, "promote", "m")
    forced = await run(app, "promote", "m", *FORCED)
    await a_worker_of_version_2(redis_client, RELEASE.digest.hex())
    right = await run(app, "promote", "m")

    assert begun.exit_code == 0, begun.output
    assert refused.exit_code == 2
    shown = RELEASE.digest.hex()[:12]
    assert f"worker-2 serves m@2 as abababababab, not as the release {shown} that was shown" in refused.output
    assert [row[2] for row in cells(forced)] == ["95", "5"]
    assert [row[2] for row in cells(right)] == ["75", "25"]


async def test_the_status_of_a_rollout_names_workers_that_serve_another_release(
    app: UsageApp, redis_client: aioredis.Redis, release: Path
) -> None:
    await run(app, *START, "--release", release)
    table = await RouteStore(redis_client).read()
    assert table is not None
    begun = table.routes["m"].rollout
    assert begun is not None
    await ProgressStore(redis_client).write(Trial(table.routes["m"], begun).progress([], begun.step_time))
    before = await run(app, "status", "m")
    await a_worker_of_version_2(redis_client, "ab" * 32)
    after = await run(app, "status", "m")

    assert (before.exit_code, after.exit_code) == (0, 0)
    assert "worker-2" not in before.output
    told = f"worker-2 serves abababababab, not the release {RELEASE.digest.hex()[:12]} that was shown."
    assert told in after.output
