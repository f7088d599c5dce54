"""The table of requests in hand: which gateway each belongs to, what is unsent, which epoch is fenced.

Pure: no clock, no I/O; every call gets the time. Never waits and never drops a token that was not acknowledged
before its retention is over. Owned by the hub (attach.py) on the event loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from millrace.worker.v1 import worker_service_pb2

from services.worker import wire
from services.worker.engine.outputs import EngineOutput
from services.worker.streams import Failure, RequestFacts, RequestStream
from services.worker.tenant_caps import TenantCaps

COALESCE_S = 0.020
GATEWAY_GRACE_S = 5.0
# As long as a request may take: so long its gateway may be writing it out, to settle if that dies.
ENDED_RETENTION_S = 3_600.0
FRAME_POSITIONS = 65_536
FENCE_COUNT = 16_384


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """What the engine must stop; `choice` None means all."""

    request_id: str
    epoch: int
    choice: int | None = None


class StaleEpochError(Exception):
    """A newer epoch of the request was seen, or this one was cancelled or has ended."""


class GatewayLink:
    """One gateway incarnation: its requests, and which of them have something unsent."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.streams: dict[str, RequestStream] = {}
        self.attached = False
        self.lost_at: float | None = None
        self._dirty: dict[str, None] = {}
        self._loose: list[worker_service_pb2.Event] = []
        self._urgent = False
        self._last_frame_at = float("-inf")

    def mark(self, stream: RequestStream, *, urgent: bool) -> bool:
        """Something of `stream` is unsent; urgent things wait for no company. True: the next frame is due sooner."""
        sooner = not self._dirty or (urgent and not self._urgent)
        self._dirty[stream.facts.request_id] = None
        self._urgent = self._urgent or urgent
        return sooner

    def add_loose(self, event: worker_service_pb2.Event) -> None:
        """An answer about a request that is not in hand."""
        self._loose.append(event)
        self._urgent = True

    def next_due(self) -> float | None:
        """When the next frame should be built; None when nothing is unsent."""
        if not self._dirty and not self._loose:
            return None
        return float("-inf") if self._urgent else self._last_frame_at + COALESCE_S

    def take_events(self, now: float) -> tuple[list[worker_service_pb2.Event], list[RequestStream]]:
        """Events of the next frame, bounded in size, and the streams they came from."""
        events, self._loose = self._loose, []
        left = FRAME_POSITIONS
        touched = []
        for request_id in list(self._dirty):
            if left <= 0:
                break
            stream = self.streams[request_id]
            taken, used = stream.take_events(left)
            events += taken
            left -= used
            touched.append(stream)
            if not stream.unsent:
                del self._dirty[request_id]
        self._urgent = bool(self._dirty)
        self._last_frame_at = now
        return events, touched

    def forget(self, request_id: str) -> None:
        """Drop a request."""
        self.streams.pop(request_id, None)
        self._dirty.pop(request_id, None)


class RequestTable:
    """All requests in hand, by gateway. One epoch of a request at a time."""

    def __init__(self) -> None:
        self.links: dict[str, GatewayLink] = {}
        self._streams: dict[str, RequestStream] = {}
        # Highest epoch that must not run again, oldest first; bounded.
        self._fences: dict[str, int] = {}
        self._ended_at: dict[str, float] = {}
        # Read by the engine's thread.
        self.caps = TenantCaps()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def slot_count(self) -> int:
        """Choices that still run in the engine."""
        return sum(stream.slot_count for stream in self._streams.values())

    @property
    def pending_block_count(self) -> int:
        """Blocks that prompts not yet started will take."""
        return sum(s.facts.prompt_block_count for s in self._streams.values() if s.marks.start is None and not s.ended)

    @property
    def suspect_count(self) -> int:
        """Requests that still run and that two workers died with."""
        return sum(stream.facts.suspect and not stream.ended for stream in self._streams.values())

    def attached_gateways(self) -> tuple[str, ...]:
        """Gateways with a live stream, sorted."""
        return tuple(sorted(name for name, link in self.links.items() if link.attached))

    def is_attached(self, gateway: str) -> bool:
        link = self.links.get(gateway)
        return link is not None and link.attached

    def get(self, request_id: str) -> RequestStream | None:
        return self._streams.get(request_id)

    def admit(self, stream: RequestStream) -> RequestStream | None:
        """Take a new attempt; returns the older attempt that it supersedes.

        Raises StaleEpochError. The gateway must be attached.
        """
        facts = stream.facts
        older = self._streams.get(facts.request_id)
        if facts.epoch <= self._fences.get(facts.request_id, 0) or (older and older.facts.epoch >= facts.epoch):
            raise StaleEpochError(facts.request_id)
        if older is not None:
            self._remove(older)
        link = self.links[facts.gateway_instance]
        link.streams[facts.request_id] = stream
        self._streams[facts.request_id] = stream
        link.mark(stream, urgent=False)
        return older

    def apply(self, outputs: Iterable[EngineOutput], *, now: float, now_wall: float) -> tuple[set[str], list[Abort]]:
        """Take one step's outputs. Returns gateways whose next frame is due sooner, and what the engine must stop."""
        changed: set[str] = set()
        aborts: list[Abort] = []
        for output in outputs:
            stream = self._streams.get(output.key.request_id)
            if stream is None or stream.facts.epoch != output.key.epoch:
                continue
            try:
                urgent = stream.apply(output, now_wall=now_wall)
            except (ValueError, KeyError):
                stream.fail(Failure("ENGINE_ERROR", "The engine lost its place in this request.", True), now_wall)
                urgent = True
            if stream.failure is not None:
                aborts.append(Abort(stream.facts.request_id, stream.facts.epoch))
            self._note_end(stream, now)
            link = self.links[stream.facts.gateway_instance]
            if link.mark(stream, urgent=urgent):
                changed.add(link.instance)
        return changed, aborts

    def fail(self, request_id: str, epoch: int, failure: Failure, *, now: float, now_wall: float) -> str | None:
        """End one attempt with a failure; returns the gateway to tell, None when it is not in hand."""
        stream = self._streams.get(request_id)
        if stream is None or stream.facts.epoch != epoch:
            return None
        stream.fail(failure, now_wall)
        self._note_end(stream, now)
        self.links[stream.facts.gateway_instance].mark(stream, urgent=True)
        return stream.facts.gateway_instance

    def unfinished(self) -> list[RequestFacts]:
        """Attempts that have not ended."""
        return [stream.facts for stream in self._streams.values() if not stream.ended]

    def begun(self) -> list[str]:
        """Requests that have not ended and that the engine has begun to compute."""
        return [name for name, stream in self._streams.items() if stream.started and not stream.ended]

    def attach(self, hello: worker_service_pb2.Hello) -> GatewayLink:
        """Open or re-open a gateway's link: what it holds is skipped, what it never saw is sent again."""
        link = self.links.setdefault(hello.gateway_instance, GatewayLink(hello.gateway_instance))
        link.attached = True
        link.lost_at = None
        continued = {item.request_id: item for item in hello.continued}
        for item in continued.values():
            self._continue(link, item)
        for request_id, stream in link.streams.items():
            if request_id not in continued:
                stream.restart_sending()
                link.mark(stream, urgent=True)
        return link

    def detach(self, gateway: str, now: float) -> None:
        """The gateway's stream broke: keep what is unacknowledged until the grace is over."""
        link = self.links.get(gateway)
        if link is not None and link.attached:
            link.attached = False
            link.lost_at = now

    def ack(self, gateway: str, entries: Iterable[worker_service_pb2.AckEntry]) -> None:
        """Take confirmations; forgets requests that are done."""
        streams = self.links[gateway].streams
        for entry in entries:
            stream = streams.get(entry.request_id)
            if stream is None or stream.facts.epoch != entry.epoch:
                continue
            stream.ack(entry)
            if entry.done and stream.ended:
                self._remove(stream)
            elif entry.done:
                stream.abandoned = True

    def cancel(self, gateway: str, cancel: worker_service_pb2.Cancel) -> Abort | None:
        """Stop a request (or one choice) of that epoch or an older one; returns what the engine must stop."""
        request_id, epoch = cancel.request_id, cancel.epoch
        choice = cancel.choice if cancel.HasField("choice") else None
        stream = self._streams.get(request_id)
        if stream is not None and stream.facts.gateway_instance != gateway:
            return None
        if choice is None:
            self._fence(request_id, epoch)
        if stream is None or stream.facts.epoch > epoch:
            return None
        if choice is None and not cancel.keep:
            if stream.ended or stream.abandoned:
                self._remove(stream)
            stream.abandoned = True
        return None if stream.ended else Abort(request_id, stream.facts.epoch, choice)

    def settle_sent(self, touched: Iterable[RequestStream]) -> None:
        """A frame was written: requests that nobody wants, and whose end went out with it, are forgotten."""
        for stream in touched:
            if stream.abandoned and stream.ended and not stream.unsent:
                self._remove(stream)

    def expire(self, now: float) -> list[RequestStream]:
        """Forget what outlived its retention. Returns the requests of gateways that stayed away too long."""
        lost: list[RequestStream] = []
        for link in list(self.links.values()):
            if link.lost_at is not None and now - link.lost_at >= GATEWAY_GRACE_S:
                lost += link.streams.values()
                del self.links[link.instance]
        for stream in lost:
            self._remove(stream)
        while self._ended_at:
            request_id, ended_at = next(iter(self._ended_at.items()))
            if now - ended_at < ENDED_RETENTION_S:
                break
            self._remove(self._streams[request_id])
        return lost

    def check_invariants(self) -> None:
        """Raise AssertionError when the two views of the table differ or indices are out of order."""
        by_link = {name: s for link in self.links.values() for name, s in link.streams.items()}
        assert by_link == self._streams, "a request is in one view of the table only"
        for stream in self._streams.values():
            running = sum(choice.finish is None for choice in stream.choices.values())
            assert stream.slot_count == (0 if stream.failure else running), f"slots of {stream.facts.request_id}"
            for choice in stream.choices.values():
                assert choice.start <= choice.base <= choice.sent <= choice.end, f"indices of {stream.facts.request_id}"
        for request_id in self._ended_at:
            assert self._streams[request_id].ended, f"{request_id} is noted as ended"

    def _continue(self, link: GatewayLink, item: worker_service_pb2.Continue) -> None:
        stream = link.streams.get(item.request_id)
        if stream is not None and stream.facts.epoch > item.epoch:
            stream.restart_sending()
            link.mark(stream, urgent=True)
        elif stream is None or stream.facts.epoch < item.epoch or not stream.continue_from(list(item.next_indices)):
            link.add_loose(
                wire.failed_event(
                    item.request_id,
                    attempt=stream.facts.attempt if stream is not None else 0,
                    epoch=item.epoch,
                    reason="WORKER_LOST",
                    detail="The worker no longer holds this request.",
                    retryable=True,
                )
            )
        else:
            link.mark(stream, urgent=True)

    def _note_end(self, stream: RequestStream, now: float) -> None:
        if stream.ended:
            self._ended_at.setdefault(stream.facts.request_id, now)

    def _fence(self, request_id: str, epoch: int) -> None:
        highest = max(epoch, self._fences.pop(request_id, 0))
        self._fences[request_id] = highest
        if len(self._fences) > FENCE_COUNT:
            del self._fences[next(iter(self._fences))]

    def _remove(self, stream: RequestStream) -> None:
        request_id = stream.facts.request_id
        self._streams.pop(request_id, None)
        self._ended_at.pop(request_id, None)
        link = self.links.get(stream.facts.gateway_instance)
        if link is not None:
            link.forget(request_id)
        self._fence(request_id, stream.facts.epoch)
