"""`millrace release`: make, show, verify and compare the signed manifest of one version of a model."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cli.stack_state import home_dir
from cli.up import fail
from cli.usage_files import whole_file
from services.common.lifecycle import StartupError
from services.common.release import (
    MAX_RELEASE_BYTES,
    ContractResult,
    Evaluation,
    Manifest,
    Pins,
    Release,
    ReleaseError,
    parse_evaluation,
    parse_keys,
    parse_release,
)
from services.usage.seals import open_signer

KEY_FILE = "release-signing-key.pem"
MAX_REPORT_BYTES = 8 << 20
DIFFERENT = 1

app = typer.Typer(no_args_is_help=True)
ReleaseFile = Annotated[Path, typer.Argument(help="Release made by `millrace release create`.", show_default=False)]


@app.command()
def create(
    model: Annotated[str, typer.Option(envvar="MILLRACE_MODEL", help="As for a worker: a name, a path, or `echo`.")],
    version: Annotated[str, typer.Option(envvar="MILLRACE_MODEL_VERSION", help="Version to release.")],
    name: Annotated[str, typer.Option(envvar="MILLRACE_MODEL_NAME", help="Name to serve it under; its own.")] = "",
    engine: Annotated[
        str, typer.Option(envvar="MILLRACE_ENGINE", help="Engine knobs, as workers will be started with.")
    ] = "",
    evaluation: Annotated[
        Path | None, typer.Option("--eval", help="Report of `millrace eval --model NAME@VERSION --out`.")
    ] = None,
    contract: Annotated[
        Path | None, typer.Option(help="Result of the contract suite: `pytest tests/contract --junitxml FILE`.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="Ed25519 key (PEM) to sign with, made at first; $MILLRACE_HOME's unless given.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; NAME@VERSION-DIGEST.json unless given.")] = None,
) -> None:
    """Load a model as a worker would, and write down and sign what it is and how it did.

    Run it on a machine of the class that will serve the version: hardware and kernels are pinned too. Without --eval
    and --contract the release can be served, but not rolled out unforced.
    """
    found = None if evaluation is None else _evaluation(evaluation)
    suite = None if contract is None else _contract(contract)
    pins = _pins(model, name, version, engine)
    if found is not None and found.model != f"{pins.model}@{pins.version}":
        raise fail(f"{evaluation} is an evaluation of {found.model}, not of {pins.model}@{pins.version}.")
    path = key if key is not None else home_dir() / KEY_FILE
    manifest = Manifest(pins, found, suite)
    try:
        signer = open_signer(path.parent, path.name)
        text = Release(manifest, signer.public_key, signer.signature(manifest.statement)).to_json()
        parse_release(text.encode())
    except StartupError as error:
        raise fail(str(error)) from error
    except ReleaseError as error:
        raise fail(f"This cannot be released: {error}.") from error
    target = out if out is not None else Path(f"{pins.model}@{pins.version}-{manifest.digest.hex()[:12]}.json")
    with whole_file(target) as opened:
        opened.write(text)
    print(f"Wrote {target}, manifest {manifest.digest.hex()}.")
    print(f"Signed with {signer.public_key.hex()}: give that key to workers (release_key=) and the usage service.")
    for reason in manifest.missing:
        print(f"It cannot be rolled out unforced: {reason}.")


@app.command()
def show(file: ReleaseFile) -> None:
    """Show what a release pins, how it did, its digest and whose key signed it. Checks no signature."""
    release = read_release(file)
    shown = _table("field", "value")
    for name, value in _flat(release.manifest.document).items():
        shown.add_row(name, value)
    console = Console(highlight=False, markup=False)
    console.print(f"manifest {release.manifest.digest.hex()}", soft_wrap=True)
    console.print(f"key {release.public_key.hex()}", soft_wrap=True)
    console.print(shown)


@app.command()
def verify(
    file: ReleaseFile,
    key: Annotated[
        str, typer.Option(envvar="MILLRACE_RELEASE_KEYS", help="Trusted public keys in hexadecimal, by commas.")
    ],
    digest: Annotated[str, typer.Option(help="Digest that it must have, or the beginning of it.")] = "",
) -> None:
    """Check that a trusted key signed exactly this manifest."""
    release = read_release(file)
    try:
        release.check(parse_keys(key))
    except ReleaseError as error:
        raise fail(f"{file} is refused: {error}.") from None
    except ValueError:
        raise fail("--key takes Ed25519 public keys of 64 hexadecimal digits.") from None
    own = release.manifest.digest.hex()
    if not own.startswith(digest.lower()):
        raise fail(f"{file} is manifest {own}, not {digest}.")
    print(f"{file} is manifest {own}, signed with {release.public_key.hex()}.")


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(help="Release to compare with.", show_default=False)],
    new: Annotated[Path, typer.Argument(help="The other release.", show_default=False)],
) -> None:
    """Show every field that two releases have differently; exits with 1 when there is one."""
    before, after = (_flat(read_release(path).manifest.document) for path in (old, new))
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if not changed:
        print("The manifests are the same.")
        return
    shown = _table("field", str(old), str(new))
    for name in changed:
        shown.add_row(name, before.get(name, "-"), after.get(name, "-"))
    Console(highlight=False, markup=False).print(shown)
    raise typer.Exit(DIFFERENT)


def read_release(path: Path) -> Release:
    """A release from its file; exits with one sentence for anything else."""
    try:
        return parse_release(_bounded(path, MAX_RELEASE_BYTES))
    except ReleaseError as error:
        raise fail(f"{path} is not a release: {error}.") from None


def _pins(model: str, name: str, version: str, engine: str) -> Pins:
    from services.worker.config import WorkerConfig, parse_engine, parse_name
    from services.worker.model_source import load_pins

    try:
        config = WorkerConfig(
            model=model, model_name=parse_name(name) if name else "", model_version=parse_name(version),
            engine=parse_engine(engine),
        )  # fmt: skip
        return load_pins(config)
    except (ValueError, StartupError) as error:
        raise fail(f"{str(error).rstrip('.')}.") from error


def _evaluation(path: Path) -> Evaluation:
    try:
        return parse_evaluation(json.loads(_bounded(path, MAX_RELEASE_BYTES)))
    except ReleaseError as error:
        raise fail(f"{path} is not a report of `millrace eval`: {error}.") from None
    except (ValueError, RecursionError):
        raise fail(f"{path} is not a report of `millrace eval`: it is not JSON.") from None


def _contract(path: Path) -> ContractResult:
    """Counts of a JUnit file; an error of a test is a failure."""
    try:
        # The caller's own file, bounded above; expat itself limits what entities may grow to.
        suites = list(ET.fromstring(_bounded(path, MAX_REPORT_BYTES)).iter("testsuite"))  # noqa: S314
        total, failures, errors, skipped = (
            sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
        )
    except (ET.ParseError, ValueError):
        raise fail(f"{path} is not a JUnit file.") from None
    passed = total - failures - errors - skipped
    if not suites or min(passed, failures, errors, skipped) < 0:
        raise fail(f"{path} has no counts of tests.")
    return ContractResult(passed, failures + errors, skipped)


def _bounded(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as opened:
            data = opened.read(most + 1)
    except OSError as error:
        raise fail(f"{path} cannot be read: {error.strerror}.") from error
    if len(data) > most:
        raise fail(f"{path} is larger than {most:,} bytes.")
    return data


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = _cell(value)
    return found


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _cell(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
