"""One batch under way: its input is counted, its lines are run, its results become files. Safe to begin again anywhere.

Each step is a compare-and-set of the status or idempotent; a crash between two of them costs the work of that step.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path

import msgspec

from services.common.clock import Clock
from services.common.errors import DeadlineExceeded, InvalidRequest, MillraceError, Retry, StoreUnavailable
from services.gateway.batch_lines import Failure, Keep, LineDoor, custom_id_of, parse_line, result_of
from services.gateway.batch_store import BatchStore, FileStore, OwnedBatch
from services.gateway.batch_types import Batch, BatchError, BatchErrors, BatchLine, LineResponse, RequestCounts
from services.gateway.generation import KeyRing
from services.gateway.http_errors import error_body

# Lines of one batch that are under way at once.
BATCH_LINES = 16
# Tries of a line whose worker is lost. Waiting for room has no end but the batch's.
LOST_TRIES = 3
BACKOFF_S = 10.0
_READ_LINES = 64
_ANSWERED, _FAILED = 0, 1


class LineRunner:
    """Runs lines under the key that made the batch; `slots` bounds those of all batches together."""

    def __init__(self, door: LineDoor, keys: KeyRing, clock: Clock, slots: asyncio.Semaphore) -> None:
        self.limits = door.limits
        self.clock = clock
        self._door = door
        self._keys = keys
        self._slots = slots

    async def run(self, batches: BatchStore, owned: OwnedBatch, number: int, line: BatchLine) -> None:
        """Run one line until it has a recorded result. Raises StoreUnavailable."""
        batch_id = owned.batch.id

        async def keep(response: LineResponse) -> bool:
            result = result_of(batch_id, number, line.custom_id, response=response, error=None)
            return await batches.record(batch_id, number, result, failed=_ANSWERED)

        tries = 0
        while (failure := await self._try(owned, line, keep)) is not None:
            tries += 1
            waits = failure.retry in (Retry.AFTER_DELAY, Retry.AUTOMATIC)
            if not waits and not (failure.retry is Retry.ONE_UP and tries < LOST_TRIES):
                result = result_of(batch_id, number, line.custom_id, response=failure.response, error=None)
                await batches.record(batch_id, number, result, failed=_FAILED)
                return
            most = min(BACKOFF_S, 0.25 * 2 ** min(tries, 10))
            await self.clock.sleep(random.uniform(0.0, most))  # noqa: S311

    async def _try(self, owned: OwnedBatch, line: BatchLine, keep: Keep) -> Failure | None:
        async with self._slots:
            try:
                key = await self._keys.of_digest(owned.key_digest)
            except MillraceError as error:
                body = msgspec.Raw(error_body(error))
                return Failure(LineResponse(error.row.http_status, "", body), error.row.retry)
            return await self._door.answer(key, line, keep)


class BatchRun:
    """One batch, held by the lease of this process."""

    def __init__(self, owned: OwnedBatch, batches: BatchStore, files: FileStore, runner: LineRunner) -> None:
        self._owned = owned
        self._tenant = owned.tenant
        self._id = owned.batch.id
        self._batches = batches
        self._files = files
        self._runner = runner
        self._input = files.path(owned.batch.input_file_id)

    async def is_over(self) -> bool:
        """Whether the rest of the lines is not to be run."""
        batch = await self._batch()
        return batch.status != "in_progress" or self._runner.clock.wall() >= batch.expires_at

    async def open(self) -> None:
        """From `validating` on: the input is counted, or the batch fails."""
        batch = await self._batch()
        if batch.status != "validating":
            return
        now = int(self._runner.clock.wall())
        try:
            total = await asyncio.to_thread(_count, self._input)
        except OSError:
            errors = BatchErrors([BatchError("INPUT_FILE_GONE", "The input file cannot be read.", "input_file_id")])
            new = msgspec.structs.replace(batch, status="failed", failed_at=now, errors=errors)
        else:
            counts = RequestCounts(total=total)
            new = msgspec.structs.replace(batch, status="in_progress", in_progress_at=now, request_counts=counts)
        await self._batches.change(self._tenant, batch, new)

    async def lines(self) -> None:
        """Run every line that has no result yet. Raises StoreUnavailable; what was recorded stays."""
        if await self.is_over():
            return
        try:
            async with asyncio.TaskGroup() as group:
                room = asyncio.Semaphore(BATCH_LINES)
                async for number, raw, line in self._todo():
                    await room.acquire()
                    task = group.create_task(self._line(number, raw, line))
                    task.add_done_callback(lambda _: room.release())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def close(self) -> None:
        """Make files of the results and end the batch."""
        batch = await self._batch()
        now = int(self._runner.clock.wall())
        if batch.status == "in_progress":
            answered, failed = await self._batches.counts(self._id)
            expired = now if answered + failed < batch.request_counts.total else None
            new = msgspec.structs.replace(batch, status="finalizing", finalizing_at=now, expired_at=expired)
            if not await self._batches.change(self._tenant, batch, new):
                return await self.close()
            batch = new
        if batch.status not in ("finalizing", "cancelling"):
            return None
        if batch.expired_at is not None:
            await self._record_expired()
        done = await self._with_files(batch)
        if batch.status == "cancelling":
            done = msgspec.structs.replace(done, status="cancelled", cancelled_at=now)
        elif batch.expired_at is not None:
            done = msgspec.structs.replace(done, status="expired")
        else:
            done = msgspec.structs.replace(done, status="completed", completed_at=now)
        if await self._batches.change(self._tenant, batch, done):
            await self._batches.forget_lines(self._id)
        return None

    async def _batch(self) -> Batch:
        batch = await self._batches.get(self._tenant, self._id)
        assert batch is not None, "unfinished batches are never dropped"
        return batch

    async def _with_files(self, batch: Batch) -> Batch:
        answered, failed = await self._batches.counts(self._id)
        counts = RequestCounts(batch.request_counts.total, answered, failed)
        number = self._id.removeprefix("batch_")
        made: dict[int, str | None] = {}
        for kind, name in ((_ANSWERED, f"file-{number}-output"), (_FAILED, f"file-{number}-error")):
            pages = self._batches.results(self._id, failed=kind)
            made[kind] = name if await self._files.add_output(self._tenant, name, pages) else None
        return msgspec.structs.replace(
            batch, request_counts=counts, output_file_id=made[_ANSWERED], error_file_id=made[_FAILED]
        )

    async def _line(self, number: int, raw: bytes, line: BatchLine | InvalidRequest) -> None:
        if isinstance(line, BatchLine):
            await self._runner.run(self._batches, self._owned, number, line)
            return
        await self._record_error(number, custom_id_of(raw), line)

    async def _record_error(self, number: int, custom_id: str | None, error: MillraceError) -> None:
        result = result_of(self._id, number, custom_id, response=None, error=error)
        await self._batches.record(self._id, number, result, failed=_FAILED)

    async def _record_expired(self) -> None:
        error = DeadlineExceeded("The completion window was over before this line was run.")
        async for number, raw, _ in self._todo():
            await self._record_error(number, custom_id_of(raw), error)

    async def _todo(self) -> AsyncIterator[tuple[int, bytes, BatchLine | InvalidRequest]]:
        """Lines without a result, in order. A name that came before is an error of the later line."""
        done = await self._batches.recorded(self._id)
        names: set[str] = set()
        async for number, raw in _numbered(self._input):
            line: BatchLine | InvalidRequest
            try:
                line = parse_line(raw, self._owned.batch.endpoint, self._runner.limits)
                if line.custom_id in names:
                    raise InvalidRequest("`custom_id` is that of an earlier line.", param="custom_id")
                names.add(line.custom_id)
            except InvalidRequest as error:
                line = error
            if number not in done:
                yield number, raw, line


def _count(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


async def _numbered(path: Path) -> AsyncIterator[tuple[int, bytes]]:
    """Lines that are not blank, with their number in the file, from 1. Raises StoreUnavailable."""
    try:
        with await asyncio.to_thread(path.open, "rb") as file:
            numbered = enumerate(file, start=1)
            while block := await asyncio.to_thread(lambda: list(islice(numbered, _READ_LINES))):
                for number, line in block:
                    if line.strip():
                        yield number, line
    except OSError as error:
        raise StoreUnavailable("The input file cannot be read.", retry_after_s=1.0) from error
