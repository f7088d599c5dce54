"""Requests from the gateway's core through worker stream and engine, in one thread, with workers that die.

A lost request goes on in an engine that has just started, so that it has nothing but prompt and received tokens. The
core is the gateway's, the stream and the wire are the worker's; between them stand real events. Many requests share an
engine, each to lose it at another token: the suite stays quick.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from millrace.common.v1 import admission_pb2, common_pb2

from services.gateway.generation import RequestLimits, TokenEvent
from services.gateway.metering import Counts, billed_usage
from services.gateway.request_actions import Readmit
from services.gateway.requests import RequestCore
from services.worker import wire
from services.worker.engine.engine import Engine
from services.worker.engine.outputs import EngineOutput
from services.worker.engine.request import EngineRequest
from services.worker.streams import RequestFacts, RequestStream

FRAME = 1_000_000


@dataclasses.dataclass
class Served:
    """What the front got, what was billed, and how many attempts it took. `error` is None for a whole answer."""

    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    finishes: dict[int, int] = dataclasses.field(default_factory=dict)
    error: str | None = None
    attempts: int = 1
    billed: common_pb2.TokenUsage = dataclasses.field(default_factory=common_pb2.TokenUsage)


class LosingRequest:
    """One request that loses its worker after each count of `losses`, counted over all choices received.

    `front` sees each event as it is handed out and says whether to stop that choice.
    """

    def __init__(
        self,
        entry: admission_pb2.AdmissionEntry,
        losses: Sequence[int] = (),
        *,
        resumes: bool = True,
        front: Callable[[TokenEvent], bool] = lambda event: False,
    ) -> None:
        self.entry = entry
        self._losses = list(losses)
        self._front = front
        sampling = entry.sampling
        limits = RequestLimits(sampling.choice_count, sampling.max_token_count, deadline=1e9, resumes=resumes)
        self._core = RequestCore(limits, now=0.0)
        self._stream: RequestStream
        self._served = Served()
        # The next attempt to start, None while one runs or when all is over.
        self.readmit: Readmit | None = Readmit(1)
        self.running = False

    def start(self, vocab_size: int) -> EngineRequest:
        """Begin the next attempt: what the engine is given."""
        assert self.readmit is not None
        readmit, self.readmit, self.running = self.readmit, None, True
        entry = admission_pb2.AdmissionEntry()
        entry.CopyFrom(self.entry)
        entry.attempt = readmit.attempt
        for choice, token_ids in readmit.prefix:
            entry.prefix.add(choice=choice, token_ids=token_ids)
        epoch = readmit.attempt << 8 | 1
        request = wire.engine_request(entry, epoch=epoch, vocab_size=vocab_size, deadline=None)
        starts = {choice.index: len(choice.output_token_ids) for choice in request.choices}
        facts = RequestFacts(entry.request_id, readmit.attempt, epoch, "g", entry, len(entry.token_ids), 0, "")
        self._stream = RequestStream(facts, starts, now_wall=0.0)
        self._exchange()
        return request

    def take(self, output: EngineOutput) -> None:
        """What the engine did for it in a step; one that it has left is not heard."""
        if self.running and output.key.epoch == self._stream.facts.epoch:
            self._stream.apply(output, now_wall=0.0)
            self._exchange()

    def result(self) -> Served:
        """Once it has ended."""
        core, served = self._core, self._served
        assert core.done or core.error is not None
        served.error = core.error.row.reason if core.error is not None else None
        served.attempts = core.attempt
        state = common_pb2.TERMINAL_STATE_FAILED if served.error else common_pb2.TERMINAL_STATE_COMPLETED
        delivered, received = (tuple(getattr(c, n) for c in core.choices) for n in ("delivered", "received"))
        counts = Counts(len(self.entry.token_ids), 0, delivered, received, core.started)
        served.billed = billed_usage(state, counts)
        return served

    def _exchange(self) -> None:
        """Events to the core, acks back, on to the front; then the worker may be lost."""
        core, instance = self._core, f"worker-{self._stream.facts.attempt}"
        for event in self._stream.take_events(FRAME)[0]:
            core.on_event(instance, event, 0.0)
        ack = core.ack("r")
        if ack is not None:
            self._stream.ack(ack)
            core.on_acked(ack.epoch, ack.delivered_counts)
        while (handed := core.pull()) is not None:
            tokens = self._served.tokens.setdefault(handed.choice, [])
            assert handed.first_index == len(tokens), "a gap or a duplicate"
            tokens += handed.token_ids
            core.mark_delivered(handed.choice, len(tokens))
            if handed.finish_reason is not None:
                self._served.finishes[handed.choice] = handed.finish_reason
            if self._front(handed):
                core.stop_choice(handed.choice, len(tokens))
        if self._losses and core.received_count >= self._losses[0]:
            del self._losses[0]
            actions = core.on_worker_lost(instance, 0.0)
            self.readmit = next((action for action in actions if isinstance(action, Readmit)), None)
            self.running = False
        self.running = self.running and not core.done and core.error is None


def run_all(
    requests: Sequence[LosingRequest],
    make_engine: Callable[[], Engine],
    *,
    vocab_size: int,
    ready: Callable[[EngineRequest], EngineRequest] = lambda request: request,
) -> list[Served]:
    """To the end of each, in as many engines one after the other as it takes; each is left empty.

    `ready` is applied to what an engine is given (it compiles a grammar).
    """
    while starting := [request for request in requests if request.readmit is not None]:
        engine, now = make_engine(), 0.0
        for request in starting:
            engine.add_request(ready(request.start(vocab_size)), now=now)
        by_id = {request.entry.request_id: request for request in starting}
        while engine.has_work():
            now += 0.01
            for request_id, request in by_id.items():
                if not request.running:
                    engine.abort(request_id)
            for output in engine.step(now):
                by_id[output.key.request_id].take(output)
        engine.check_invariants()
        assert engine.stats(now).held_block_count == 0
    return [request.result() for request in requests]
