"""What this worker does with its peers, as the rest of the worker sees it: both sides of disaggregation in one hand."""

from __future__ import annotations

import dataclasses

from services.worker.engine.request import EngineRequest, KVRole
from services.worker.engine_loop import LoopReport
from services.worker.kv_transport import KVTransfer
from services.worker.prefill_desk import PrefillDesk
from services.worker.remote_prefill import RemotePrefills


class KVPeers:
    """`desk` prefills for others, `remotes` are requests of ours that others prefill for."""

    def __init__(self, desk: PrefillDesk, remotes: RemotePrefills, transfers: tuple[KVTransfer, ...]) -> None:
        self.desk = desk
        self.remotes = remotes
        self._transfers = transfers

    def expect(self, request: EngineRequest, address: str, traceparent: str) -> EngineRequest:
        """The request as it is to be submitted so that the peer at `address` is asked for its prompt."""
        request = dataclasses.replace(request, kv_role=KVRole.IMPORT)
        self.remotes.expect(request, address, traceparent)
        return request

    def on_report(self, report: LoopReport) -> None:
        """Take what the engine did."""
        self.desk.on_report(report)
        self.remotes.on_report(report)

    async def close(self) -> None:
        """End what is left and let go of everything."""
        await self.remotes.close()
        for transfer in self._transfers:
            await transfer.close()
