"""The worker over real gRPC with the echo model: a client plays the gateway and the router."""

from __future__ import annotations

import asyncio

from millrace.common.v1 import common_pb2

from tests.helpers.worker import GatewayClient, echo_config, echo_tokens, entry, running_worker


async def test_a_stream_is_exactly_the_echo_sequence() -> None:
    async with running_worker() as rig:
        gateway = await rig.gateway()
        await rig.until(lambda: rig.app.parts.table.is_attached("gateway-1"))

        response = await gateway.submit(entry("r1", max_tokens=50))
        await gateway.finished("r1")

        held = gateway.of("r1")
        assert response.accepted
        assert response.worker_instance == rig.app.instance
        assert held.tokens[0] == echo_tokens("r1", 0, 50)
        assert held.finishes[0].reason == common_pb2.FINISH_REASON_LENGTH
        assert held.finishes[0].usage.completion_token_count == 50
        assert held.finishes[0].usage.prompt_token_count == 3
        assert held.problems == []
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        await gateway.close()
    rig.assert_engine_empty()
