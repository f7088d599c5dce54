"""Settings of the worker and what start-up makes of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.common.config import ConfigError, load
from services.common.lifecycle import StartupError
from services.worker.config import (
    EngineSettings,
    SpeculationSetting,
    WorkerConfig,
    WorkerRole,
    parse_engine,
    parse_name,
)
from services.worker.model_source import load_model, manifest_digest

ROOT = Path(__file__).parents[2]


def test_engine_knobs_come_from_one_line() -> None:
    text = "max_num_seqs=8, max_model_len=4096,dtype=float32,gpu_memory_utilization=0.25,num_blocks=10,threads=2"

    knobs = parse_engine(text)

    assert knobs == EngineSettings(
        max_num_seqs=8, max_model_len=4096, dtype="float32", gpu_memory_utilization=0.25, num_blocks=10, threads=2
    )
    assert parse_engine("") == EngineSettings()


def test_the_role_is_chosen_in_the_same_line() -> None:
    assert parse_engine("").role is WorkerRole.AGGREGATED
    assert parse_engine("role=prefill,max_num_seqs=4").role is WorkerRole.PREFILL


def test_speculation_is_chosen_in_the_same_line() -> None:
    assert parse_engine("speculation=off").speculation == EngineSettings().speculation
    assert parse_engine("speculation=ngram").speculation == SpeculationSetting("ngram")
    assert parse_engine("speculation=self:6").speculation == SpeculationSetting("self", layers=6)
    knobs = parse_engine("speculation=draft:/models/small.gguf,max_draft_count=3,max_draft_batch=2")
    assert knobs.speculation == SpeculationSetting("draft", model="/models/small.gguf")
    assert (knobs.max_draft_count, knobs.max_draft_batch) == (3, 2)
    assert str(knobs.speculation) == "draft:/models/small.gguf"


def test_the_echo_model_takes_prompt_lookup_and_refuses_a_draft_model() -> None:
    assert load_model(WorkerConfig(model="echo", engine=parse_engine("speculation=ngram"))).proposer is not None
    assert load_model(WorkerConfig(model="echo")).proposer is None
    with pytest.raises(StartupError, match="speculation=self:2"):
        load_model(WorkerConfig(model="echo", engine=parse_engine("speculation=self:2")))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("speculation=guess", "speculation"),
        ("speculation=draft:", "speculation"),
        ("speculation=ngram:3", "speculation"),
        ("speculation=self:0", "speculation"),
        ("role=both", "role"),
        ("max_draft_count=0", "max_draft_count"),
        ("max_num_seqs", "max_num_seqs"),
        ("max_num_sqs=3", "max_num_sqs"),
        ("max_num_seqs=0", "max_num_seqs"),
        ("max_num_seqs=many", "max_num_seqs"),
        ("gpu_memory_utilization=1.5", "gpu_memory_utilization"),
        ("gpu_memory_utilization=nan", "gpu_memory_utilization"),
        ("threads=1,threads=2", "threads"),
        ("host_kv_bytes=-1", "host_kv_bytes"),
        ("disk_kv_bytes=1000", "disk_kv_path"),
    ],
)
def test_a_bad_knob_is_named(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_engine(text)


@pytest.mark.parametrize("text", ["", "a b", "a@1", "{a}", "a:b", "a,b", "x" * 129, "a\n"])
def test_a_name_that_would_break_keys_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_name(text)


def test_every_problem_of_the_environment_is_told_at_once() -> None:
    environ = {"MILLRACE_ENGINE": "x=1", "MILLRACE_GRPC_LISTEN": "nowhere", "MILLRACE_ECHO_STEP_MS": "-1"}

    with pytest.raises(ConfigError) as caught:
        load(WorkerConfig, environ)

    assert len(str(caught.value).splitlines()) == 3


def test_the_version_and_the_name_are_the_operators_choice() -> None:
    first = load_model(WorkerConfig(model="echo", model_name="parrot", model_version="7")).served.card
    second = load_model(WorkerConfig(model="echo", engine=EngineSettings(max_model_len=64))).served.card

    assert (first.model.model, first.model.version) == ("parrot", "7")
    assert first.model.manifest_digest != second.model.manifest_digest


def test_manifest_parts_cannot_be_shifted_into_each_other() -> None:
    assert manifest_digest(b"ab", b"c") != manifest_digest(b"a", b"bc")


def test_a_missing_or_corrupt_model_is_one_plain_sentence(tmp_path: Path) -> None:
    corrupt = tmp_path / "model.gguf"
    corrupt.write_bytes(b"GGUF" + b"\xff" * 64)

    for model in (str(tmp_path / "none.gguf"), str(corrupt)):
        with pytest.raises(StartupError) as caught:
            load_model(WorkerConfig(model=model))
        assert "\n" not in str(caught.value)
        assert "Traceback" not in str(caught.value)


def test_a_worker_of_the_echo_model_never_imports_torch() -> None:
    program = (
        "import sys\n"
        "from services.worker.config import WorkerConfig\n"
        "from services.worker import __main__\n"
        "from services.worker.wiring import build\n"
        "build(WorkerConfig(model='echo'))\n"
        "sys.exit('torch' in sys.modules or 'triton' in sys.modules)\n"
    )
    path = f"{ROOT}:{ROOT / 'protos' / 'gen'}"

    result = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, cwd=ROOT, check=False)

    assert result.returncode == 0
