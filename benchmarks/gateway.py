"""What one gateway process costs: latency added to a worker's, requests a second, streamed tokens a second.

Starts a whole stack of the echo model on free ports; unary load comes open-loop (Poisson), saturation closed-loop.
`added` is the latency through the gateway less that of the same request by Submit and Attach at the worker, quantile by
quantile. `gateway_cpu` is of the gateway's process alone and says most on a busy machine, `stack_cpu` is of all
processes that a request passes. With `--litellm <environment>` LiteLLM's proxy of that virtual environment is started
in front of `benchmarks.echo_upstream` and measured by the same client in the same sitting (docs/benchmarks.md).
Prints a table and writes `benchmarks/results/gateway.json`. Never run by tests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import grpc

from benchmarks.results import cpu_ms, machine, save
from services.common.admission_store import AdmissionStore
from services.common.lifecycle import new_ulid
from services.common.redis_client import connect
from tests.helpers.redis import free_port
from tests.helpers.stack import Stack
from tests.helpers.worker import GatewayClient, entry

UNARY_TOKENS = 8
STREAM_TOKENS = 64
ENGINE = "max_num_seqs=256,max_num_batched_tokens=4096,max_model_len=2048,num_blocks=8192"
# A proxy needs half a minute to start on a busy machine.
START_S = 120.0
LITELLM_CONFIG = """
model_list:
  - model_name: echo
    litellm_params: {{model: openai/echo, api_base: "http://127.0.0.1:{port}/v1", api_key: none}}
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One measurement; milliseconds. `direct` is the worker (or upstream) alone, `load` the machine's load average."""

    target: str
    what: str
    offered: float
    per_s: float
    tokens_per_s: float
    p50: float
    p99: float
    direct_p50: float
    direct_p99: float
    gateway_cpu: float
    stack_cpu: float
    failed: int
    load: float

    @property
    def added(self) -> tuple[float, float]:
        """Milliseconds added at the median and at the 99th percentile."""
        return round(self.p50 - self.direct_p50, 2), round(self.p99 - self.direct_p99, 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A server of chat completions, its process, and the processes behind it."""

    name: str
    url: str
    key: str
    model: str
    pid: int = 0
    behind: tuple[int, ...] = ()

    def cpu_ms(self) -> tuple[float, float]:
        """Processor time so far: of the process, and of all."""
        own = cpu_ms(self.pid) if self.pid else 0.0
        return own, own + sum(map(cpu_ms, self.behind))


# Latencies in milliseconds, sorted, and how many requests failed.
Taken = tuple[list[float], int]
Send = Callable[[], Awaitable[object]]


class Client:
    """The least client that speaks HTTP: kept connections, one request at a time on each, nothing parsed twice."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._address = urlsplit(target.url)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def wire(self, *, tokens: int, stream: bool) -> bytes:
        """A request as it goes out."""
        body = {
            "model": self._target.model,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens,
            "stream": stream,
        }
        raw = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._address.netloc}\r\n"
            f"authorization: Bearer {self._target.key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(raw)}\r\n\r\n"
        )
        return head.encode() + raw

    async def send(self, request: bytes) -> bytes:
        """The body of a 200. Raises RuntimeError for another status, OSError or EOFError for a broken connection."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port, limit=1 << 20)
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length: " in head:
            size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(size)
        else:
            body = await reader.readuntil(b"\r\n0\r\n\r\n")
        self._idle.append((reader, writer))
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(body[:200].decode(errors="replace"))
        return body

    def close(self) -> None:
        """Close what is kept."""
        for _, writer in self._idle:
            writer.close()


async def open_loop(send: Send, rate: float, seconds: float) -> Taken:
    """Latencies in milliseconds from the time each was due, sorted, and how many failed."""
    rng = random.Random(1)
    taken: list[float] = []
    failed = 0

    async def one(due: float) -> None:
        nonlocal failed
        try:
            await send()
            taken.append((time.perf_counter() - due) * 1000)
        except (RuntimeError, OSError, EOFError, TimeoutError, grpc.aio.AioRpcError):
            failed += 1

    start = due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        while (due := due + rng.expovariate(rate)) < start + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(due))
    return sorted(taken), failed


async def closed_loop(send: Send, callers: int, seconds: float) -> Taken:
    """As `open_loop`, with so many callers that each wait for their answer."""
    taken: list[float] = []
    failed = 0
    end = time.perf_counter() + seconds

    async def caller() -> None:
        nonlocal failed
        while (before := time.perf_counter()) < end:
            try:
                await send()
                taken.append((time.perf_counter() - before) * 1000)
            except (RuntimeError, OSError, EOFError, TimeoutError, grpc.aio.AioRpcError):
                failed += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())
    return sorted(taken), failed


def quantile(ordered: list[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 2) if ordered else float("nan")


async def measure(target: Target, direct: Send, arguments: argparse.Namespace) -> list[Result]:
    """Every measurement of one target, printed as it comes."""
    client = Client(target)
    unary, stream = client.wire(tokens=UNARY_TOKENS, stream=False), client.wire(tokens=STREAM_TOKENS, stream=True)
    await closed_loop(lambda: client.send(unary), 8, 1.0)
    made: list[Result] = []

    async def add(what: str, offered: float, tokens: int, run: Awaitable[Taken], alone: list[float]) -> None:
        cpu, began = target.cpu_ms(), time.perf_counter()
        taken, failed = await run
        spent, count = time.perf_counter() - began, max(1, len(taken))
        own, every = (round((now - then) / count, 3) for now, then in zip(target.cpu_ms(), cpu, strict=True))
        result = Result(
            target.name, what, offered, round(len(taken) / spent, 1), round(len(taken) * tokens / spent),
            quantile(taken, 0.5), quantile(taken, 0.99), quantile(alone, 0.5), quantile(alone, 0.99),
            own, every, failed, machine()["load"],
        )  # fmt: skip
        made.append(result)
        print_row(result)

    for rate in arguments.rates:
        alone, _ = await open_loop(direct, rate, arguments.seconds)
        await add("unary", rate, UNARY_TOKENS, open_loop(lambda: client.send(unary), rate, arguments.seconds), alone)
    for what, request, tokens in (("unary", unary, UNARY_TOKENS), ("stream", stream, STREAM_TOKENS)):
        run = closed_loop(lambda request=request: client.send(request), arguments.callers, arguments.seconds)
        await add(f"{what} x{arguments.callers}", 0, tokens, run, [])
    client.close()
    return made


def print_row(result: Result) -> None:
    values = (*dataclasses.astuple(result), *result.added)
    print(" ".join(f"{value!s:>12}" for value in values), flush=True)


async def own_stack(arguments: argparse.Namespace) -> list[Result]:
    """One gateway, router, usage service, Redis and an echo worker that does not wait between steps."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"MILLRACE_ECHO_STEP_MS": "0", "MILLRACE_ENGINE": ENGINE}
        home = Path(folder) / "home"
        stack = await asyncio.to_thread(lambda: Stack(home, "--model", "echo", env=environment).wait_ready())
        try:
            redis = connect(f"unix://{home}/run/redis.sock")
            (worker,) = await AdmissionStore(redis).list_workers()
            await redis.aclose()
            async with _worker_alone(worker.address) as direct:
                processes = dict(stack.state.processes)
                gateway = processes.pop("gateway")
                target = Target("millrace", stack.url, stack.key, "echo", gateway, tuple(processes.values()))
                return await measure(target, direct, arguments)
        finally:
            await asyncio.to_thread(stack.stop)


@contextlib.asynccontextmanager
async def _worker_alone(address: str) -> AsyncIterator[Send]:
    """The unary request by Submit and Attach, with no gateway, queue or router."""
    gateway = await GatewayClient(address, "gateway-bench").attach()

    async def send() -> None:
        request_id = new_ulid()
        answer = await gateway.submit(entry(request_id, gateway=gateway.instance, max_tokens=UNARY_TOKENS))
        if not answer.accepted:
            raise RuntimeError(answer.refusal)
        await gateway.finished(request_id)
        del gateway.received[request_id]
        gateway.frames.clear()

    try:
        # The worker learns of this gateway by its first message, which no answer confirms.
        for _ in range(100):
            with contextlib.suppress(RuntimeError):
                await send()
                break
            await asyncio.sleep(0.05)
        yield send
    finally:
        await gateway.close()


async def litellm(arguments: argparse.Namespace) -> list[Result]:
    """LiteLLM's proxy, one process without a database, as it starts; the time at its upstream is the direct one."""
    port, upstream_port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        behind = Client(Target("upstream", f"http://127.0.0.1:{upstream_port}", "none", "echo"))
        request = behind.wire(tokens=UNARY_TOKENS, stream=False)
        config = Path(folder) / "litellm.yaml"
        config.write_text(LITELLM_CONFIG.format(port=upstream_port))
        upstream = started.enter_context(
            _process(sys.executable, "-m", "benchmarks.echo_upstream", "--port", str(upstream_port))
        )
        # It starts with a key only; our modules are not its, and it need not ask the network for prices.
        own = {"LITELLM_MASTER_KEY": f"sk-{secrets.token_hex(24)}", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
        program = str(arguments.litellm / "bin" / "litellm")
        proxy = started.enter_context(_process(program, "--config", str(config), "--port", str(port), env=env))
        key = own["LITELLM_MASTER_KEY"]
        target = Target("litellm", f"http://127.0.0.1:{port}", key, "echo", proxy, (upstream,))
        front = Client(target)
        await _until_it_answers(lambda: front.send(front.wire(tokens=UNARY_TOKENS, stream=False)))
        made = await measure(target, lambda: behind.send(request), arguments)
        front.close()
        behind.close()
        return made


@contextlib.contextmanager
def _process(*command: str, env: Mapping[str, str] | None = None) -> Iterator[int]:
    """A child process by its id, ended with the block."""
    child = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield child.pid
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


async def _until_it_answers(send: Send) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            await send()
            return
        except (RuntimeError, OSError, EOFError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)


async def run(arguments: argparse.Namespace) -> list[Result]:
    """All targets, one after the other."""
    results = await own_stack(arguments)
    return results + (await litellm(arguments) if arguments.litellm else [])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write instead of benchmarks/results/gateway.json")
    parser.add_argument("--rates", type=float, nargs="+", default=[20, 100, 300], help="unary requests a second")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each measurement")
    parser.add_argument("--callers", type=int, default=64, help="clients at saturation")
    parser.add_argument("--litellm", type=Path, help="virtual environment of `litellm[proxy]`, to measure beside")
    arguments = parser.parse_args()
    columns = [*(field.name for field in dataclasses.fields(Result)), "added_p50", "added_p99"]
    print(" ".join(f"{column:>12}" for column in columns))
    results = asyncio.run(run(arguments))
    config = {"unary_tokens": UNARY_TOKENS, "stream_tokens": STREAM_TOKENS, "engine": ENGINE}
    config |= {name: getattr(arguments, name) for name in ("rates", "seconds", "callers")}
    rows = [dataclasses.asdict(each) | {"added": each.added} for each in results]
    print(save("gateway", config, rows, arguments.json))


if __name__ == "__main__":
    main()
