"""Manifests of releases: their form, their signatures, the command line, and workers that hold themselves to one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from cli.main import app as millrace
from services.common.lifecycle import StartupError
from services.common.release import (
    MAX_RELEASE_BYTES,
    ContractResult,
    Evaluation,
    Manifest,
    Pins,
    ReleaseError,
    parse_keys,
    parse_release,
)
from services.usage.seals import Signer
from services.worker.config import WorkerConfig, parse_engine
from services.worker.model_source import load_model
from tests.helpers.releases import REPORT, signed

PINS = Pins(
    model="m",
    version="2",
    weights="aa",
    tokenizer="bb",
    chat_template="cc",
    runtime="millrace 1",
    kernels="abi 2",
    dtype="int8",
    kv_cache_dtype="float16",
    hardware="cpu x86_64 avx2",
    max_model_len=4096,
    max_num_seqs=32,
    sampling_defaults={"temperature": 1.0},
)
FULL = Manifest(PINS, Evaluation("m@2", 20.5, 1000, 40.0, {"json": (20, 15)}), ContractResult(90, 0, 3))
SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(b"\x07" * 32))


def millrace_release(*arguments: object, home: Path) -> Result:
    env = {"MILLRACE_HOME": str(home), "COLUMNS": "200", "MILLRACE_RELEASE_KEYS": None}
    return CliRunner().invoke(millrace, ["release", *map(str, arguments)], env=env)


def make_release(folder: Path, version: str = "2", *options: str) -> tuple[Path, str]:
    """A release of the echo model and the key it is signed with."""
    file = folder / f"{version}.json"
    made = millrace_release("create", "--model", "echo", "--version", version, "--out", file, *options, home=folder)
    assert made.exit_code == 0, made.output
    return file, parse_release(file.read_bytes()).public_key.hex()


def served_with(file: Path, key: str, version: str = "2", knobs: str = "") -> bytes:
    engine = parse_engine(f"release={file},release_key={key}{knobs}")
    config = WorkerConfig(model="echo", model_version=version, engine=engine)
    return load_model(config).served.card.model.manifest_digest


def test_a_release_comes_back_from_its_file_as_it_was() -> None:
    release = signed(FULL, SIGNER)

    read = parse_release(release.to_json().encode())

    read.check({SIGNER.public_key})
    assert read == release
    assert read.manifest.digest == FULL.digest
    assert FULL.missing == []


def test_the_digest_is_of_the_content_and_not_of_how_it_is_written() -> None:
    release = signed(FULL, SIGNER)
    document = json.loads(release.to_json())

    other = json.dumps(dict(reversed(document.items())), indent=7).encode()

    assert parse_release(other).manifest.digest == FULL.digest
    assert FULL.digest.hex() == "bf3ecfb2e4ee225de6a7c5efd66fa43fc5ea29693c04ace31e50dc90dfb8de23"


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Pins)])
def test_every_pin_counts_and_is_named(field: str) -> None:
    value = getattr(PINS, field)
    other = {str: "x", int: 1, dict: {"temperature": 0.5}, tuple: ("adapter",)}[type(value)]
    changed = dataclasses.replace(PINS, **{field: other})

    assert dataclasses.replace(FULL, pins=changed).digest != FULL.digest
    (difference,) = PINS.differences(changed)
    assert difference.startswith(f"{field} is ")
    assert PINS.differences(PINS) == []


def test_what_was_changed_after_signing_or_signed_by_others_is_refused() -> None:
    release = signed(FULL, SIGNER)
    stranger = Signer(Ed25519PrivateKey.generate())
    better = dataclasses.replace(FULL, contract=ContractResult(91, 0, 0))

    with pytest.raises(ReleaseError, match="not of this manifest"):
        dataclasses.replace(release, manifest=better).check({SIGNER.public_key})
    with pytest.raises(ReleaseError, match="not of this manifest"):
        dataclasses.replace(signed(FULL, stranger), public_key=SIGNER.public_key).check({SIGNER.public_key})
    with pytest.raises(ReleaseError, match="not a trusted key"):
        signed(FULL, stranger).check({SIGNER.public_key})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("manifest",), None),
        (("manifest", "format"), "millrace release 2"),
        (("manifest", "extra"), 1),
        (("manifest", "pins", "model"), 7),
        (("manifest", "pins", "model"), "\x1b[31m"),
        (("manifest", "pins", "model"), "x" * 257),
        (("manifest", "pins", "max_num_seqs"), True),
        (("manifest", "pins", "max_num_seqs"), -1),
        (("manifest", "pins", "max_num_seqs"), 10**30),
        (("manifest", "pins", "sampling_defaults"), {"temperature": "hot"}),
        (("manifest", "pins", "sampling_defaults"), {f"p{i}": 1 for i in range(65)}),
        (("manifest", "pins", "adapters"), "none"),
        (("manifest", "evaluation", "perplexity"), float("nan")),
        (("manifest", "evaluation", "perplexity"), 10**400),
        (("manifest", "evaluation", "slices"), {"json": [1]}),
        (("manifest", "contract"), []),
        (("signature",), "xyz"),
        (("public_key",), 5),
    ],
)
def test_a_file_with_anything_else_in_it_is_no_release(path: tuple[str, ...], value: object) -> None:
    document: dict[str, Any] = json.loads(signed(FULL, SIGNER).to_json())
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value

    with pytest.raises(ReleaseError):
        parse_release(json.dumps(document).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 30_000, b'"\\ud800"', b" " * 40_000])
def test_bytes_that_are_no_release_are_refused(data: bytes) -> None:
    with pytest.raises(ReleaseError):
        parse_release(data)


def test_what_is_missing_for_a_rollout_is_said() -> None:
    failed = dataclasses.replace(FULL, contract=ContractResult(90, 2, 0))

    assert len(Manifest(PINS).missing) == 2
    assert failed.missing == ["2 tests of the contract suite failed"]
    assert dataclasses.replace(FULL, contract=ContractResult(0, 0, 9)).missing != []


def test_keys_are_read_from_one_line() -> None:
    first, second = "ab" * 32, "cd" * 32

    assert parse_keys(f"{first}, {second}") == {bytes.fromhex(first), bytes.fromhex(second)}
    for bad in ("ab", "zz" * 32):
        with pytest.raises(ValueError, match=r"expected|hexadecimal"):
            parse_keys(bad)


def test_a_release_is_made_shown_verified_and_compared(tmp_path: Path) -> None:
    report, suite = tmp_path / "eval.json", tmp_path / "junit.xml"
    report.write_text(json.dumps({**REPORT, "model": "echo@2"}))
    suite.write_text('<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>')

    file, key = make_release(tmp_path, "2", "--eval", str(report), "--contract", str(suite))
    other, _ = make_release(tmp_path, "3")

    manifest = parse_release(file.read_bytes()).manifest
    assert manifest.contract == ContractResult(5, 2, 2)
    assert manifest.evaluation is not None
    assert manifest.evaluation.slices == {"copying": (20, 15)}
    shown = millrace_release("show", file, home=tmp_path)
    assert manifest.digest.hex() in shown.output
    assert "evaluation.slices.copying" in shown.output
    assert millrace_release("verify", file, "--key", key, home=tmp_path).exit_code == 0
    assert millrace_release("verify", file, "--key", key, "--digest", "00ff", home=tmp_path).exit_code == 2
    assert millrace_release("verify", file, "--key", "ab" * 32, home=tmp_path).exit_code == 2
    assert millrace_release("diff", file, file, home=tmp_path).exit_code == 0
    compared = millrace_release("diff", file, other, home=tmp_path)
    assert compared.exit_code == 1
    assert "pins.version" in compared.output
    assert "pins.runtime" not in compared.output


def test_results_of_something_else_are_refused_in_one_sentence(tmp_path: Path) -> None:
    wrong, junk = tmp_path / "eval.json", tmp_path / "junk"
    wrong.write_text(json.dumps({**REPORT, "model": "echo@1"}))
    junk.write_text("<" + "x" * MAX_RELEASE_BYTES)
    create = ("create", "--model", "echo", "--version", "2", "--out", tmp_path / "out.json")
    commands: list[tuple[object, ...]] = [
        (*create, "--eval", wrong),
        (*create, "--eval", junk),
        (*create, "--contract", junk),
        (*create, "--contract", tmp_path / "nothing"),
        (*create, "--engine", "max_num_sqs=1"),
        ("create", "--model", "echo", "--version", "a b"),
        ("show", junk),
        ("verify", junk, "--key", "ab" * 32),
        ("diff", junk, junk),
    ]

    for command in commands:
        refused = millrace_release(*command, home=tmp_path)
        assert refused.exit_code == 2, command
        assert refused.output.startswith("error: "), command
        assert len(refused.output.strip().splitlines()) == 1, refused.output
    assert not (tmp_path / "out.json").exists()


def test_a_worker_serves_its_release_under_the_manifests_digest(tmp_path: Path) -> None:
    file, key = make_release(tmp_path)

    assert served_with(file, key) == parse_release(file.read_bytes()).manifest.digest


def test_a_worker_that_is_something_else_names_each_field_and_does_not_start(tmp_path: Path) -> None:
    file, key = make_release(tmp_path)

    with pytest.raises(StartupError, match=r"max_model_len is 64, not 32768; max_num_seqs is 3, not 32") as caught:
        served_with(file, key, "2", ",max_model_len=64,max_num_seqs=3")
    with pytest.raises(StartupError, match="version is '3', not '2'; weights is"):
        served_with(file, key, "3")
    assert "version" not in str(caught.value)


def test_a_worker_refuses_a_release_that_it_cannot_trust(tmp_path: Path) -> None:
    file, key = make_release(tmp_path)
    document = json.loads(file.read_text())
    document["manifest"]["pins"]["max_num_seqs"] = 3
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(document))

    for path, signed_with in ((file, "ab" * 32), (forged, key), (tmp_path / "none.json", key)):
        with pytest.raises(StartupError, match=str(path)):
            served_with(path, signed_with, "2", ",max_num_seqs=3")
    for knobs in (f"release={file}", f"release_key={key}", f"release={file},release_key=ab"):
        with pytest.raises(ValueError, match="release_key"):
            parse_engine(knobs)
