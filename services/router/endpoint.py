"""What the router knows of one worker: its last Watch view, what was submitted since, and whether it may be tried.

Pure: no I/O, time is handed in as seconds of one monotonic clock. A view older than 3 s is unknown, never idle.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from millrace.common.v1 import admission_pb2, common_pb2
from millrace.worker.v1 import worker_service_pb2

from services.common.admission_types import SUSPECT_DEATHS, Pool, WorkerRecord

VIEW_MAX_AGE_S = 3.0
# A Watch message shows an accepted submit within this time of its reply.
VIEW_LAG_S = 0.02
_BACKOFF_S = (0.5, 10.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """What one request asks of a worker."""

    request_id: str
    model: str
    version: str
    gateway_instance: str
    adapter: str
    slot_count: int
    token_count: int
    block_hashes: tuple[int, ...] = ()
    # Two workers died with it: it runs apart from others like it.
    suspect: bool = False
    # Each token of the prompt is wanted (its embedding or logprobs), so that no cached block helps.
    whole_prompt: bool = False
    # Worker that hands it over with what it has computed; empty for none.
    kv_holder: str = ""

    @classmethod
    def of(cls, entry: admission_pb2.AdmissionEntry) -> Needs:
        """Prompt and received prefix are the tokens to hold at the start; each choice takes a slot."""
        model, sampling = entry.model, entry.sampling
        received = max([len(prefix.token_ids) for prefix in entry.prefix]) if entry.prefix else 0
        return cls(
            request_id=entry.request_id,
            model=model.model,
            version=model.version,
            gateway_instance=entry.gateway_instance,
            adapter=entry.adapter,
            slot_count=max(1, sampling.choice_count),
            token_count=len(entry.token_ids) + received + 1,
            block_hashes=tuple(entry.block_hashes),
            suspect=len(entry.lost_workers) >= SUSPECT_DEATHS,
            whole_prompt=sampling.embed or sampling.HasField("prompt_logprob_count"),
            kv_holder=entry.kv_holder,
        )

    def block_count(self, block_size: int) -> int:
        """KV blocks that the tokens take."""
        return math.ceil(self.token_count / max(1, block_size))


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """One Watch message. Rates are a second's, None while unmeasured: prompt tokens computed, block bytes received."""

    model: common_pb2.ModelRef
    role: common_pb2.WorkerRole.ValueType
    free_slot_count: int
    free_block_count: int
    block_size: int
    in_flight_count: int
    backlog_token_count: int
    attached_gateways: frozenset[str]
    adapters: frozenset[str]
    draining: bool
    ready: bool
    running_count: int
    waiting_count: int
    kv_token_byte_count: int
    transfer_rate: int | None
    prefill_rate: int | None
    prompt_digest: bytes
    suspect_count: int = 0
    sequence: int = 0

    @classmethod
    def of(cls, message: worker_service_pb2.WatchResponse) -> View:
        return cls(
            model=message.model,
            role=message.role,
            free_slot_count=message.free_slot_count,
            free_block_count=message.free_block_count,
            block_size=message.block_size,
            in_flight_count=max(message.in_flight_count, message.running_count + message.waiting_count),
            backlog_token_count=message.backlog_token_count,
            attached_gateways=frozenset(message.attached_gateways),
            adapters=frozenset(message.adapters),
            draining=message.draining,
            ready=message.ready,
            prompt_digest=message.prompt_digest,
            suspect_count=message.suspect_count,
            sequence=message.sequence,
            running_count=message.running_count,
            waiting_count=message.waiting_count,
            kv_token_byte_count=message.kv_token_byte_count,
            transfer_rate=message.transfer_rate_byte_count if message.HasField("transfer_rate_byte_count") else None,
            prefill_rate=message.prefill_rate_token_count if message.HasField("prefill_rate_token_count") else None,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Debit:
    """A submit that the view does not show yet."""

    slot_count: int
    block_count: int
    token_count: int
    suspect: bool


class Endpoint:
    """One worker as this router sees it."""

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record
        self.view: View | None = None
        self.seen_at = -math.inf
        # Called after each change but those by time alone.
        self.on_change: Callable[[], object] = lambda: None
        # Request that gets the next room here, after it was held too long.
        self.reserved_for: str | None = None
        self._debits: dict[str, _Debit] = {}
        # Debits that were replied to, in that order: when, and those whose worker said which view is the last that
        # cannot show it.
        self._replied: dict[str, float] = {}
        self._numbered: dict[str, int] = {}
        self._debited_slots = self._debited_blocks = self._debited_tokens = self._debited_suspects = 0
        self._full_since: float | None = None
        self._failures = 0
        self._retry_at = -math.inf

    @property
    def instance(self) -> str:
        return self.record.instance

    @property
    def pool(self) -> Pool:
        return self.record.pool

    @property
    def load(self) -> int:
        """Requests in its hands, those that the view does not show yet included."""
        return (self.view.in_flight_count if self.view is not None else 0) + len(self._debits)

    @property
    def slot_count(self) -> int:
        """Requests that its batch holds at most, as far as the view shows; 0 while there is none."""
        return self.view.free_slot_count + self.view.in_flight_count if self.view is not None else 0

    @property
    def token_load(self) -> int:
        """Tokens that it has still to compute, those of requests that the view does not show yet included."""
        backlog = max(0, self.view.backlog_token_count) if self.view is not None else 0
        return backlog + self.unseen_token_count

    @property
    def unseen_token_count(self) -> int:
        """Tokens to compute of requests that the view does not show yet."""
        return self._debited_tokens

    @property
    def failing(self) -> bool:
        """The last submits failed by its fault."""
        return self._failures > 0

    def observe(self, view: View, now: float) -> None:
        """Take a view; one that was made before the last one came late by another way, and says nothing."""
        if self.view is not None and view.sequence < self.view.sequence:
            return
        self.view = view
        self.seen_at = now
        self._full_since = None
        self._forget_shown(now)
        self.on_change()

    def unseen(self) -> None:
        """Its Watch broke off: what it last said is not the present."""
        self.view = None
        self.on_change()

    def reserve(self, request_id: str | None) -> None:
        """Keep the next room for this request, or for nobody."""
        self.reserved_for = request_id
        self.on_change()

    def fresh(self, now: float) -> bool:
        """The view may be acted on."""
        return self.view is not None and now - self.seen_at <= VIEW_MAX_AGE_S

    def open(self, now: float) -> bool:
        """The breaker lets a submit pass; after the backoff one probe at a time."""
        return self._failures == 0 or (now >= self._retry_at and not self._debits)

    def free(self, now: float) -> tuple[int, int]:
        """Slots and blocks that are free, less what was submitted since the view."""
        if self.view is None or not self.fresh(now) or self._full_since is not None:
            return 0, 0
        if self._replied or self._numbered:
            self._forget_shown(now)
        slots = self.view.free_slot_count - self._debited_slots
        blocks = self.view.free_block_count - self._debited_blocks
        return max(0, slots), max(0, blocks)

    def fits(self, needs: Needs, now: float) -> bool:
        """There is room for this request; an idle worker takes any (its own refusal says what never fits)."""
        if self.reserved_for not in (None, needs.request_id):
            return False
        slots, blocks = self.free(now)
        if self.view is None or slots == 0:
            return False
        if needs.suspect and (self.view.suspect_count or self._debited_suspects):
            return False
        idle = self.view.in_flight_count == 0 and not self._debits
        return idle or (slots >= needs.slot_count and blocks >= needs.block_count(self.view.block_size))

    def settling(self) -> bool:
        """A debit goes by time alone: the view is newer than its reply."""
        return next(iter(self._replied.values()), math.inf) <= self.seen_at

    # --- what submits do to it -----------------------------------------------------------------------------------
    def debit(self, needs: Needs, computed_token_count: int | None = None) -> None:
        """A submit is on its way, of which so many tokens are to be computed here; None means all."""
        block_size = self.view.block_size if self.view is not None else 1
        tokens = needs.token_count if computed_token_count is None else computed_token_count
        blocks = needs.block_count(block_size)
        self._end_debit(needs.request_id)
        debit = self._debits[needs.request_id] = _Debit(needs.slot_count, blocks, tokens, needs.suspect)
        self._add(debit, 1)
        if self.reserved_for == needs.request_id:
            self.reserved_for = None
        self.on_change()

    def accepted(self, request_id: str, now: float, watch_sequence: int | None = None) -> None:
        """The worker took it, after the view of that number: the debit stands until a later view shows it."""
        recovers, self._failures = self._failures > 0, 0
        self._reply(request_id, now, watch_sequence)
        if recovers:
            self.on_change()

    def refused(self, request_id: str, now: float, *, full: bool) -> None:
        """A typed refusal is no guilt; `full` distrusts the view until the next one."""
        self._failures = 0
        self._end_debit(request_id)
        if full:
            self._full_since = now
        self.on_change()

    def failed(self, request_id: str, now: float, *, guilty: bool) -> None:
        """No answer: a guilty worker is ejected with a growing backoff. It may have the request: the debit stands."""
        if guilty:
            self._failures += 1
            shortest, longest = _BACKOFF_S
            self._retry_at = now + min(longest, shortest * 2 ** min(self._failures - 1, 10))
        self._reply(request_id, now)
        self.on_change()

    def named(self, request_id: str, now: float) -> None:
        """The decoding worker was told to ask here for a prompt: the debit stands until a later view shows it."""
        self._reply(request_id, now)

    def unnamed(self, request_id: str) -> None:
        """Nobody will ask here; that says nothing about this worker."""
        self._end_debit(request_id)
        self.on_change()

    def _reply(self, request_id: str, now: float, watch_sequence: int | None = None) -> None:
        self._forget_reply(request_id)
        if request_id in self._debits:
            if watch_sequence is None:
                self._replied[request_id] = now
                self.on_change()
            else:
                self._numbered[request_id] = watch_sequence

    def _forget_shown(self, now: float) -> None:
        last_shown = min(self.seen_at, now - VIEW_LAG_S)
        while self._replied and next(iter(self._replied.values())) <= last_shown:
            self._end_debit(next(iter(self._replied)))
        number = self.view.sequence if self.view is not None else 0
        while self._numbered and next(iter(self._numbered.values())) < number:
            self._end_debit(next(iter(self._numbered)))

    def _end_debit(self, request_id: str) -> None:
        self._forget_reply(request_id)
        debit = self._debits.pop(request_id, None)
        if debit is not None:
            self._add(debit, -1)

    def _forget_reply(self, request_id: str) -> None:
        self._replied.pop(request_id, None)
        self._numbered.pop(request_id, None)

    def _add(self, debit: _Debit, times: int) -> None:
        self._debited_slots += times * debit.slot_count
        self._debited_blocks += times * debit.block_count
        self._debited_tokens += times * debit.token_count
        self._debited_suspects += times * debit.suspect
