"""A worker of the echo model in this process, a store that only remembers, and a client that plays the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
from google.protobuf import duration_pb2
from millrace.common.v1 import admission_pb2, common_pb2
from millrace.worker.v1 import worker_service_pb2 as pb
from millrace.worker.v1 import worker_service_pb2_grpc

from services.common.admission_store import AdmissionStore
from services.common.admission_types import FinishResult, Pool, Terminal, WorkerRecord
from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.common.grpc_client import open_channel
from services.worker.config import EngineSettings, WorkerConfig
from services.worker.engine.fake_model_runner import FakeModelRunner, FakeScript, echo_token
from services.worker.engine.outputs import SchedulerOutput
from services.worker.model_source import ECHO_VOCABULARY, LoadedModel, load_model
from services.worker.wiring import WorkerApp, build
from tests.helpers.waiting import WAIT_S, until


class RememberingStore:
    """The worker's part of the admission store, without Redis."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.terminals: list[tuple[Pool, Terminal]] = []
        self.away = False

    async def register_worker(self, record: WorkerRecord) -> None:
        self._check()
        self.workers[record.instance] = record

    async def deregister_worker(self, record: WorkerRecord) -> None:
        self._check()
        self.workers.pop(record.instance, None)

    async def finish(self, pool: Pool, terminals: Sequence[Terminal]) -> list[FinishResult]:
        self._check()
        self.terminals += [(pool, terminal) for terminal in terminals]
        return [FinishResult(True, t.state, t.tenant, t.computed_tokens, 0) for t in terminals]

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable("Redis is away.")


def entry(
    request_id: str,
    *,
    gateway: str = "gateway-1",
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 8,
    choices: int = 1,
    **sampling: object,
) -> admission_pb2.AdmissionEntry:
    """A valid queue entry for the echo model."""
    params = common_pb2.SamplingParams(
        temperature=1.0,
        top_p=1.0,
        seed=7,
        choice_count=choices,
        max_token_count=max_tokens,
        repetition_penalty=1.0,
    )
    params.MergeFrom(common_pb2.SamplingParams(**sampling))  # type: ignore[arg-type]
    return admission_pb2.AdmissionEntry(
        request_id=request_id,
        tenant="tenant-1",
        key_id="key-1",
        model=common_pb2.ModelRef(model="echo", version="1"),
        pool=common_pb2.PoolRef(model="echo", pool="default"),
        priority_class=common_pb2.PRIORITY_CLASS_INTERACTIVE,
        length_class=common_pb2.LENGTH_CLASS_SHORT,
        token_ids=prompt,
        sampling=params,
        gateway_instance=gateway,
        cache_salt=b"salt",
        weight=1.0,
        attempt=1,
    )


def submit_request(
    work: admission_pb2.AdmissionEntry, *, epoch: int = 256, remaining_s: float = 60.0
) -> pb.SubmitRequest:
    """What a router sends."""
    remaining = duration_pb2.Duration()
    remaining.FromNanoseconds(int(remaining_s * 1e9))
    return pb.SubmitRequest(entry=work, attempt=1, epoch=epoch, remaining=remaining, router_instance="router-1")


def echo_tokens(request_id: str, choice: int, count: int, start: int = 0) -> list[int]:
    """The answer of the echo model."""
    return [echo_token(request_id, choice, i, vocab_size=ECHO_VOCABULARY) for i in range(start, start + count)]


@dataclasses.dataclass
class Received:
    """What the gateway has of one request. `problems` are breaks of the protocol."""

    accepted: int = 0
    started: pb.Started | None = None
    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    logprobs: dict[int, list[common_pb2.PositionLogprobs]] = dataclasses.field(default_factory=dict)
    finishes: dict[int, pb.Finish] = dataclasses.field(default_factory=dict)
    failed: pb.Failed | None = None
    prompt_logprobs: pb.PromptLogprobs | None = None
    epoch: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)

    def take(self, event: pb.Event) -> None:
        kind = event.WhichOneof("event")
        if event.epoch > self.epoch:
            self.epoch = event.epoch
        if kind == "accepted":
            self.accepted += 1
        elif not self.accepted:
            self.problems.append(f"{kind} before accepted")
        if kind == "started":
            self.started = event.started
        elif kind == "failed":
            self.failed = event.failed
        elif kind == "prompt_logprobs":
            self.prompt_logprobs = event.prompt_logprobs
        elif kind == "delta":
            self._take_delta(event.delta)

    def _take_delta(self, delta: pb.Delta) -> None:
        held = self.tokens.setdefault(delta.choice, [])
        skip = len(held) - delta.first_index
        if skip < 0:
            self.problems.append(f"choice {delta.choice}: gap before {delta.first_index}")
        held += list(delta.token_ids)[skip:]
        self.logprobs.setdefault(delta.choice, []).extend(list(delta.logprobs)[skip:])
        if delta.HasField("finish"):
            self.finishes[delta.choice] = delta.finish

    def next_indices(self) -> list[int]:
        size = max(self.tokens, default=-1) + 1
        return [len(self.tokens.get(i, [])) for i in range(size)]


class Gate:
    """Holds the engine's thread before a step until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.held = threading.Event()
        self.steps = 0

    def __call__(self, _: SchedulerOutput) -> None:
        self.steps += 1
        if not self.open.is_set():
            self.held.set()
            self.open.wait(WAIT_S)


class GatewayClient:
    """Plays one gateway incarnation over a real channel; acknowledges each frame unless told not to."""

    def __init__(self, address: str, instance: str = "gateway-1") -> None:
        self.instance = instance
        self.received: dict[str, Received] = {}
        self.frames: list[pb.AttachResponse] = []
        self.acking = True
        self._channel = open_channel(address)
        self.stub = worker_service_pb2_grpc.WorkerServiceStub(self._channel)
        self._outgoing: asyncio.Queue[pb.AttachRequest | None] = asyncio.Queue()
        self._call: grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.choice_counts: dict[str, int] = {}
        self.ended: grpc.StatusCode | None = None

    def of(self, request_id: str) -> Received:
        return self.received.setdefault(request_id, Received())

    async def attach(self, *, continued: Sequence[str] = ()) -> GatewayClient:
        self._outgoing = asyncio.Queue()
        hello = pb.Hello(gateway_instance=self.instance)
        for request_id in continued:
            held = self.of(request_id)
            hello.continued.add(request_id=request_id, epoch=held.epoch, next_indices=held.next_indices())
        self._outgoing.put_nowait(pb.AttachRequest(hello=hello))
        self._call = self.stub.Attach(self._requests(self._outgoing))
        self.ended = None
        self._reader = asyncio.create_task(self._read(self._call))
        return self

    async def submit(self, work: admission_pb2.AdmissionEntry, **options: float) -> pb.SubmitResponse:
        self.choice_counts[work.request_id] = work.sampling.choice_count
        return await self.stub.Submit(submit_request(work, **options), timeout=WAIT_S)  # type: ignore[arg-type]

    def cancel(self, request_id: str, epoch: int = 256, choice: int | None = None, *, keep: bool = False) -> None:
        message = pb.Cancel(request_id=request_id, epoch=epoch, keep=keep)
        if choice is not None:
            message.choice = choice
        self._outgoing.put_nowait(pb.AttachRequest(cancel=message))

    def ack(self, request_id: str, *, done: bool = False, delivered: Sequence[int] | None = None) -> None:
        """Say what is held, and what of it was delivered: all of it unless given."""
        held = self.of(request_id)
        counts = held.next_indices() if delivered is None else delivered
        item = pb.AckEntry(
            request_id=request_id,
            epoch=held.epoch,
            next_indices=held.next_indices(),
            delivered_counts=counts,
            done=done,
        )
        self._outgoing.put_nowait(pb.AttachRequest(ack=pb.Ack(entries=[item])))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a frame made the condition true."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def finished(self, *request_ids: str) -> None:
        await self.until(lambda: all(self.is_finished(request_id) for request_id in request_ids))

    def is_finished(self, request_id: str) -> bool:
        held = self.of(request_id)
        return held.failed is not None or len(held.finishes) == self.choice_counts.get(request_id, 1)

    async def hang_up(self) -> None:
        """Break the stream as a cut connection does."""
        if self._call is not None:
            self._call.cancel()
        if self._reader is not None:
            await self._reader

    async def close(self) -> None:
        await self.hang_up()
        await self._channel.close()

    async def _requests(self, queue: asyncio.Queue[pb.AttachRequest | None]) -> AsyncIterator[pb.AttachRequest]:
        while (message := await queue.get()) is not None:
            yield message

    async def _read(self, call: grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]) -> None:
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            async for frame in call:
                self.frames.append(frame)
                for event in frame.events:
                    self.of(event.request_id).take(event)
                for request_id in {event.request_id for event in frame.events} if self.acking else ():
                    self.ack(request_id, done=self.is_finished(request_id))
                self._changed.set()
        self.ended = await call.code()
        self._changed.set()


def echo_config(*, step_ms: float = 0.5, **engine: object) -> WorkerConfig:
    """Settings of a small echo worker on a free port."""
    knobs = EngineSettings(**{"max_model_len": 512, "num_blocks": 512, **engine})  # type: ignore[arg-type]
    return WorkerConfig(model="echo", engine=knobs, echo_step_ms=step_ms)


def scripted_echo(config: WorkerConfig, script: FakeScript) -> LoadedModel:
    """The echo model of these settings, with a script instead of its step time."""
    loaded = load_model(config)
    return dataclasses.replace(loaded, runner=FakeModelRunner(loaded.runner.spec, script=script))


@dataclasses.dataclass
class WorkerRig:
    """A started worker."""

    app: WorkerApp
    store: RememberingStore

    async def gateway(self, instance: str = "gateway-1") -> GatewayClient:
        return await GatewayClient(self.app.address, instance).attach()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds."""
        await until(condition)

    def assert_engine_empty(self) -> None:
        """Nothing is held anywhere; only after the app was stopped."""
        assert len(self.app.parts.table) == 0
        self.app.parts.table.check_invariants()
        self.app.parts.engine.check_invariants()


@contextlib.asynccontextmanager
async def running_worker(
    *,
    config: WorkerConfig | None = None,
    script: FakeScript | None = None,
    clock: Clock | None = None,
    store: AdmissionStore | None = None,
    model: LoadedModel | None = None,
) -> AsyncIterator[WorkerRig]:
    """A worker of `model`, or of echo, stopped at the end. `script` replaces the runner's latency and faults."""
    config = config if config is not None else echo_config()
    model = model if model is not None else load_model(config)
    if script is not None:
        model = LoadedModel(FakeModelRunner(model.runner.spec, script=script), model.served, model.budget_text)
    remembering = RememberingStore()
    app = build(config, store=store or remembering, model=model, clock=clock)  # type: ignore[arg-type]
    await app.start()
    try:
        yield WorkerRig(app, remembering)
    finally:
        await app.stop()
