"""Prefill and decode processes killed or frozen at each phase of a transfer (gRPC): right tokens, nothing left held."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from millrace.common.v1 import admission_pb2
from millrace.worker.v1 import worker_service_pb2 as pb

from tests.helpers.redis import RedisProcess, free_port
from tests.helpers.struck_worker import MODULE
from tests.helpers.waiting import WAIT_S
from tests.helpers.worker import GatewayClient, echo_tokens, entry, submit_request
from tests.helpers.worker_processes import WorkerProcesses

POINTS = ("prefill.after_accept", "prefill.after_batch", "decode.after_landed")
FAULTS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
TURNS = 20
START_S = 60.0


@dataclasses.dataclass
class Process:
    """A worker process and where its metrics are."""

    process: subprocess.Popen[bytes]
    address: str
    metrics_url: str

    async def started(self) -> Process:
        """Wait until it serves."""
        async with asyncio.timeout(START_S):
            while not self._is_there():
                assert self.process.poll() is None
                await asyncio.sleep(0.02)
        return self

    async def struck(self, fault: str) -> None:
        """Wait until the signal has done its work."""
        async with asyncio.timeout(WAIT_S):
            while not (self.process.poll() is not None if fault == "kill" else self._state() == "T"):
                await asyncio.sleep(0.01)

    def _is_there(self) -> bool:
        return Path(self.address.removeprefix("unix:")).exists()

    def _state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    async def free(self) -> None:
        """Wait until it holds no block and no staging slot."""
        async with asyncio.timeout(WAIT_S), httpx.AsyncClient() as client:
            while True:
                text = (await client.get(self.metrics_url)).text
                held = re.findall(r"^millrace_kv_blocks_used\{.*\} (\S+)$", text, re.M)
                held += re.findall(
                    r'^millrace_kv_staging_slots\{.*state="(?:leased|quarantined)".*\} (\S+)$', text, re.M
                )
                assert len(held) == 3
                if not any(map(float, held)):
                    return
                await asyncio.sleep(0.02)


@dataclasses.dataclass(frozen=True)
class Turn:
    """The request that is in hand when the fault strikes, and one after it."""

    work: admission_pb2.AdmissionEntry
    next: admission_pb2.AdmissionEntry


def make_turn(number: int, rng: random.Random) -> Turn:
    prompt = rng.sample(range(100, 30_000), rng.randint(64, 400))
    return Turn(
        *(entry(f"{name}-{number}", prompt=p, max_tokens=12) for name, p in (("a", prompt), ("b", prompt[::-1])))
    )


class Peers:
    """Starts processes of both roles."""

    def __init__(self, workers: WorkerProcesses, folder: Path) -> None:
        self._workers = workers
        self._folder = folder
        self._count = 0
        self._kept: dict[tuple[str, str], Process] = {}

    async def get(self, role: str, strike: str = "") -> Process:
        """One that serves, to be struck once; the same as before where it lives. `strike` as in `struck_worker`."""
        found = self._kept.get((role, strike))
        if found is None or found.process.poll() is not None:
            found = self._kept[role, strike] = self._start(role, strike)
            await found.started()
        elif strike:
            found.process.send_signal(signal.SIGUSR1)
        return found

    def _start(self, role: str, strike: str) -> Process:
        self._count += 1
        name, port = f"{role}{self._count}", free_port()
        engine = f"role={role},max_prefill_chunk=32,max_model_len=512,num_blocks=512,kv_lease_ms=500,kv_transfer=grpc"
        env = {"MILLRACE_METRICS_LISTEN": f"127.0.0.1:{port}", "STRIKE": strike}
        process = self._workers.start(name, engine=engine, env=env)
        return Process(process, f"unix:{self._folder}/{name}", f"http://127.0.0.1:{port}/metrics")


async def submit(
    gateway: GatewayClient, work: admission_pb2.AdmissionEntry, peer: Process, *, epoch: int = 256
) -> None:
    message = submit_request(work, epoch=epoch)
    message.prefill_peer.CopyFrom(pb.PrefillPeer(worker_instance="peer", address=peer.address))
    response = await gateway.stub.Submit(message, timeout=WAIT_S, wait_for_ready=True)
    while response.refusal == pb.SUBMIT_REFUSAL_GATEWAY_NOT_ATTACHED:
        response = await gateway.stub.Submit(message, timeout=WAIT_S)
    assert response.accepted, response


async def answered(gateway: GatewayClient, work: admission_pb2.AdmissionEntry) -> None:
    await gateway.finished(work.request_id)
    held = gateway.of(work.request_id)
    assert (held.failed, held.problems) == (None, [])
    assert held.tokens[0] == echo_tokens(work.request_id, 0, 12)


@pytest.fixture
def workers(redis_server: RedisProcess, tmp_path: Path) -> Iterator[WorkerProcesses]:
    made = WorkerProcesses(redis_server.url, tmp_path, module=MODULE, step_ms=3)
    yield made
    made.stop()


async def strike_prefill(peers: Peers, decode: Process, strike: tuple[str, str], turn: Turn) -> None:
    """The peer is struck: the decoding worker answers all the same, and whoever lives holds nothing."""
    point, fault = strike
    peer = await peers.get("prefill", f"{point}:{int(FAULTS[fault])}")
    gateway = await GatewayClient(decode.address).attach()

    await submit(gateway, turn.work, peer)
    await peer.struck(fault)
    await answered(gateway, turn.work)

    await decode.free()
    if fault == "freeze":
        peer.process.send_signal(signal.SIGCONT)
        await peer.free()
        await submit(gateway, turn.next, peer)
        await answered(gateway, turn.next)
        await peer.free()
        await decode.free()
    await gateway.close()


async def strike_decode(peers: Peers, other: Process, strike: tuple[str, str], turn: Turn) -> None:
    """The decoding worker is struck: its peer lets go, another answers with a newer epoch, and whoever lives holds
    nothing.
    """
    point, fault = strike
    peer, victim = await peers.get("prefill"), await peers.get("decode", f"{point}:{int(FAULTS[fault])}")
    first, second = await GatewayClient(victim.address).attach(), await GatewayClient(other.address).attach()

    await submit(first, turn.work, peer)
    await victim.struck(fault)
    await peer.free()
    await submit(second, turn.work, peer, epoch=512)
    await answered(second, turn.work)

    await peer.free()
    await other.free()
    if fault == "freeze":
        victim.process.send_signal(signal.SIGCONT)
        await answered(first, turn.work)
        await victim.free()
        await peer.free()
    await first.close()
    await second.close()


@pytest.mark.fault
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("point", POINTS)
async def test_a_process_struck_in_a_transfer_costs_no_token_and_no_block(
    workers: WorkerProcesses, tmp_path: Path, point: str, fault: str
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    peers = Peers(workers, tmp_path)
    survivor = await peers.get("decode")

    for number in range(TURNS):
        strike = strike_prefill if point.startswith("prefill") else strike_decode
        await strike(peers, survivor, (point, fault), make_turn(number, rng))
