"""A release from its file to the ledger, and a worker of a real model that is held to one."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from services.common.lifecycle import StartupError
from services.common.release import Manifest
from services.usage.seals import open_signer
from services.worker.config import WorkerConfig, parse_engine
from services.worker.model_source import load_model, load_pins
from tests.helpers.four_services import ledger_row, running_services
from tests.helpers.redis import RedisProcess
from tests.helpers.releases import signed
from tests.helpers.tiny_model import write_tiny_model

TINY = "max_model_len=64,num_blocks=16,threads=1,dtype=float32"


def release_of(model: str, version: str, engine: str, folder: Path) -> tuple[Manifest, str]:
    """A manifest of what a worker with these settings is, and the knobs that hold a worker to it."""
    config = WorkerConfig(model=model, model_version=version, engine=parse_engine(engine))
    manifest, signer = Manifest(load_pins(config)), open_signer(folder)
    file = folder / "release.json"
    file.write_text(signed(manifest, signer).to_json())
    return manifest, f"release={file},release_key={signer.public_key.hex()}"


async def test_answer_and_ledger_row_name_the_release_that_made_them(
    redis_server: RedisProcess, tmp_path: Path
) -> None:
    manifest, knobs = release_of("echo", "7", "max_num_seqs=4", tmp_path)
    config = WorkerConfig(
        redis_url=redis_server.url,
        model="echo",
        model_version="7",
        engine=parse_engine(f"max_num_seqs=4,{knobs}"),
    )

    async with running_services(redis_server.url, tmp_path, worker_config=config) as services:
        body = {"model": "echo", "prompt": "hello", "max_tokens": 3}
        answer = (await services.client.post("/v1/completions", json=body)).json()
        await ledger_row(answer["millrace"]["request_id"], tmp_path / "ledger.sqlite3")

    assert answer["millrace"]["manifest_digest"] == manifest.digest.hex()
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite3")) as ledger:
        rows = ledger.execute("SELECT version, manifest_digest FROM ledger").fetchall()
    assert rows == [("7", manifest.digest)]


def test_a_worker_of_a_model_from_files_is_held_to_weights_precision_and_limits(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    manifest, knobs = release_of(str(model), "1", TINY, tmp_path)
    other = TINY.replace("max_model_len=64", "max_model_len=32,kv_cache_dtype=float16")

    served = load_model(WorkerConfig(model=str(model), engine=parse_engine(f"{TINY},{knobs}")))
    with pytest.raises(StartupError, match=r"kv_cache_dtype is 'float16', not 'float32'; max_model_len is 32, not 64"):
        load_model(WorkerConfig(model=str(model), engine=parse_engine(f"{other},{knobs}")))
    write_tiny_model(model, seed=1)
    with pytest.raises(StartupError, match=r"says: weights is '[0-9a-f]{64}', not '[0-9a-f]{64}'\.$"):
        load_model(WorkerConfig(model=str(model), engine=parse_engine(f"{TINY},{knobs}")))

    assert served.served.card.model.manifest_digest == manifest.digest
    assert (manifest.pins.dtype, manifest.pins.kv_cache_dtype) == ("float32", "float32")
    assert manifest.pins.kernels.startswith("abi ")
