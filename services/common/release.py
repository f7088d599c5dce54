"""The release manifest: what one version of a model is made of and how it did, signed, named by its content's digest.

Pure: reads no file, keeps no key. The command line makes manifests, a worker holds itself to one, the
usage service asks for one before a rollout.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

FORMAT = "millrace release 1"
MAX_RELEASE_BYTES = 32_768
MAX_TEXT_CHARS = 256
MAX_ENTRIES = 64


class ReleaseError(ValueError):
    """Not a release, or not one to trust; the message says why in one sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pins:
    """What a worker must be to serve this version. Hashes are SHA-256 in hexadecimal.

    `weights` covers the model's files. `kernels` names their ABI and the hash of their sources. `hardware` is the class
    of machine they run on, `any` where nothing depends on it. `max_model_len` counts tokens, `max_num_seqs` sequences.
    """

    model: str
    version: str
    weights: str
    tokenizer: str
    chat_template: str
    runtime: str
    kernels: str
    dtype: str
    kv_cache_dtype: str
    hardware: str
    max_model_len: int
    max_num_seqs: int
    sampling_defaults: Mapping[str, float]
    adapters: tuple[str, ...] = ()

    def differences(self, other: Pins) -> list[str]:
        """One phrase a field that `other` has otherwise."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))
        return [f"{name} is {theirs!r}, not {own!r}" for name, own, theirs in pairs if own != theirs]


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """What `millrace eval` found of `model` (`name` or `name@version`); slices map to (count, passed)."""

    model: str
    perplexity: float
    token_count: int
    mean_answer_tokens: float
    slices: Mapping[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class ContractResult:
    """How the API contract suite ended: numbers of tests."""

    passed: int
    failed: int
    skipped: int


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is signed."""

    pins: Pins
    evaluation: Evaluation | None = None
    contract: ContractResult | None = None

    @property
    def missing(self) -> list[str]:
        """Why this version may not be rolled out unforced, one phrase a reason; empty when it may."""
        found = []
        if self.evaluation is None:
            found.append("it has no evaluation")
        if self.contract is None or self.contract.passed == 0:
            found.append("it has no result of the contract suite")
        elif self.contract.failed:
            found.append(f"{self.contract.failed} tests of the contract suite failed")
        return found

    @property
    def document(self) -> dict[str, Any]:
        """The manifest as JSON values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @property
    def canonical(self) -> bytes:
        """JSON in ASCII with sorted keys and no white space: what the digest is of."""
        text = json.dumps(self.document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return text.encode()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical form: the manifest's name."""
        return hashlib.sha256(self.canonical).digest()

    @property
    def statement(self) -> bytes:
        """What is signed."""
        return f"{FORMAT}\n{self.digest.hex()}\n".encode()


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """A manifest with who signed it."""

    manifest: Manifest
    public_key: bytes
    signature: bytes

    def to_json(self) -> str:
        """The file."""
        fields = {"public_key": self.public_key.hex(), "signature": self.signature.hex()}
        return json.dumps({"manifest": self.manifest.document, **fields}, indent=2, sort_keys=True) + "\n"

    def check(self, trusted: Collection[bytes]) -> None:
        """Raises ReleaseError unless one of the `trusted` public keys signed exactly this manifest."""
        if self.public_key not in trusted:
            raise ReleaseError(f"it is signed with {self.public_key.hex()}, which is not a trusted key")
        try:
            Ed25519PublicKey.from_public_bytes(self.public_key).verify(self.signature, self.manifest.statement)
        except (InvalidSignature, ValueError):
            raise ReleaseError("its signature is not of this manifest") from None


def parse_keys(text: str) -> frozenset[bytes]:
    """Public keys in hexadecimal, separated by spaces or commas. Raises ValueError."""
    keys = frozenset(bytes.fromhex(part) for part in text.replace(",", " ").split())
    if any(len(key) != 32 for key in keys):
        raise ValueError("expected Ed25519 public keys of 64 hexadecimal digits")
    return keys


def parse_release(data: bytes) -> Release:
    """A release from its file; its signature is not looked at yet. Raises ReleaseError."""
    if len(data) > MAX_RELEASE_BYTES:
        raise ReleaseError(f"it is larger than {MAX_RELEASE_BYTES} bytes")
    try:
        document = json.loads(data, parse_constant=_no_constant)
        fields = _known(document, "the file", ("manifest", "public_key", "signature"))
        public_key, signature = bytes.fromhex(fields["public_key"]), bytes.fromhex(fields["signature"])
        return Release(_manifest(fields["manifest"]), public_key, signature)
    except ReleaseError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ReleaseError("it is not JSON of a release") from None


def parse_evaluation(document: object) -> Evaluation:
    """The report of `millrace eval`. Raises ReleaseError."""
    fields = _fields(Evaluation, document, "evaluation")
    return Evaluation(**fields)


def _manifest(document: object) -> Manifest:
    fields = _known(document, "manifest", ("format", "pins", "evaluation", "contract"))
    if fields["format"] != FORMAT:
        raise ReleaseError(f"its format is not {FORMAT!r}")
    evaluation, contract = fields["evaluation"], fields["contract"]
    return Manifest(
        Pins(**_fields(Pins, fields["pins"], "pins")),
        None if evaluation is None else parse_evaluation(evaluation),
        None if contract is None else ContractResult(**_fields(ContractResult, contract, "contract")),
    )


def _fields(kind: Any, document: object, where: str) -> dict[str, Any]:
    """The fields of a dataclass, each of its kind."""
    known = {f.name: str(f.type) for f in dataclasses.fields(kind)}
    values = _known(document, where, tuple(known))
    return {name: _PARSERS[known[name]](values[name], f"{where}.{name}") for name in known}


def _known(document: object, where: str, names: Collection[str]) -> dict[str, Any]:
    if not isinstance(document, dict) or set(document) != set(names):
        raise ReleaseError(f"{where} must have exactly the fields {', '.join(names)}")
    return document


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS or not value.isprintable():
        raise ReleaseError(f"{where} must be at most {MAX_TEXT_CHARS} printable characters")
    return value


def _count(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise ReleaseError(f"{where} must be a whole number, 0 or more")
    return value


def _number(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ReleaseError(f"{where} must be a finite number")
    return float(value)


def _numbers(value: object, where: str) -> dict[str, float]:
    return {name: _number(each, f"{where}.{name}") for name, each in _entries(value, where).items()}


def _slices(value: object, where: str) -> dict[str, tuple[int, int]]:
    """Pairs as in a manifest, or `{"count": …, "passed": …}` as `millrace eval` writes them."""
    found = {}
    for name, each in _entries(value, where).items():
        pair = [each.get("count"), each.get("passed")] if isinstance(each, dict) else each
        if not isinstance(pair, list) or len(pair) != 2:
            raise ReleaseError(f"{where}.{name} must be a pair of numbers")
        found[name] = (_count(pair[0], f"{where}.{name}"), _count(pair[1], f"{where}.{name}"))
    return found


def _entries(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
        raise ReleaseError(f"{where} must have at most {MAX_ENTRIES} entries")
    return {_text(name, where): each for name, each in value.items()}


def _texts(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_ENTRIES:
        raise ReleaseError(f"{where} must be a list of at most {MAX_ENTRIES} names")
    return tuple(_text(each, where) for each in value)


def _no_constant(name: str) -> float:
    raise ReleaseError(f"{name} is not a number of JSON")


_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "str": _text,
    "int": _count,
    "float": _number,
    "Mapping[str, float]": _numbers,
    "Mapping[str, tuple[int, int]]": _slices,
    "tuple[str, ...]": _texts,
}
