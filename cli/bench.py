"""`millrace bench`: load for a server, open-loop unless asked otherwise, and how much of it was served in time."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cli.bench_client import Load, open_client
from cli.bench_load import (
    Ending,
    Job,
    Lengths,
    Outcome,
    Percentiles,
    Shape,
    Summary,
    Targets,
    holds,
    knee,
    make_jobs,
    ramp_rates,
    summarise,
    trace_jobs,
    warm_up_job,
)
from cli.chat import first_model
from cli.stack_state import demo_key, home_dir, read_state
from cli.svg_chart import Series, bar_chart
from cli.up import fail

DEFAULT_RATE = 1.0

LENGTHS = "N, uniform:LOW:HIGH or lognormal:MEAN[:SIGMA]"
ModelOption = Annotated[str | None, typer.Option(help="Model; the first that is served unless given.")]
UrlOption = Annotated[
    str | None, typer.Option(envvar="MILLRACE_URL", help="OpenAI-compatible server; the local stack unless given.")
]
KeyOption = Annotated[
    str | None, typer.Option(envvar="MILLRACE_API_KEY", help="API key; the local stack's demo key unless given.")
]
RateOption = Annotated[float | None, typer.Option(min=0.001, help="Open loop: Poisson arrivals a second (default 1).")]
RampOption = Annotated[
    str | None, typer.Option(metavar="FIRST:LAST:STEP", help="Open loop at rising rates, to the knee of goodput.")
]
ConcurrencyOption = Annotated[int | None, typer.Option(min=1, help="Closed loop: so many requests at a time.")]
TraceOption = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Open loop from JSON lines: timestamp (ms), *_length[, hash_ids]."),
]
RequestsOption = Annotated[int, typer.Option(min=1, help="Requests, of each rate of a ramp.")]
PromptOption = Annotated[str, typer.Option(metavar="LENGTHS", help=f"Words of a prompt: {LENGTHS}.")]
OutputOption = Annotated[str, typer.Option(metavar="LENGTHS", help=f"Tokens of an answer: {LENGTHS}.")]
SharedOption = Annotated[int, typer.Option(min=0, help="Words that begin every prompt, besides its own.")]
TtftOption = Annotated[float, typer.Option(min=0, help="Target for the first token, from when it was due; 0 for none.")]
TpotOption = Annotated[float, typer.Option(min=0, help="Target for each further token, in the mean; 0 for none.")]
E2EOption = Annotated[float, typer.Option(min=0, help="Target for the whole answer; 0 for none.")]
SeedOption = Annotated[int | None, typer.Option(min=0, help="The same seed makes the same load; random unless given.")]
OutOption = Annotated[Path | None, typer.Option(dir_okay=False, help="Where to write the report (JSON).")]
PlotOption = Annotated[Path | None, typer.Option(dir_okay=False, help="Where to draw goodput by rate (SVG).")]


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """Whom to load."""

    url: str
    key: str
    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run of a bench: its jobs and how they arrive. `concurrency` None is an open loop."""

    jobs: Sequence[Job]
    rate: float | None = None
    concurrency: int | None = None


def bench(
    url: UrlOption = None,
    key: KeyOption = None,
    model: ModelOption = None,
    rate: RateOption = None,
    ramp: RampOption = None,
    concurrency: ConcurrencyOption = None,
    trace: TraceOption = None,
    requests: RequestsOption = 64,
    prompt_words: PromptOption = "lognormal:100",
    output_tokens: OutputOption = "lognormal:64",
    shared_prefix: SharedOption = 0,
    ttft_target_ms: TtftOption = 2000.0,
    tpot_target_ms: TpotOption = 200.0,
    e2e_target_s: E2EOption = 0.0,
    seed: SeedOption = None,
    out: OutOption = None,
    plot: PlotOption = None,
) -> None:
    """Load a server with streaming completions; report the goodput: what was answered within every target.

    Requests arrive whether or not earlier ones are done, and latency counts from when they were due. A ramp stops at
    the first rate with a goodput below 95 %. Nothing is retried: refused (429, 503) and failed requests miss.
    """
    if sum(each is not None for each in (rate, ramp, concurrency, trace)) > 1:
        raise fail("Give one of --rate, --ramp, --concurrency and --trace.")
    for path in (out, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise fail(f"The folder of {path} does not exist.")
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    targets = Targets(ttft_target_ms or None, tpot_target_ms or None, e2e_target_s or None)
    try:
        shape = Shape(Lengths.parse(prompt_words), Lengths.parse(output_tokens), shared_prefix)
        if trace is not None:
            runs = [Run(trace_jobs(trace.read_text(encoding="utf-8").splitlines(), seed=seed))]
        elif concurrency is not None:
            runs = [Run(make_jobs(shape, requests, seed=seed), concurrency=concurrency)]
        else:
            rates = ramp_rates(ramp) if ramp is not None else [DEFAULT_RATE if rate is None else rate]
            # Each rate has prompts of its own, or the prefix cache would serve all but the first.
            runs = [Run(make_jobs(shape, requests, seed=seed + i, rate=r), rate=r) for i, r in enumerate(rates)]
    except ValueError as error:
        raise fail(str(error) if trace is None else f"{trace}: {error}") from error
    server = find_server(url, key, model)
    summaries = asyncio.run(_run_all(server, runs, targets, seed))
    _show(summaries, targets)
    if ramp is not None:
        found = knee(summaries)
        print("No rate holds 95 % goodput." if found is None else f"Knee: {found.rate:g} requests/s hold 95 % goodput.")
    if out is not None:
        load = {"requests": requests, "prompt_words": prompt_words, "output_tokens": output_tokens}
        load |= {"shared_words": shared_prefix, "trace": str(trace or ""), "concurrency": concurrency, "seed": seed}
        out.write_text(_report(server, load, targets, summaries), encoding="utf-8")
    if plot is not None:
        plot.write_text(_plot(summaries), encoding="utf-8")


def find_server(url: str | None, key: str | None, model: str | None) -> Server:
    """The server named, else the local stack; the first model it serves unless one is named. Fails with a sentence."""
    if url is None:
        state = read_state(home_dir())
        if state is None:
            raise fail("No stack is running: start one with `millrace up`, or name a server with --url.")
        url, key = state.url, key or demo_key(home_dir())
    url, key = url.rstrip("/").removesuffix("/v1"), key or ""
    try:
        if model is None:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
                model = first_model(client)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise fail(f"The server at {url} does not answer: {error}") from error
    return Server(url, key, model)


async def warm_up(load: Load, server: Server, seed: int) -> None:
    """One request that is not counted; fails with the server's sentence when it is not answered."""
    first = await load.send(warm_up_job(seed))
    if first.ending is not Ending.COMPLETED:
        raise fail(f"The first request to {server.url} {first.ending.value}: {first.error}")


async def run_once(load: Load, run: Run) -> Sequence[Outcome]:
    """Send the jobs of one run."""
    if run.concurrency is not None:
        return await load.closed_loop(run.jobs, concurrency=run.concurrency)
    return await load.open_loop(run.jobs)


async def _run_all(server: Server, runs: Sequence[Run], targets: Targets, seed: int) -> list[Summary]:
    summaries: list[Summary] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        async with open_client(server.url, server.key) as client:
            await warm_up(Load(client, server.model), server, seed)
            for run in runs:
                bar = progress.add_task(_name(run), total=len(run.jobs))
                outcomes = await run_once(Load(client, server.model, functools.partial(progress.advance, bar)), run)
                summaries.append(summarise(outcomes, targets, rate=run.rate))
                if not holds(summaries[-1]):
                    break
    return summaries


def _name(run: Run) -> str:
    if run.rate is not None:
        return f"{run.rate:g} requests/s"
    return "trace" if run.concurrency is None else f"{run.concurrency} at a time"


def _show(summaries: Sequence[Summary], targets: Targets) -> None:
    console = Console(emoji=False)
    console.print(_goodput_table(summaries, targets))
    console.print(_latency_table(summaries))
    for each in summaries:
        if each.estimated:
            console.print(
                f"{each.estimated} answers carried no usage: their tokens are chunks counted, prompts unknown."
            )
        for message, count in each.errors.items():
            console.print(f"{count} x {message}", markup=False, highlight=False)


def _goodput_table(summaries: Sequence[Summary], targets: Targets) -> Table:
    asked = [f"TTFT ≤ {targets.ttft_ms:g} ms"] if targets.ttft_ms is not None else []
    asked += [f"TPOT ≤ {targets.tpot_ms:g} ms"] if targets.tpot_ms is not None else []
    asked += [f"E2E ≤ {targets.e2e_s:g} s"] if targets.e2e_s is not None else []
    table = Table(title=f"Goodput: {', '.join(asked) or 'completed'}", padding=0)
    for name in (
        "offered/s",
        "goodput",
        "goodput/s",
        "done",
        "refused",
        "failed",
        "out tok/s",
        "in tok/s",
        "cached in",
    ):
        table.add_column(name, justify="right")
    for each in summaries:
        table.add_row(
            "-" if each.rate is None else f"{each.rate:g}",
            f"{each.goodput_share:.1%}",
            f"{each.goodput_per_s:.2f}",
            *(str(count) for count in (each.completed, each.refused, each.failed)),
            f"{each.output_tokens_per_s:.1f}",
            f"{each.input_tokens_per_s:.1f}",
            str(each.cached_tokens),
        )
    return table


def _latency_table(summaries: Sequence[Summary]) -> Table:
    table = Table(title="Latency in ms: p50 / p95 / p99")
    for name in ("offered/s", "TTFT", "TPOT", "ITL", "E2E"):
        table.add_column(name, justify="right")
    for each in summaries:
        figures = (each.ttft_s, each.tpot_s, each.itl_s, each.e2e_s)
        table.add_row("-" if each.rate is None else f"{each.rate:g}", *(_ms(figure) for figure in figures))
    return table


def _ms(figure: Percentiles) -> str:
    return " / ".join("-" if v is None else f"{v * 1000:.0f}" for v in (figure.p50, figure.p95, figure.p99))


def _report(server: Server, load: dict[str, object], targets: Targets, summaries: Sequence[Summary]) -> str:
    found = knee(each for each in summaries if each.rate is not None)
    report = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": server.url,
        "model": server.model,
        "load": load,
        "targets": dataclasses.asdict(targets),
        "knee_rate": None if found is None else found.rate,
        "results": [dataclasses.asdict(each) for each in summaries],
    }
    return json.dumps(report, indent=2) + "\n"


def _plot(summaries: Sequence[Summary]) -> str:
    labels = ["all" if each.rate is None else f"{each.rate:g}/s" for each in summaries]
    good = Series("goodput, % of requests", tuple(round(each.goodput_share * 100) for each in summaries))
    return bar_chart("Goodput by requests offered", labels, [good])
