"""`millrace rollout`: move a name from one version of its model to another, by steps, and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from google.protobuf import duration_pb2
from millrace.common.v1 import routes_pb2
from millrace.usage.v1 import route_service_pb2 as pb
from millrace.usage.v1 import route_service_pb2_grpc as pb_grpc
from rich.console import Console
from rich.table import Table

from cli import rollout_progress
from cli.release import read_release
from cli.tenant import Address
from cli.up import fail
from cli.usage_client import TIMEOUT_S, Metadata, call_usage

app = typer.Typer(no_args_is_help=True)
app.command("status")(rollout_progress.status)
Alias = Annotated[str, typer.Argument(help="Name that clients send: a model's, or one of its own.")]
Why = Annotated[str, typer.Option(help="Reason, kept in the history and the audit trail.")]
ReleaseFile = Annotated[
    Path | None, typer.Option("--release", help="The version's release, with evaluation and contract-suite result.")
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Go without such a release; needs --why, and the history says that it was forced."),
]


@app.command()
def start(
    alias: Alias,
    to: Annotated[str, typer.Option(help="Version to roll out: `2`, or `model@2`.")],
    baseline: Annotated[str, typer.Option("--from", help="Version to fall back to; the one served unless given.")] = "",
    step: Annotated[list[int] | None, typer.Option(help="Percent of a step, once for each; 1, 5, 25, 100.")] = None,
    bake_s: Annotated[float, typer.Option(min=0, help="Shortest time of a step, in seconds.")] = 300.0,
    hold: Annotated[
        list[str] | None, typer.Option(help="What it must hold, as ttft_ms=300; once for each (docs/releases.md).")
    ] = None,
    mirror: Annotated[float, typer.Option(min=0, max=1, help="Share of the requests that run again on it.")] = 0.0,
    release: ReleaseFile = None,
    force: Force = False,
    why: Why = "",
    usage_address: Address = None,
) -> None:
    """Give the new version its first share: one whose release says that it was evaluated, or by --force."""
    bake = duration_pb2.Duration()
    bake.FromMilliseconds(round(bake_s * 1000))
    request = pb.StartRolloutRequest(
        alias=alias,
        candidate=to,
        baseline=baseline,
        step_percents=step or [],
        bake=bake,
        why=why,
        release=_release(release),
        force=force,
        criteria=_criteria(hold or ()),
        mirrored_share=mirror,
    )
    _print(call_routes(usage_address, lambda stub, options: stub.StartRollout(request, **options)).table, alias)


@app.command()
def promote(
    alias: Alias,
    to_percent: Annotated[int, typer.Option("--to", min=0, max=100, help="Step of at least so much.")] = 0,
    release: ReleaseFile = None,
    force: Force = False,
    why: Why = "",
    usage_address: Address = None,
) -> None:
    """Go on to the next step, or to a later one; a paused rollout goes on too.

    A rollout that was started by --force needs the version's release now, or --force again.
    """
    request = pb.PromoteRolloutRequest(alias=alias, percent=to_percent, why=why, release=_release(release), force=force)
    _print(call_routes(usage_address, lambda stub, options: stub.PromoteRollout(request, **options)).table, alias)


@app.command()
def pause(alias: Alias, why: Why = "", usage_address: Address = None) -> None:
    """Keep the shares as they are."""
    request = pb.PauseRolloutRequest(alias=alias, why=why)
    _print(call_routes(usage_address, lambda stub, options: stub.PauseRollout(request, **options)).table, alias)


@app.command()
def resume(alias: Alias, why: Why = "", usage_address: Address = None) -> None:
    """Let a paused rollout go on; its step begins again."""
    request = pb.ResumeRolloutRequest(alias=alias, why=why)
    _print(call_routes(usage_address, lambda stub, options: stub.ResumeRollout(request, **options)).table, alias)


@app.command()
def rollback(alias: Alias, why: Why = "", usage_address: Address = None) -> None:
    """Give everything to the old version and withdraw the new one, also after its last step."""
    request = pb.RollBackRolloutRequest(alias=alias, why=why)
    _print(call_routes(usage_address, lambda stub, options: stub.RollBackRollout(request, **options)).table, alias)


@app.command()
def restore(
    revision: Annotated[int, typer.Argument(min=1, help="Revision of the history.")],
    why: Why = "",
    usage_address: Address = None,
) -> None:
    """Put all routes back as they were at an earlier revision, as a new one."""
    request = pb.RestoreRoutesRequest(revision=revision, why=why)
    table = call_routes(usage_address, lambda stub, options: stub.RestoreRoutes(request, **options)).table
    print(f"Revision {table.revision} has the routes of revision {revision}.")


@app.command()
def routes(usage_address: Address = None) -> None:
    """Show every route: what each name stands for."""
    request = pb.GetRoutesRequest()
    print_routes(call_routes(usage_address, lambda stub, options: stub.GetRoutes(request, **options)).table)


@app.command()
def history(
    count: Annotated[int, typer.Option(min=1, max=100, help="Newest revisions.")] = 20, usage_address: Address = None
) -> None:
    """Show who changed the routes, when and why, newest first."""
    request = pb.ListRouteHistoryRequest(page_size=count)
    answer = call_routes(usage_address, lambda stub, options: stub.ListRouteHistory(request, **options))
    shown = Table("revision", "time", "who", "why")
    for entry in answer.revisions:
        shown.add_row(str(entry.table.revision), f"{entry.time.ToDatetime():%Y-%m-%d %H:%M:%S}", entry.actor, entry.why)
    Console(highlight=False).print(shown)


def call_routes(
    address: str | None, call: Callable[[pb_grpc.RouteServiceAsyncStub, dict[str, Any]], Awaitable[Any]]
) -> Any:
    """One call of the route service; exits with one sentence on failure."""

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> Any:
        return await call(pb_grpc.RouteServiceStub(channel), {"metadata": metadata, "timeout": TIMEOUT_S})

    return call_usage(address, work)


def print_routes(table: routes_pb2.RouteTable, alias: str = "") -> None:
    """The routes of one name or of all, with where their rollouts stand."""
    withdrawn = {_name(target) for target in table.withdrawn}
    shown = Table("name", "version", "weight", "rollout")
    for route in table.routes:
        if alias not in ("", route.alias):
            continue
        for weighted in route.targets:
            name = _name(weighted.target)
            state = _state(route) if name == _name(route.rollout.candidate) else ""
            shown.add_row(route.alias, name, "withdrawn" if name in withdrawn else str(weighted.weight), state)
    console = Console(highlight=False)
    console.print(f"revision {table.revision}", markup=False)
    console.print(shown)


def _criteria(texts: Sequence[str]) -> dict[str, float]:
    try:
        return {name: float(value) for name, _, value in (text.partition("=") for text in texts)}
    except ValueError:
        raise fail("A criterion is written as name=number.") from None


def _release(path: Path | None) -> bytes:
    return b"" if path is None else read_release(path).to_json().encode()


def _print(table: routes_pb2.RouteTable, alias: str) -> None:
    if all(route.alias != alias for route in table.routes):
        raise fail(f"There is no route of {alias}.")
    print_routes(table, alias)


def _state(route: routes_pb2.Route) -> str:
    rollout = route.rollout
    state = routes_pb2.RolloutState.Name(rollout.state).removeprefix("ROLLOUT_STATE_").lower().replace("_", " ")
    return f"{state}: {rollout.reason}" if rollout.reason else state


def _name(target: routes_pb2.RouteTarget) -> str:
    return f"{target.model}@{target.version}"
