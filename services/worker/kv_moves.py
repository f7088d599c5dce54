"""What the engine's thread does for peers between steps: takes in blocks that came, hands out those that are computed.

Owns the cursors of the exports. A block is copied out only when there is room for it at the receiver, so copies in hand
are bounded; until then the pool holds it. Called by the engine loop on the engine's thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from services.worker.engine.kv_blocks import KVBlock
from services.worker.engine.kv_transfer import ImportOutcome, RemotePrefill

# Name of a request's blocks: request id and epoch.
Name = tuple[str, int]


class PeeredEngine(Protocol):
    """The part of `engine.Engine` that deals with peers."""

    def take_remote_prefills(self) -> list[RemotePrefill]: ...
    def kv_received(self, request_id: str, epoch: int, blocks: Sequence[KVBlock]) -> ImportOutcome: ...
    def kv_failed(self, request_id: str, epoch: int) -> bool: ...
    def exported_kv(self, request_id: str, epoch: int, *, start: int, limit: int | None = None) -> list[KVBlock]: ...
    def release_kv(self, request_id: str, epoch: int) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True)
class ImportBlocks:
    """A peer's next blocks; answered by their `ImportOutcome`."""

    name: Name
    blocks: tuple[KVBlock, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ImportFailed:
    """No more blocks will come."""

    name: Name


@dataclasses.dataclass(frozen=True, slots=True)
class ExportRoom:
    """So many more blocks may be handed out; the first call says with which block to begin."""

    name: Name
    block_count: int
    first: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ExportEnd:
    """Nothing more is handed out, nothing is held any more."""

    name: Name


KVCommand = ImportBlocks | ImportFailed | ExportRoom | ExportEnd


@dataclasses.dataclass(slots=True)
class KVReport:
    """What happened since the last report."""

    asked: list[RemotePrefill] = dataclasses.field(default_factory=list)
    imported: list[tuple[Name, ImportOutcome]] = dataclasses.field(default_factory=list)
    exported: list[tuple[Name, list[KVBlock]]] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.asked or self.imported or self.exported)

    def extend(self, other: KVReport) -> None:
        """Append what happened later."""
        self.asked += other.asked
        self.imported += other.imported
        self.exported += other.exported


@dataclasses.dataclass(slots=True)
class _Export:
    cursor: int
    room: int = 0


class KVMoves:
    """Obeys commands between steps; `collect` after each step."""

    def __init__(self, engine: PeeredEngine) -> None:
        self._engine = engine
        self._exports: dict[Name, _Export] = {}
        self._report = KVReport()

    def obey(self, command: KVCommand) -> None:
        """Carry out one command."""
        request_id, epoch = name = command.name
        match command:
            case ImportBlocks(blocks=blocks):
                self._report.imported.append((name, self._engine.kv_received(request_id, epoch, blocks)))
            case ImportFailed():
                self._engine.kv_failed(request_id, epoch)
            case ExportRoom(block_count=count, first=first):
                self._exports.setdefault(name, _Export(first)).room += count
            case ExportEnd():
                self._exports.pop(name, None)
                self._engine.release_kv(request_id, epoch)

    def collect(self) -> KVReport:
        """What was asked, done and computed since the last call."""
        for (request_id, epoch), export in self._exports.items():
            if export.room:
                blocks = self._engine.exported_kv(request_id, epoch, start=export.cursor, limit=export.room)
                export.cursor += len(blocks)
                export.room -= len(blocks)
                if blocks:
                    self._report.exported.append(((request_id, epoch), blocks))
        self._report.asked += self._engine.take_remote_prefills()
        report, self._report = self._report, KVReport()
        return report
