"""Signed statements about runs of ledger rows: what an auditor checks exports and days with.

A seal is an Ed25519 signature over a few lines of text: what it speaks of, its first and last row, their number, and a
SHA-256 over each row's id and digest. Owns the key file; knows no table and no format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from services.common.lifecycle import StartupError

KEY_FILE = "usage-signing-key.pem"


@dataclasses.dataclass(frozen=True, slots=True)
class Seal:
    """Rows after `after_row_id` up to `last_row_id`; `previous` is the digest of the seal before, empty at first."""

    subject: str
    after_row_id: int
    last_row_id: int
    row_count: int
    digest: bytes
    previous: bytes = b""
    public_key: bytes = b""
    signature: bytes = b""

    @property
    def statement(self) -> bytes:
        """What is signed."""
        lines = (
            "millrace seal 1", self.subject, str(self.after_row_id), str(self.last_row_id), str(self.row_count),
            self.digest.hex(), self.previous.hex(),
        )  # fmt: skip
        return "".join(f"{line}\n" for line in lines).encode()

    @property
    def own_digest(self) -> bytes:
        """SHA-256 of statement and signature: the `previous` of the seal after this one."""
        return hashlib.sha256(self.statement + self.signature).digest()

    def is_genuine(self) -> bool:
        """Whether the signature is of this statement by `public_key`; whose key that is, the caller must know."""
        try:
            Ed25519PublicKey.from_public_bytes(self.public_key).verify(self.signature, self.statement)
        except (InvalidSignature, ValueError):
            return False
        return True


class RowDigests:
    """Running digest over rows in their order; `line` is what goes into it, and into the file beside an export."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.row_count = 0

    def add(self, row_id: int, digest: bytes) -> str:
        """Take one row in; returns its line."""
        line = f"{row_id} {digest.hex()}\n"
        self._hash.update(line.encode())
        self.row_count += 1
        return line

    @property
    def digest(self) -> bytes:
        """SHA-256 so far."""
        return self._hash.digest()


class Signer:
    """Holds the private key of one usage service."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw()

    def sign(self, seal: Seal) -> Seal:
        """The seal with key and signature."""
        return dataclasses.replace(seal, public_key=self.public_key, signature=self.signature(seal.statement))

    def signature(self, statement: bytes) -> bytes:
        """Of any statement; its first line must say what kind it is, so that none passes for one of another kind."""
        return self._key.sign(statement)


def open_signer(folder: Path, file: str = KEY_FILE) -> Signer:
    """The signer of the key file in `folder`; made at first, readable by its owner only. Raises StartupError."""
    path = folder / file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise StartupError(f"The signing key {path} cannot be used: {error.strerror}.") from error
    except (ValueError, TypeError):
        raise StartupError(f"The signing key {path} is not an Ed25519 key in PEM form.") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StartupError(f"The signing key {path} is not an Ed25519 key in PEM form.")
    return Signer(key)


def _create(path: Path) -> None:
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(pem)
            out.flush()
            os.fsync(out.fileno())
        # A link and not a rename: of two services that start together the first one's key stays.
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink()
