"""Two workers in this process, one that prefills and one that decodes, and a gateway on the latter."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

from millrace.common.v1 import admission_pb2
from millrace.worker.v1 import worker_service_pb2 as pb

from services.worker.config import WorkerConfig, WorkerRole
from services.worker.engine.fake_model_runner import FakeScript
from services.worker.engine.outputs import EngineStats, SchedulerOutput
from services.worker.model_source import LoadedModel
from tests.helpers.tcp_proxy import TcpProxy, tcp_proxy
from tests.helpers.waiting import WAIT_S, until
from tests.helpers.worker import (
    GatewayClient,
    WorkerRig,
    echo_config,
    running_worker,
    scripted_echo,
    submit_request,
)


@dataclasses.dataclass
class Pair:
    """The decoding worker reaches its peer through `link`."""

    prefill: WorkerRig
    decode: WorkerRig
    gateway: GatewayClient
    link: TcpProxy

    async def submit(self, work: admission_pb2.AdmissionEntry, *, epoch: int = 256, remaining_s: float = 60.0) -> None:
        """Submit to the decoding worker with the other as its peer; it must accept."""
        self.gateway.choice_counts[work.request_id] = work.sampling.choice_count
        message = submit_request(work, epoch=epoch, remaining_s=remaining_s)
        message.prefill_peer.CopyFrom(pb.PrefillPeer(worker_instance="prefill", address=self.link.address))
        response = await self.gateway.stub.Submit(message, timeout=WAIT_S)
        assert response.accepted, response

    def decode_stats(self) -> EngineStats:
        return stats_of(self.decode)

    async def assert_nothing_is_held(self) -> None:
        """Every block, slot and session is free again, on both sides."""
        for rig in (self.prefill, self.decode):
            await until(lambda rig=rig: stats_of(rig).held_block_count == 0)
            assert rig.app.parts.board.prefill_count == 0
        await until(lambda: staging(self.decode) == {"free": free_slots(self.decode), "leased": 0, "quarantined": 0})


def stats_of(rig: WorkerRig) -> EngineStats:
    """The engine's newest counts."""
    stats = rig.app.parts.board.stats
    assert stats is not None
    return stats


def metric(rig: WorkerRig, name: str, **labels: str) -> float:
    """A counter or gauge of the worker, 0 while it has no such sample."""
    labels = {"model": rig.app.parts.identity.model.model, "version": "1", **labels}
    return rig.app.parts.metrics.registry.get_sample_value(name, labels) or 0.0


def staging(rig: WorkerRig) -> dict[str, int]:
    """Slots of the staging area by state, as the metrics tell."""
    return {
        state: round(metric(rig, "millrace_kv_staging_slots", state=state))
        for state in ("free", "leased", "quarantined")
    }


def free_slots(rig: WorkerRig) -> int:
    """Slots in all."""
    return rig.app.parts.peers.remotes.staging.slot_count


def fallbacks(rig: WorkerRig) -> dict[str, int]:
    """Prompts computed by the worker itself though a peer was asked, by cause."""
    return {
        sample.labels["cause"]: round(sample.value)
        for family in rig.app.parts.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "millrace_prefill_fallbacks_total"
    }


def peer_config(role: WorkerRole, **engine: object) -> WorkerConfig:
    """Prompts are computed 32 tokens a step."""
    return echo_config(**{"role": role, "max_prefill_chunk": 32, "kv_transfer": "grpc", **engine})


@contextlib.asynccontextmanager
async def pair_of_workers(
    *,
    prefill: WorkerConfig | None = None,
    decode: WorkerConfig | None = None,
    prefill_steps: Callable[[SchedulerOutput], None] = lambda _: None,
    decode_steps: Callable[[SchedulerOutput], None] = lambda _: None,
    model: Callable[[WorkerConfig], LoadedModel] | None = None,
) -> AsyncIterator[Pair]:
    """Both workers verify that what they read of their blocks is what belongs there, unless `model` loads another."""
    prefill = prefill or peer_config(WorkerRole.PREFILL)
    decode = decode or peer_config(WorkerRole.DECODE)
    steps = {WorkerRole.DECODE: decode_steps}

    def scripted(config: WorkerConfig) -> LoadedModel:
        before_step = steps.get(config.engine.role, prefill_steps)
        return scripted_echo(config, FakeScript(before_step=before_step, verify=True))

    load = model or scripted
    async with (
        running_worker(config=prefill, model=load(prefill)) as p,
        running_worker(config=decode, model=load(decode)) as d,
        tcp_proxy(p.app.address) as link,
    ):
        gateway = await d.gateway()
        await until(lambda: d.app.parts.table.is_attached("gateway-1"))
        yield Pair(p, d, gateway, link)
        await gateway.close()
    p.app.parts.engine.check_invariants()
    d.app.parts.engine.check_invariants()
