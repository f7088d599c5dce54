"""The back of a gateway as a script: generations whose tokens a test writes down, keys and models by name.

For tests of the front alone: no Redis, no worker. Also a raw ASGI client whose every message a test can hold.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2
from starlette.types import ASGIApp, Message

from services.common.admission_store import AdmissionStore
from services.common.admission_types import KeyRecord, Pool, QuotaLimits
from services.common.errors import ModelNotFound, NotFound, NoWorker, PermissionDenied, Unauthenticated
from services.common.grpc_client import open_channel
from services.common.metrics import Metrics
from services.common.redis_client import connect
from services.gateway import template_child
from services.gateway.app import create_app
from services.gateway.auth import INFERENCE
from services.gateway.batch_store import BatchStore, FileStore, batch_database
from services.gateway.chat_template import ChatTemplate
from services.gateway.front_parts import FrontParts
from services.gateway.generation import ANYBODY, Generation, RouteAsk, ServedModel, TokenEvent, ValidRequest, WorkClass
from services.gateway.grammar_checker import GrammarChecker
from services.gateway.idempotency_store import IdempotencyStore
from services.gateway.limits import Limits
from services.gateway.peers import Peers
from services.gateway.reasoning import reasoning_markers
from services.gateway.response_store import ResponseStore
from services.gateway.resumable import ResumableAnswers
from services.gateway.template_renderer import TemplateRenderer
from services.gateway.usage_reader import UsageReader
from services.gateway.validation import Validator
from tests.helpers.fake_clock import FakeClock

REQUEST_ID = "01JAAAAAAAAAAAAAAAAAAAAAAA"
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_SPECIALS = ("<|im_start|>", "<|im_end|>")

# A step is an event, an error to raise, or an asyncio.Event to wait for.
Step = TokenEvent | Exception | asyncio.Event
Ending = tuple[int, int, str]


class TableTokenizer:
    """Ids 0 to 255 are bytes, then come `words`, then control tokens."""

    def __init__(self, words: Sequence[str] = (), specials: Sequence[str] = _SPECIALS) -> None:
        self._table = [bytes([b]) for b in range(256)] + [w.encode() for w in words] + [s.encode() for s in specials]
        self._first_special = 256 + len(words)
        self.special_texts = tuple(sorted(specials, key=len, reverse=True))
        self.vocab_size = len(self._table)

    def id_of(self, text: str) -> int:
        return self._table.index(text.encode())

    def encode(self, text: str) -> array[int]:
        return array("I", list(text.encode()))

    def encode_rendered(self, rendered: str, guard: str) -> array[int]:
        ids = array("I")
        while rendered:
            found = next((s for s in self.special_texts if rendered.startswith(s)), None)
            if found is not None:
                ids.append(self.id_of(found))
            elif rendered[0] != guard:
                ids.extend(rendered[0].encode())
            rendered = rendered[len(found) if found else 1 :]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id] if 0 <= token_id < self.vocab_size else b""

    def visible_bytes(self, token_id: int) -> bytes:
        return self.token_bytes(token_id) if token_id < self._first_special else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self.visible_bytes, token_ids)).decode("utf-8", "replace")


def served(
    name: str = "tiny",
    version: str = "v1",
    *,
    words: Sequence[str] = (),
    specials: Sequence[str] = (),
    template: str | None = CHATML,
    context: int = 4_096,
    **card: Any,
) -> ServedModel:
    """A model with a table tokenizer."""
    tokenizer = TableTokenizer(words, (*_SPECIALS, *specials))
    fields: dict[str, Any] = {
        "model": common_pb2.ModelRef(model=name, version=version, manifest_digest=bytes(32)),
        "max_model_len": context,
        "vocab_size": tokenizer.vocab_size,
        "block_size": 16,
        "block_count": context // 16 + 1,
        "longest_token_byte_count": 16,
        "owner": "acme",
    }
    shown = None if template is None else ChatTemplate(template)
    model_card = worker_service_pb2.ModelCard(**(fields | card))
    return ServedModel(Pool(name), model_card, tokenizer, shown, reasoning_markers(shown, tokenizer))


def key(tenant: str = "acme", *models: str) -> KeyRecord:
    return KeyRecord(f"key-{tenant}", tenant, "", models, 1.0, QuotaLimits())


def tokens(
    ids: Sequence[int],
    *,
    choice: int = 0,
    first: int = 0,
    finish: common_pb2.FinishReason.ValueType | None = None,
    **more: Any,
) -> TokenEvent:
    """One event of a choice."""
    return TokenEvent(choice, first, tuple(ids), finish_reason=finish, **more)


def one_by_one(
    ids: Sequence[int], *, choice: int = 0, finish: common_pb2.FinishReason.ValueType = LENGTH
) -> list[TokenEvent]:
    """An event a token; the last one finishes the choice."""
    last = len(ids) - 1
    return [tokens([i], choice=choice, first=at, finish=finish if at == last else None) for at, i in enumerate(ids)]


def logprobs_of(ids: Sequence[int], *, top: int = 0) -> tuple[common_pb2.PositionLogprobs, ...]:
    """A value for each id that tells the id: -id/10."""
    return tuple(
        common_pb2.PositionLogprobs(
            token=common_pb2.Logprob(token_id=i, logprob=-i / 10),
            top=[common_pb2.Logprob(token_id=max(0, i - k), logprob=-i / 10 - k) for k in range(top)],
        )
        for i in ids
    )


class ScriptedGeneration:
    """Plays its steps; a choice that was stopped says no more. Remembers all that the front did."""

    def __init__(self, steps: Sequence[Step], request: ValidRequest, request_id: str = REQUEST_ID) -> None:
        self.request_id = request_id
        self.request = request
        self.queue_position = 3
        self.cached_token_count = 0
        self.embedding = b""
        self.delivered: dict[int, int] = {}
        self.reasoned: dict[int, int] = {}
        self.stopped: dict[int, int] = {}
        self.endings: list[Ending] = []
        self.reading = asyncio.Event()
        self._steps = deque(steps)

    @property
    def done(self) -> bool:
        return not self._steps

    def pull(self) -> TokenEvent | None:
        while self._steps:
            step = self._steps[0]
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                self.reading.set()
                if not step.is_set():
                    return None
            self._steps.popleft()
            if isinstance(step, TokenEvent) and step.choice not in self.stopped:
                return step
        return None

    async def more(self, on_more: Callable[[], bool] | None = None) -> None:
        news = True
        while news:
            step = self._steps[0]
            assert isinstance(step, asyncio.Event), "waits for what is there"
            await step.wait()
            news = on_more is not None and on_more()

    def stop_choice(self, choice: int, token_count: int) -> None:
        assert choice not in self.stopped
        self.stopped[choice] = token_count

    def mark_delivered(self, choice: int, token_count: int, reasoning_count: int = 0) -> None:
        assert not self.endings, "delivered after the end"
        assert token_count >= self.delivered.get(choice, 0)
        assert token_count >= reasoning_count >= self.reasoned.get(choice, 0)
        self.delivered[choice] = token_count
        self.reasoned[choice] = reasoning_count

    async def finish(
        self,
        state: common_pb2.TerminalState.ValueType,
        finish_reason: common_pb2.FinishReason.ValueType,
        error_reason: str = "",
    ) -> common_pb2.TokenUsage:
        self.endings.append((state, finish_reason, error_reason))
        return common_pb2.TokenUsage()


class FakeGenerator:
    """Starts what the script says; `refusal` is raised instead, `hold` makes `start` wait."""

    def __init__(self, script: Callable[[ValidRequest], Sequence[Step]] | Sequence[Step] = ()) -> None:
        self.script = script
        self.new_id: Callable[[], str] = lambda: REQUEST_ID
        self.refusal: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.starting = asyncio.Event()
        self.start_cancelled = 0
        self.cached = 0
        self.embedding_of: Callable[[ValidRequest], bytes] = lambda _request: b""
        self.requests: list[tuple[KeyRecord, ValidRequest]] = []
        self.generations: list[ScriptedGeneration] = []
        self.cancelled: list[tuple[str, str]] = []

    async def start(self, key: KeyRecord, request: ValidRequest) -> Generation:
        self.starting.set()
        self.requests.append((key, request))
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.start_cancelled += 1
            raise
        if self.refusal is not None:
            raise self.refusal
        steps = self.script(request) if callable(self.script) else self.script
        made = ScriptedGeneration(steps, request, self.new_id())
        made.cached_token_count = self.cached
        made.embedding = self.embedding_of(request)
        self.generations.append(made)
        return made

    async def cancel(self, key: KeyRecord, request_id: str) -> bool:
        self.cancelled.append((key.tenant, request_id))
        if request_id != REQUEST_ID:
            raise NotFound("There is no such request.")
        return True

    @property
    def only(self) -> ScriptedGeneration:
        """The one generation of the test."""
        assert len(self.generations) == 1
        return self.generations[0]


class FakeDirectory:
    """Serves a list of models; `asks` are who asked for one, `routed` what names with a route give."""

    def __init__(self, *models: ServedModel) -> None:
        self._models = list(models)
        self.routed: dict[str, ServedModel] = {}
        self.asks: list[RouteAsk] = []

    def models(self) -> list[ServedModel]:
        return self._models

    def resolve(self, name: str, ask: RouteAsk = ANYBODY) -> ServedModel:
        self.asks.append(ask)
        if not self._models:
            raise NoWorker("No worker serves any model yet.", retry_after_s=2.0)
        if name in self.routed:
            return self.routed[name]
        for model in self._models:
            ref = model.card.model
            if name in (ref.model, f"{ref.model}@{ref.version}"):
                return model
        raise ModelNotFound(f"There is no model `{name}`.", param="model")

    def aliases(self) -> list[str]:
        return list(self.routed)

    def place(self, model: ServedModel, tenant: str, sizes: WorkClass) -> ServedModel:
        return model


class MemoryResponses:
    """A store of responses without a file."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], bytes] = {}

    async def put(self, tenant: str, response_id: str, body: bytes) -> None:
        self._kept[tenant, response_id] = body

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        return self._kept.get((tenant, response_id))

    async def delete(self, tenant: str, response_id: str) -> bool:
        return self._kept.pop((tenant, response_id), None) is not None


class FakeKeyRing:
    """`Bearer <secret>` → key."""

    def __init__(self, **keys: KeyRecord) -> None:
        self._keys = keys or {"secret": key()}

    async def of_digest(self, digest: bytes, scope: str = INFERENCE) -> KeyRecord:
        for secret, found in self._keys.items():
            if hashlib.sha256(secret.encode()).digest() == digest:
                return found
        raise Unauthenticated("The API key is not valid.")

    async def authenticate(self, authorization: str | None, scope: str = INFERENCE) -> KeyRecord:
        scheme, _, secret = (authorization or "").partition(" ")
        found = self._keys.get(secret) if scheme == "Bearer" else None
        if found is None:
            raise Unauthenticated("The API key is not valid.")
        if scope not in found.scopes:
            raise PermissionDenied("This API key has another scope.")
        return found


class InlineRenderer(TemplateRenderer):
    """Renders in this process: for tests that look at other things than the child."""

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        return template_child.answer(json.loads(json.dumps(request)))


@dataclasses.dataclass
class HttpAnswer:
    """What the client got; `ended` when the last body message came."""

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    writes: list[bytes] = dataclasses.field(default_factory=list)
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json()["error"]
        assert set(found) >= {"message", "type", "param", "code"}
        return dict(found)

    @property
    def frames(self) -> list[str]:
        """Data of each SSE frame, `[DONE]` included; comments left out."""
        text = self.body.decode()
        assert text.endswith("\n\n")
        frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
        return [frame.removeprefix("data: ") for frame in frames]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(frame) for frame in self.frames if frame != "[DONE]"]


class AsgiClient:
    """One request after another, message by message."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.disconnect = asyncio.Event()
        self.reader_may_read: asyncio.Event | None = None
        self.written = asyncio.Event()
        self.answer = HttpAnswer()

    async def ask(
        self,
        method: str,
        path: str,
        body: object = b"",
        *,
        headers: Sequence[tuple[bytes, bytes]] | None = None,
        peer: tuple[str, int] | None = ("127.0.0.1", 1),
        pieces: Sequence[bytes] | None = None,
    ) -> HttpAnswer:
        """`body` is JSON unless it is bytes; `pieces` send it in parts instead."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = [raw] if pieces is None else list(pieces)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"authorization", b"Bearer secret")] if headers is None else list(headers),
            "client": peer,
            "server": ("127.0.0.1", 8000),
        }
        messages = [
            {"type": "http.request", "body": piece, "more_body": at < len(sent) - 1} for at, piece in enumerate(sent)
        ]
        answer = self.answer = HttpAnswer()

        async def receive() -> Message:
            if messages:
                return messages.pop(0)
            await self.disconnect.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if self.reader_may_read is not None:
                await self.reader_may_read.wait()
            if message["type"] == "http.response.start":
                assert not answer.status, "a second start"
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                assert answer.status
                assert not answer.ended
                answer.writes.append(message.get("body", b""))
                answer.ended = not message.get("more_body", False)
            self.written.set()

        await self.app(scope, receive, send)
        return answer

    async def chat(self, **fields: Any) -> HttpAnswer:
        sent = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | fields
        return await self.ask("POST", "/v1/chat/completions", sent)

    async def complete(self, **fields: Any) -> HttpAnswer:
        sent = {"model": "tiny", "prompt": "hi"} | fields
        return await self.ask("POST", "/v1/completions", sent)


def front_parts(
    generator: FakeGenerator,
    *models: ServedModel,
    keyring: FakeKeyRing | None = None,
    renderer: TemplateRenderer | None = None,
    answers: ResumableAnswers | None = None,
    responses: ResponseStore | None = None,
    store_dir: Path | None = None,
) -> FrontParts:
    """What a door is built of, over the fakes; without `answers`, no Redis is there to come back to."""
    clock = FakeClock()
    directory = FakeDirectory(*models)
    # A test that keeps files names a folder.
    folder = store_dir if store_dir is not None else Path("/dev/null")
    database = batch_database(folder)
    return FrontParts(
        generator,
        directory,
        keyring if keyring is not None else FakeKeyRing(),
        clock,
        Validator(directory, renderer if renderer is not None else InlineRenderer(), GrammarChecker()),
        answers if answers is not None else resumable_answers(connect("unix:///none"), clock),
        responses if responses is not None else MemoryResponses(),
        FileStore(database, folder / "files", clock, Limits()),
        BatchStore(database, Limits()),
        UsageReader("", open_channel),
    )


def resumable_answers(redis: aioredis.Redis, clock: FakeClock, *, instance: str = "gateway-1") -> ResumableAnswers:
    """The logs of a gateway that finds its peers in Redis."""
    peers = Peers(AdmissionStore(redis).list_gateways)
    return ResumableAnswers(IdempotencyStore(redis), peers, clock, instance=instance)


def front(
    generator: FakeGenerator,
    *models: ServedModel,
    keyring: FakeKeyRing | None = None,
    ready: bool = True,
    renderer: TemplateRenderer | None = None,
    answers: ResumableAnswers | None = None,
    store_dir: Path | None = None,
) -> AsgiClient:
    """A client of an HTTP door over the fakes."""
    parts = front_parts(
        generator,
        *(models or (served(),)),
        keyring=keyring,
        renderer=renderer,
        answers=answers,
        store_dir=store_dir,
    )
    return AsgiClient(create_app(parts, metrics=Metrics(), ready=lambda: ready))
