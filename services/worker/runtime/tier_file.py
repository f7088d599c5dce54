"""One block in one file: a fixed header that says what it is, then the raw bytes of the tensor.

Owns the format and how a file is opened: relative to an open folder, following no link, regular files only.
Nothing in a file can become anything but bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import stat
import struct

from services.worker.engine.kv_blocks import KVBlock, KVLayout

_MAGIC = b"MLRKVBLK"
_FORMAT = 1
_MAX_DIMENSIONS = 6
# Magic, format, digest of the model version, dtype, shape padded with 0, payload bytes, block hash, block checksum.
_HEADER = struct.Struct(f"<8sI32s16s{_MAX_DIMENSIONS}IQ32sI")
# Over the header itself.
_SUM = struct.Struct("<16s")
HEADER_BYTES = _HEADER.size + _SUM.size
_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_UNFINISHED = re.compile(r"[0-9a-f]{64}\.tmp")


class SpoiltFileError(Exception):
    """The file is not one whole block of this model and layout."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileFormat:
    """What the files of one worker hold: blocks of this layout, computed by this model version."""

    layout: KVLayout
    model_version: str

    @property
    def file_bytes(self) -> int:
        """Size of every file."""
        return HEADER_BYTES + self.layout.block_bytes


def name_of(full_hash: bytes) -> str:
    """The file's name."""
    return f"{full_hash.hex()}.kv"


def hash_of(name: str) -> bytes | None:
    """The block that a file of this name should hold; None for a name that is not ours."""
    return bytes.fromhex(name[:64]) if _NAME.fullmatch(name) else None


def is_unfinished(name: str) -> bool:
    """True for a file that a writer left behind."""
    return _UNFINISHED.fullmatch(name) is not None


def write_block(folder: int, block: KVBlock, form: FileFormat) -> None:
    """Write the block under a name of its own, then rename it into place. Raises OSError and leaves nothing then."""
    unfinished = f"{block.full_hash.hex()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(unfinished, flags, 0o600, dir_fd=folder)
    try:
        try:
            _write_all(descriptor, _header(block.full_hash, block.checksum, form))
            _write_all(descriptor, block.payload)
        finally:
            os.close(descriptor)
        os.rename(unfinished, name_of(block.full_hash), src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=folder)
        raise


def read_block(folder: int, full_hash: bytes, form: FileFormat) -> KVBlock:
    """The block in a file; its checksum is for the reader to check. Raises OSError or SpoiltFileError."""
    descriptor = _open(folder, name_of(full_hash))
    try:
        checksum = _checked_header(descriptor, full_hash, form)
        payload = _read_all(descriptor, form.layout.block_bytes)
    finally:
        os.close(descriptor)
    return KVBlock(full_hash, payload, checksum)


def check_file(folder: int, full_hash: bytes, form: FileFormat) -> float:
    """Read the header only; returns when the file was last written. Raises OSError or SpoiltFileError."""
    descriptor = _open(folder, name_of(full_hash))
    try:
        _checked_header(descriptor, full_hash, form)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _open(folder: int, name: str) -> int:
    # O_NONBLOCK: opening a named pipe must not hang before it is seen to be none of ours.
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)


def _checked_header(descriptor: int, full_hash: bytes, form: FileFormat) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != form.file_bytes:
        raise SpoiltFileError("not a regular file of the right size")
    raw = _read_all(descriptor, HEADER_BYTES)
    if len(raw) != HEADER_BYTES or raw[_HEADER.size :] != _header_sum(raw[: _HEADER.size]):
        raise SpoiltFileError("the header is torn")
    checksum = int(_HEADER.unpack(raw[: _HEADER.size])[-1])
    if raw != _header(full_hash, checksum, form):
        raise SpoiltFileError("a block of another model, layout or name")
    return checksum


def _header(full_hash: bytes, checksum: int, form: FileFormat) -> bytes:
    layout = form.layout
    shape = layout.shape + (0,) * (_MAX_DIMENSIONS - len(layout.shape))
    version_digest = hashlib.sha256(form.model_version.encode()).digest()
    fields = _HEADER.pack(
        _MAGIC, _FORMAT, version_digest, layout.dtype.encode(), *shape, layout.block_bytes, full_hash, checksum
    )
    return fields + _header_sum(fields)


def _header_sum(fields: bytes) -> bytes:
    return hashlib.blake2b(fields, digest_size=_SUM.size).digest()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read_all(descriptor: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count > 0:
        part = os.read(descriptor, count)
        if not part:
            raise SpoiltFileError("the file ends early")
        parts.append(part)
        count -= len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]
