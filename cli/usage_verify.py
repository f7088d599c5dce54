"""`millrace usage verify`: whether an exported file still says what the usage service signed, and if not, where."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from cli.up import fail
from cli.usage_files import FORMAT_NAMES, PARQUET, file_digest, from_parquet, seal_from, seal_path
from services.usage.records import FORMATS, KNOWN_COLUMNS, Record, digest_of_record
from services.usage.seals import RowDigests, Seal

READ_ROWS = 5_000


class Tampered(Exception):
    """The file is not what was signed; `str()` says where."""


def verify_file(path: Path, format: str | None, public_key: bytes | None) -> Seal:
    """Check a file against the digests beside it and their signature; returns the seal. Flat memory.

    Raises Tampered; exits with one sentence for files that cannot be read.
    """
    chosen = format if format is not None else _format_of(path)
    beside = seal_path(path)
    for needed in (path, beside):
        if not needed.is_file():
            raise fail(f"{needed} does not exist.")
    with beside.open(encoding="utf-8", errors="replace") as lines:
        seal, checksum = _read_seal(lines)
    if public_key is not None and seal.public_key != public_key:
        raise Tampered(f"{beside} is signed by another key, {seal.public_key.hex()}.")
    with beside.open(encoding="utf-8", errors="replace") as lines:
        digests = _read_digests(lines)
        rows = _read_rows(path, chosen)
        _compare(rows, digests)
    if file_digest(path) != checksum:
        raise Tampered("Every row is as it was signed, but the file is not: something outside the rows changed.")
    return seal


def _compare(rows: Iterator[Record | None], digests: Iterator[tuple[int, bytes]]) -> None:
    for row_id, digest in digests:
        try:
            record = next(rows, None)
        except StopIteration:
            record = None
        if record is None:
            raise Tampered(f"Row {row_id} is missing or cannot be read.")
        found = record["row_id"]
        if isinstance(found, int) and found > row_id:
            raise Tampered(f"Row {row_id} is missing.")
        if found != row_id or digest_of_record(record) != digest:
            raise Tampered(f"Row {row_id} is altered.")
    if next(rows, None) is not None:
        raise Tampered("There are rows after the last one that was signed.")


def _read_seal(lines: IO[str]) -> tuple[Seal, str]:
    """Seal and checksum of the file; checks the signature over the digests above them."""
    rows = RowDigests()
    last = ""
    for line in lines:
        if last:
            row_id, digest = _parse_digest(last)
            rows.add(row_id, digest)
        last = line
    try:
        tail = json.loads(last)
        seal, checksum = seal_from(tail["seal"]), str(tail["file_sha256"])
    except (ValueError, LookupError, TypeError):
        raise Tampered("The last line of the seal file is not a seal.") from None
    if not seal.is_genuine() or rows.digest != seal.digest or rows.row_count != seal.row_count:
        raise Tampered("The seal file is altered: its signature is not of these digests.")
    return seal, checksum


def _read_digests(lines: IO[str]) -> Iterator[tuple[int, bytes]]:
    held = ""
    for line in lines:
        if held:
            yield _parse_digest(held)
        held = line


def _parse_digest(line: str) -> tuple[int, bytes]:
    try:
        row_id, _, digest = line.rstrip("\n").partition(" ")
        return int(row_id), bytes.fromhex(digest)
    except ValueError:
        raise Tampered("The seal file is altered: one of its lines is not a digest.") from None


def _read_rows(path: Path, format: str) -> Iterator[Record | None]:
    """Records in the order of the file; None for what cannot be read as one."""
    if format == PARQUET:
        yield from _read_parquet(path)
        return
    kind = FORMATS[format]
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as opened:
        if kind.head and opened.readline() not in (kind.head, *kind.earlier_heads):
            raise Tampered("The header line is altered.")
        for text in _csv_rows(opened) if format == "csv" else opened:
            try:
                record = kind.read(text)
                # Written again it must be the same text: a changed byte that reads the same is a change too.
                yield record if kind.line(record) == text else _altered(record)
            except (ValueError, LookupError, TypeError, AttributeError, csv.Error):
                yield None


def _altered(record: Record) -> Record:
    return record | {"request_id": f"{record['request_id']} (written otherwise)"}


def _csv_rows(opened: IO[str]) -> Iterator[str]:
    """The text of one record each; a quoted cell may hold line breaks."""
    text = ""
    for line in opened:
        text += line
        if text.count('"') % 2 == 0:
            yield text
            text = ""
    if text:
        yield text


def _read_parquet(path: Path) -> Iterator[Record | None]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError:
        raise fail("Parquet needs pyarrow: pip install 'millrace[parquet]'.") from None
    try:
        opened = parquet.ParquetFile(path)
        if tuple(opened.schema_arrow.names) not in KNOWN_COLUMNS:
            raise Tampered("The columns are altered.")
        for batch in opened.iter_batches(READ_ROWS):
            yield from _parquet_records(batch)
    except (pa.ArrowException, OSError, ValueError):
        yield None


def _parquet_records(batch: Any) -> Iterator[Record | None]:
    import pyarrow as pa

    columns = [
        (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_pylist()
        for column in batch.columns
    ]
    for values in zip(*columns, strict=True):
        try:
            yield {name: from_parquet(name, value) for name, value in zip(batch.schema.names, values, strict=True)}
        except (ValueError, TypeError, OverflowError):
            yield None


def _format_of(path: Path) -> str:
    suffix = path.suffix.removeprefix(".")
    if suffix in FORMAT_NAMES:
        return suffix
    raise fail(f"The name {path.name} does not say the format: add --format {', '.join(FORMAT_NAMES)}.")
