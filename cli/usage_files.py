"""Files of an export: written beside their place and moved there whole, with the signed digests of their rows.

`<file>.seal` has one line `<row_id> <digest>` a row; the last line is JSON: the service's seal, and a checksum of the
file. Owns the layout of both; what a row looks like is `services.usage.records`'.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from millrace.usage.v1 import usage_service_pb2 as pb

from cli.up import fail
from services.usage.records import COLUMNS, FORMATS, NUMBERS, TIMES, Record, record_of
from services.usage.seals import RowDigests, Seal

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = "parquet"
FORMAT_NAMES = (*FORMATS, PARQUET)
PARQUET_ROWS = 20_000
SEAL_FIELDS = ("subject", "after_row_id", "last_row_id", "row_count")
SEAL_BYTES = ("digest", "previous", "public_key", "signature")


class RowWriter(Protocol):
    """Takes rows in their order."""

    def write(self, rows: Sequence[pb.LedgerRow]) -> None:
        """Write some rows."""

    def close(self) -> None:
        """Write what is still held back; the file stays open."""


class LineWriter:
    """Text formats: one record a line."""

    def __init__(self, out: IO[str], format: str) -> None:
        self._out = out
        self._line = FORMATS[format].line
        out.write(FORMATS[format].head)

    def write(self, rows: Sequence[pb.LedgerRow]) -> None:
        """Write some rows."""
        self._out.write("".join([self._line(record_of(row)) for row in rows]))

    def close(self) -> None:
        """Nothing is held back."""


class ParquetWriter:
    """Typed columns: numbers, times in nanoseconds of UTC (absent is null), metadata as JSON text."""

    def __init__(self, out: IO[bytes]) -> None:
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise fail("Parquet needs pyarrow: pip install 'millrace[parquet]'.") from None
        self._schema = parquet_schema()
        self._writer = parquet.ParquetWriter(out, self._schema, compression="zstd")
        self._held: list[Record] = []

    def write(self, rows: Sequence[pb.LedgerRow]) -> None:
        """Write some rows, a row group at a time."""
        self._held.extend(map(record_of, rows))
        if len(self._held) >= PARQUET_ROWS:
            self._flush()

    def close(self) -> None:
        """Write the last row group and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        held, self._held = self._held, []
        columns = [pa.array([to_parquet(name, record[name]) for record in held], field.type)
                   for name, field in zip(COLUMNS, self._schema, strict=True)]  # fmt: skip
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))


class SealWriter:
    """Writes `<file>.seal`, and checks on the way that the service signed the rows that arrived."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._rows = RowDigests()

    def add(self, page: pb.ExportUsageResponse) -> None:
        """The digests of one page."""
        lines = [self._rows.add(row.row_id, digest) for row, digest in zip(page.rows, page.digests, strict=True)]
        self._out.write("".join(lines))

    def close(self, seal: pb.Seal, file_digest: str) -> None:
        """The last line. Exits when the seal is not one of these rows: they changed on their way."""
        parsed = parse_seal(seal)
        if parsed.digest != self._rows.digest or not parsed.is_genuine():
            raise fail("The seal of the usage service is not of the rows it sent.")
        values = {name: getattr(parsed, name) for name in SEAL_FIELDS}
        values |= {name: getattr(parsed, name).hex() for name in SEAL_BYTES}
        self._out.write(json.dumps({"file_sha256": file_digest, "seal": values}) + "\n")


def parse_seal(seal: pb.Seal) -> Seal:
    """A seal from the wire."""
    return Seal(**{name: getattr(seal, name) for name in (*SEAL_FIELDS, *SEAL_BYTES)})


def seal_from(values: Mapping[str, Any]) -> Seal:
    """A seal as `SealWriter` wrote it. Raises ValueError, LookupError or TypeError for anything else."""
    fields: dict[str, Any] = {name: values[name] for name in SEAL_FIELDS}
    fields |= {name: bytes.fromhex(values[name]) for name in SEAL_BYTES}
    return Seal(**fields)


def seal_path(path: Path) -> Path:
    """Where the digests of an export lie."""
    return path.with_name(path.name + ".seal")


@contextlib.contextmanager
def whole_file(path: Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """A file that appears at `path` once it is complete, or not at all. Exits with one sentence when it cannot."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") if binary else partial.open("w", encoding="utf-8", newline="") as out:
            yield out
        partial.replace(path)
    except OSError as error:
        raise fail(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def parquet_schema() -> pa.Schema:
    """The columns with their types."""
    import pyarrow as pa

    def kind(name: str) -> pa.DataType:
        return pa.int64() if name in NUMBERS else pa.timestamp("ns", "UTC") if name in TIMES else pa.string()

    return pa.schema([(name, kind(name)) for name in COLUMNS])


def to_parquet(name: str, value: Any) -> Any:
    """A record's value as Parquet holds it; times are integers of nanoseconds."""
    from google.protobuf.timestamp_pb2 import Timestamp

    if name in TIMES:
        if not value:
            return None
        stamp = Timestamp()
        stamp.FromJsonString(value)
        return stamp.ToNanoseconds()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def from_parquet(name: str, value: Any) -> Any:
    """The inverse of `to_parquet`. Raises ValueError, TypeError or OverflowError for what it cannot have made."""
    from google.protobuf.timestamp_pb2 import Timestamp

    if name in TIMES:
        if value is None:
            return ""
        stamp = Timestamp()
        stamp.FromNanoseconds(value)
        return stamp.ToJsonString()
    return json.loads(value) if name == "metadata" else value
