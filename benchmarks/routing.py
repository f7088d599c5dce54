"""Prefix routing beside round robin and least-loaded: hit rate and time to the first token, also across a scale-out.

Simulated workers over the real policy, the real scheduler, block pool and prefix cache; only the computing is a
formula (`STEP_S` and `TOKEN_S`), so a run says the same on every machine. Eight tenants ask with one of four shared
prefixes each, some more than others: two workers can keep all prefixes between them, none can alone. Halfway through
the `2 → 4` runs two empty workers join. Prints a table and writes `benchmarks/results/routing.json` and `.md`. Never
run by tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from collections.abc import Sequence
from itertools import count

import numpy as np
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2

from benchmarks.results import RESULTS, save
from services.common.admission_types import Pool, WorkerRecord
from services.common.block_hash import chain_hashes, pack_tokens, root_hash, truncated
from services.router.endpoint import Endpoint, Needs, View
from services.router.policy import RoutingPolicy
from services.router.prefix_index import PrefixIndex
from services.router.roster import Roster
from services.worker.engine.engine import Engine
from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.fake_model_runner import FakeModelRunner
from services.worker.engine.model_runner import RunnerSpec
from services.worker.engine.request import EngineRequest, SamplingParams

BLOCK_SIZE = 16
# A step of the simulated accelerator: a floor, and a share for each token it computes.
STEP_S = 0.010
TOKEN_S = 0.000_25
TENANTS = 8
PREFIXES = 4
SHARED_TOKENS = 1_024
OWN_TOKENS = 64
OUTPUT_TOKENS = 32
SLOTS = 16
# The shared prefixes of all tenants take 2,048 blocks: no worker can keep them all; two can, beside what is a prompt's
# own.
BLOCKS = 1_536
WATCH_S = 0.05
POLICIES = ("round robin", "least loaded", "prefix")


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    request_id: str
    tenant: str
    prompt: tuple[int, ...]
    block_hashes: tuple[int, ...]

    @property
    def needs(self) -> Needs:
        return Needs(self.request_id, "bench", "1", "gateway-1", "", 1, len(self.prompt) + 1, self.block_hashes)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """`hit_rate` is the share of prompt tokens that came from a cache, `late_hit_rate` that of the second half alone;
    `most_to_mean` is of the requests that workers got in the second half; times in milliseconds."""

    workers: str
    policy: str
    hit_rate: float
    late_hit_rate: float
    most_to_mean: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_mean_ms: float


class Worker:
    """One engine whose steps take as long as the formula says."""

    def __init__(self, number: int, prefixes: PrefixIndex) -> None:
        spec = RunnerSpec(32_000, 4_096, BLOCK_SIZE, BLOCKS, frozenset(), deterministic=True)
        config = EngineConfig(
            model_version="bench@1", max_num_seqs=SLOTS, max_num_batched_tokens=2_048, max_prefill_chunk=512
        )
        self.engine = Engine(FakeModelRunner(spec), config)
        record = WorkerRecord(f"worker-{number}", "", "bench", "1", Pool("bench"), "aggregated")
        self.endpoint = Endpoint(record)
        self.running = 0
        self.taken = 0
        self.free_at = 0.0
        self._prefixes = prefixes

    def watch(self, now: float) -> None:
        """What the router is told: the view, and what the cache holds."""
        stats = self.engine.stats(now)
        message = worker_service_pb2.WatchResponse(
            model=common_pb2.ModelRef(model="bench", version="1"),
            role=common_pb2.WORKER_ROLE_AGGREGATED,
            free_slot_count=SLOTS - self.running,
            free_block_count=stats.free_block_count + stats.cached_block_count,
            block_size=BLOCK_SIZE,
            in_flight_count=self.running,
            backlog_token_count=stats.backlog_token_count,
            attached_gateways=["gateway-1"],
            ready=True,
        )
        self.endpoint.observe(View.of(message), now)
        events = self.engine.take_kv_events()
        stored = [truncated(each) for each in events.stored]
        if events.snapshot:
            self._prefixes.replace(self.endpoint.instance, stored)
        else:
            removed = [truncated(each) for each in events.removed]
            self._prefixes.change(self.endpoint.instance, stored=stored, removed=removed)

    def take(self, arrival: Arrival, now: float) -> None:
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, seed=0, ignore_eos=True)
        prompt = np.array(arrival.prompt, dtype=np.int32)
        salt = arrival.tenant.encode()
        request = EngineRequest(arrival.request_id, 1, prompt, sampling, tenant=arrival.tenant, cache_salt=salt)
        self.engine.add_request(request, now=now)
        self.endpoint.accepted(arrival.request_id, now)
        self.running += 1
        self.taken += 1

    def prefix_tokens(self) -> tuple[int, int]:
        """Prompt tokens that came from the cache so far, and those of all prompts."""
        stats = self.engine.stats(self.free_at)
        return stats.prefix_hit_token_total, stats.prefix_query_token_total

    def step(self, now: float) -> list[tuple[str, float]]:
        """One step; returns (request, time) of the first tokens it gave."""
        first = []
        outputs = self.engine.step(now)
        self.free_at = now + STEP_S + TOKEN_S * self.engine.stats(now).scheduled_token_count
        for output in outputs:
            if output.token_ids and output.first_index == 0:
                first.append((output.key.request_id, self.free_at))
            self.running -= output.finish_reason is not None
        return first


def arrivals(requests: int, *, per_second: float, seed: int) -> list[Arrival]:
    """Poisson arrivals; tenant k asks in proportion to 1 / (k + 1), with each of its prefixes as often."""
    rng = random.Random(seed)
    shared = [[rng.randrange(32_000) for _ in range(SHARED_TOKENS)] for _ in range(TENANTS * PREFIXES)]
    roots = [
        root_hash(model_version="bench@1", adapter_digest=b"", tenant_salt=f"t{k}".encode()) for k in range(TENANTS)
    ]
    weights = [1 / (k + 1) for k in range(TENANTS)]
    made, at = [], 0.0
    for number in range(requests):
        at += rng.expovariate(per_second)
        [k] = rng.choices(range(TENANTS), weights)
        prompt = (*shared[k * PREFIXES + rng.randrange(PREFIXES)], *(rng.randrange(32_000) for _ in range(OWN_TOKENS)))
        hashes = tuple(truncated(h) for h in chain_hashes(roots[k], pack_tokens(prompt), block_size=BLOCK_SIZE))
        made.append(Arrival(at, f"r{number}", f"t{k}", prompt, hashes))
    return made


class Router:
    """One of the three ways to choose."""

    def __init__(self, policy: str, prefixes: PrefixIndex) -> None:
        self._turn = count()
        self._by_turn = policy == "round robin"
        self._knows_prefixes = policy == "prefix"
        self._policy = RoutingPolicy(random.Random(1), prefixes)

    def choose(self, arrival: Arrival, workers: Sequence[Worker], now: float) -> Worker | None:
        needs = arrival.needs
        if self._by_turn:
            turn = next(self._turn)
            in_turn = [workers[(turn + i) % len(workers)] for i in range(len(workers))]
            chosen = next((w for w in in_turn if w.endpoint.fits(needs, now)), None)
        else:
            seen = needs if self._knows_prefixes else dataclasses.replace(needs, block_hashes=())
            endpoint = self._policy.choose(seen, Roster(w.endpoint for w in workers), now)
            chosen = next((w for w in workers if w.endpoint is endpoint), None)
        if chosen is not None:
            self._policy.placed(needs, chosen.endpoint, now)
        return chosen


@dataclasses.dataclass(frozen=True, slots=True)
class _Done:
    """What the workers have done so far."""

    hits: int
    queries: int
    taken: tuple[int, ...]

    @classmethod
    def of(cls, workers: Sequence[Worker]) -> _Done:
        tokens = [worker.prefix_tokens() for worker in workers]
        return cls(sum(hit for hit, _ in tokens), sum(asked for _, asked in tokens), tuple(w.taken for w in workers))


def simulate(policy: str, load: Sequence[Arrival], *, start: int, end: int) -> Result:
    """Run all arrivals; the pool grows from `start` to `end` workers at half of the requests."""
    prefixes = PrefixIndex()
    workers = [Worker(number, prefixes) for number in range(start)]
    router = Router(policy, prefixes)
    asked = {each.request_id: each.at for each in load}
    waiting: list[Arrival] = []
    ttft: list[float] = []
    now, watched, upcoming = 0.0, -WATCH_S, list(reversed(load))
    half: _Done | None = None
    while upcoming or waiting or any(w.engine.has_work() for w in workers):
        if half is None and now >= load[len(load) // 2].at:
            workers += [Worker(number, prefixes) for number in range(start, end)]
            watched = -WATCH_S
            half = _Done.of(workers)
        if now - watched >= WATCH_S:
            watched = now
            for worker in workers:
                worker.watch(now)
        while upcoming and upcoming[-1].at <= now:
            waiting.append(upcoming.pop())
        for arrival in list(waiting):
            chosen = router.choose(arrival, workers, now)
            if chosen is None:
                break
            waiting.remove(arrival)
            chosen.take(arrival, now)
        for worker in workers:
            if worker.free_at <= now and worker.engine.has_work():
                ttft += [at - asked[request_id] for request_id, at in worker.step(now)]
        now += 0.002
    assert half is not None
    whole = _Done.of(workers)
    taken = [late - early for late, early in zip(whole.taken, half.taken, strict=True)]
    ttft.sort()
    return Result(
        workers=f"{start}" if start == end else f"{start} → {end}",
        policy=policy,
        hit_rate=round(whole.hits / whole.queries, 3),
        late_hit_rate=round((whole.hits - half.hits) / (whole.queries - half.queries), 3),
        most_to_mean=round(max(taken) * len(taken) / sum(taken), 2),
        ttft_p50_ms=round(statistics.median(ttft) * 1000, 1),
        ttft_p95_ms=round(ttft[int(len(ttft) * 0.95)] * 1000, 1),
        ttft_mean_ms=round(statistics.fmean(ttft) * 1000, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--per-second", type=float, default=10.0, help="mean rate of arrivals")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    results = []
    for start, end in ((2, 2), (2, 4)):
        load = arrivals(arguments.requests, per_second=arguments.per_second, seed=arguments.seed)
        results += [simulate(policy, load, start=start, end=end) for policy in POLICIES]
    columns = [field.name for field in dataclasses.fields(Result)]
    rows = ["| " + " | ".join(str(value) for value in dataclasses.astuple(each)) + " |" for each in results]
    table = "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *rows])
    print(table)
    config = {
        **vars(arguments),
        "tenants": TENANTS,
        "prefixes_per_tenant": PREFIXES,
        "shared_tokens": SHARED_TOKENS,
        "own_tokens": OWN_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "step_s": STEP_S,
        "token_s": TOKEN_S,
        "blocks": BLOCKS,
        "slots": SLOTS,
    }
    said = ", ".join(f"{name} {value}" for name, value in config.items())
    (RESULTS / "routing.md").write_text(f"# Routing\n\n`python -m benchmarks.routing`: {said}\n\n{table}\n")
    print(save("routing", config, [dataclasses.asdict(each) for each in results]))


if __name__ == "__main__":
    main()
