"""What is served now: cards, tokenizers and templates of the workers in the registry. Keeps the last known good.

A tokenizer is fetched once per digest, checked against it and bounded in size. Never runs a model; never decides
where a request goes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import grpc
import structlog
from millrace.worker.v1 import worker_service_pb2, worker_service_pb2_grpc

from services.common.admission_types import Pool, WorkerRecord
from services.common.errors import ModelNotFound, NoWorker
from services.common.grpc_client import Dial, open_channel
from services.common.routes import RouteTable, Target
from services.gateway.chat_template import template_of
from services.gateway.generation import ANYBODY, RouteAsk, ServedModel, WorkClass
from services.gateway.reasoning import reasoning_markers
from services.gateway.tokenizer import Tokenizer, TokenizerError, load_tokenizer

MAX_TOKENIZER_BYTES = 67_108_864
CALL_TIMEOUT_S = 5.0
RETRY_AFTER_S = 1.0


class CardError(Exception):
    """A worker's card or tokenizer cannot be used; one sentence."""


class WorkerDirectory:
    """Served models by name; refreshed with each reading of the registry."""

    def __init__(
        self,
        load: Callable[[worker_service_pb2.ModelCard, bytes], Tokenizer] = load_tokenizer,
        dial: Dial = open_channel,
        *,
        routes: Callable[[], RouteTable] = RouteTable,
    ) -> None:
        """`routes` gives the table in force."""
        self._load = load
        self._dial = dial
        self._routes = routes
        self._known: dict[Target, ServedModel] = {}
        self._workers: dict[str, Target] = {}
        self._pools: dict[Target, set[Pool]] = {}
        self._defaults: dict[str, str] = {}
        self._tokenizers: dict[tuple[bytes, int], Tokenizer] = {}
        self._bad: dict[str, str] = {}
        # False while there may be workers that the registry does not name: a name that is not known may be a model.
        self.settled = True

    def models(self) -> list[ServedModel]:
        """Every served version that is not withdrawn, the default version of each model first."""
        served = set(self._workers.values()) - self._routes().withdrawn
        order = sorted(served, key=lambda v: (v[0], self._defaults.get(v[0]) != v[1], v[1]))
        return [self._known[version] for version in order]

    def resolve(self, name: str, ask: RouteAsk = ANYBODY) -> ServedModel:
        """`model@version`, a name with a route, or `model`. Raises ModelNotFound; NoWorker when nothing serves it at
        the moment, or when that cannot be told. A withdrawn version does not exist, by whatever name."""
        if not self._known:
            raise NoWorker("No model is served yet.", retry_after_s=RETRY_AFTER_S)
        routes = self._routes()
        if name in routes.routes:
            chosen = routes.pick(name, tenant=ask.tenant, key=ask.key, usable=lambda t: ask.allowed(t) and t in self)
        else:
            model, at, version = name.partition("@")
            chosen = Target(model, version if at else self._defaults.get(model, ""))
            if chosen in routes.withdrawn or (self.settled and chosen not in self._known):
                raise ModelNotFound(f"The model `{name[:128]}` does not exist.", param="model")
        if chosen is None or chosen not in self:
            raise NoWorker(f"No worker serves `{name[:128]}` at the moment.", retry_after_s=RETRY_AFTER_S)
        return self._known[chosen]

    def __contains__(self, target: Target) -> bool:
        """Some worker serves this version now."""
        return target in self._pools

    def known(self, target: Target) -> ServedModel | None:
        """A version that is, or was, served."""
        return self._known.get(target)

    def aliases(self) -> list[str]:
        """Names with a route."""
        return list(self._routes().routes)

    def place(self, model: ServedModel, tenant: str, sizes: WorkClass) -> ServedModel:
        """The model in the first pool that the rules name and that has a worker of this version, else as it is."""
        ref = model.card.model
        served = self._pools.get(Target(ref.model, ref.version), set())
        for name in self._routes().pools(ref.model, tenant, sizes.priority, sizes.length):
            pool = Pool(model.pool.model, name, model.pool.shard)
            if pool in served:
                return dataclasses.replace(model, pool=pool)
        return model

    async def update(self, records: Sequence[WorkerRecord]) -> None:
        """Take the registry's view: learn new versions, forget workers that left. Blocks for the calls to new ones.
        Workers that only prefill make no version served."""
        for record in records:
            if Target(record.model, record.version) not in self._known and record.instance not in self._bad:
                await self._learn(record)
        pools: dict[Target, set[Pool]] = {}
        self._workers = {}
        for record in records:
            target = Target(record.model, record.version)
            if record.role != "prefill" and target in self._known and record.instance not in self._bad:
                self._workers[record.instance] = target
                pools.setdefault(target, set()).add(record.pool)
        self._pools = pools
        for target, served in pools.items():
            # A version stays in its pool while that has a worker.
            known = self._known[target]
            if known.pool not in served:
                self._known[target] = dataclasses.replace(known, pool=min(served, key=lambda p: p.tag))
        self._bad = {instance: why for instance, why in self._bad.items() if instance in {r.instance for r in records}}
        self._choose_defaults()

    async def _learn(self, record: WorkerRecord) -> None:
        log = structlog.get_logger().bind(worker=record.instance, model=record.model, version=record.version)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                served = await self._fetch(record)
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            log.warning("model_card_failed", error=type(error).__name__)
        except (CardError, TokenizerError) as error:
            self._bad[record.instance] = str(error)
            log.error("model_card_refused", error=str(error))
        else:
            self._known[Target(record.model, record.version)] = served
            log.info("model_known", max_model_len=served.card.max_model_len)

    async def _fetch(self, record: WorkerRecord) -> ServedModel:
        async with self._dial(record.address) as channel:
            stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
            card = (await stub.GetModelCard(worker_service_pb2.GetModelCardRequest())).card
            _check_card(card, record)
            key = (card.tokenizer_digest, card.vocab_size)
            tokenizer = self._tokenizers.get(key)
            if tokenizer is None:
                data = await _fetch_tokenizer(stub, card)
                tokenizer = await asyncio.to_thread(self._load, card, data)
                self._tokenizers[key] = tokenizer
        template = template_of(card)
        return ServedModel(record.pool, card, tokenizer, template, reasoning_markers(template, tokenizer))

    def _choose_defaults(self) -> None:
        # The default stays while anybody serves it; then the version with most workers, then the newest.
        withdrawn = self._routes().withdrawn
        counts = Counter(target for target in self._workers.values() if target not in withdrawn)
        for model in {model for model, _ in counts}:
            if Target(model, self._defaults.get(model, "")) not in counts:
                versions = [(count, version) for (name, version), count in counts.items() if name == model]
                self._defaults[model] = max(versions)[1]


def _check_card(card: worker_service_pb2.ModelCard, record: WorkerRecord) -> None:
    if (card.model.model, card.model.version) != (record.model, record.version):
        raise CardError("the card names another model than the registry")
    if card.max_model_len < 1 or card.vocab_size < 1 or card.block_size < 1:
        raise CardError("the card has no usable sizes")


async def _fetch_tokenizer(
    stub: worker_service_pb2_grpc.WorkerServiceAsyncStub, card: worker_service_pb2.ModelCard
) -> bytes:
    chunks: list[bytes] = []
    size = 0
    request = worker_service_pb2.GetTokenizerRequest(tokenizer_digest=card.tokenizer_digest)
    async for response in stub.GetTokenizer(request):
        size += len(response.chunk)
        if size > MAX_TOKENIZER_BYTES:
            raise CardError(f"the tokenizer is larger than {MAX_TOKENIZER_BYTES} bytes")
        chunks.append(response.chunk)
    data = b"".join(chunks)
    if data and hashlib.sha256(data).digest() != card.tokenizer_digest:
        raise CardError("the tokenizer does not match its digest")
    return data
