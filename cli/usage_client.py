"""How commands reach the usage service: its address, the administrators' token, and plain sentences for failures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc

from cli.stack import admin_token
from cli.stack_state import home_dir, read_state
from cli.up import fail
from services.common.grpc_client import error_from_rpc, open_channel
from services.common.lifecycle import StartupError
from services.common.tls import USAGE, load_tls

ResultT = TypeVar("ResultT")
TIMEOUT_S = 15.0
ADDRESS_HELP = "Address of the usage service; the local stack's unless given."
Metadata = tuple[tuple[str, str], ...]


def call_usage(address: str | None, work: Callable[[grpc.aio.Channel, Metadata], Awaitable[ResultT]]) -> ResultT:
    """Run `work` with a channel and the metadata of an administrator; exits with one sentence on failure."""
    state = read_state(home_dir())
    target = address or (state.usage_address if state else None)
    if target is None:
        raise fail("No stack is running: start one with `millrace up`, or name a service with --usage-address.")
    token = os.environ.get("MILLRACE_ADMIN_TOKEN") or (admin_token(home_dir()) if state else "")
    metadata: Metadata = (("authorization", f"Bearer {token}"),) if token else ()

    try:
        tls = load_tls(os.environ.get("MILLRACE_TLS_DIR") or (state.tls_dir if state else ""))
    except StartupError as error:
        raise fail(str(error)) from error

    async def run() -> ResultT:
        async with open_channel(target, tls=tls, server_role=USAGE) as channel:
            return await work(channel, metadata)

    try:
        return asyncio.run(run())
    except grpc.aio.AioRpcError as error:
        raise fail(error_from_rpc(error).message) from error


def call_account(
    address: str | None, call: Callable[[pb_grpc.AccountServiceAsyncStub, dict[str, Any]], Awaitable[ResultT]]
) -> ResultT:
    """One call of the account service; `call` gets a stub and what every call is made with."""

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> ResultT:
        return await call(pb_grpc.AccountServiceStub(channel), {"metadata": metadata, "timeout": TIMEOUT_S})

    return call_usage(address, work)
