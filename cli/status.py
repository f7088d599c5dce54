"""`millrace status`: what the local stack runs, and how each worker is."""

from __future__ import annotations

import asyncio

import grpc
import httpx
import typer
from millrace.router.v1 import router_service_pb2, router_service_pb2_grpc
from rich.console import Console
from rich.table import Table

from cli.stack_state import StackState, home_dir, process_alive, read_state
from services.common.grpc_client import open_channel
from services.common.tls import ROUTER, load_tls


def status() -> None:
    """Show processes, readiness and workers of the local stack; exit code 1 when it is not ready."""
    state = read_state(home_dir())
    if state is None:
        print("No stack is running.")
        raise typer.Exit(1)
    console = Console(highlight=False)
    ready = _ready(state)
    console.print(f"{state.url}: {'ready' if ready else 'not ready'}; model {state.model}", markup=False)
    processes = Table("process", "pid", "state")
    for name, pid in state.processes.items():
        processes.add_row(name, str(pid), "running" if process_alive(pid) else "ended")
    console.print(processes)
    endpoints = asyncio.run(_endpoints(state))
    if endpoints is None:
        console.print("The router does not answer.", markup=False)
    else:
        console.print(_worker_table(endpoints))
    if not ready:
        raise typer.Exit(1)


def _ready(state: StackState) -> bool:
    try:
        return httpx.get(f"{state.url}/readyz", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


async def _endpoints(state: StackState) -> list[router_service_pb2.EndpointStatus] | None:
    async with open_channel(state.router_address, tls=load_tls(state.tls_dir), server_role=ROUTER) as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        try:
            answer = await stub.GetStatus(router_service_pb2.GetStatusRequest(), timeout=2)
        except grpc.aio.AioRpcError:
            return None
    return list(answer.endpoints)


def _worker_table(endpoints: list[router_service_pb2.EndpointStatus]) -> Table:
    table = Table("worker", "model", "version", "state", "free slots", "free blocks", "in flight")
    for endpoint in endpoints:
        health = "draining" if endpoint.draining else "healthy" if endpoint.healthy else "unhealthy"
        table.add_row(
            endpoint.worker_instance,
            endpoint.model.model,
            endpoint.model.version,
            health,
            str(endpoint.free_slot_count),
            str(endpoint.free_block_count),
            str(endpoint.in_flight_count),
        )
    return table
