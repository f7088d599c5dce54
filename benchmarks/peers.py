"""Millrace beside other servers in one sitting: the same four fixed shapes, in turns, the work new in every repeat.

`python -m benchmarks.peers --millrace URL --key K --peer NAME=URL …` prints ratios against the best peer and writes
`benchmarks/results/peers.json` and `peers.svg`. Every server gets the same prompts within a repeat; the order turns.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import secrets
import statistics
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.results import RESULTS, machine, save
from cli.bench import Run, Server, find_server, run_once, warm_up
from cli.bench_client import Load, open_client
from cli.bench_load import Lengths, Shape, Summary, Targets, make_jobs, summarise
from cli.svg_chart import Series, bar_chart

OURS = "millrace"


@dataclasses.dataclass(frozen=True, slots=True)
class FixedShape:
    """A closed loop of `requests`, `concurrency` at a time."""

    requests: int
    concurrency: int
    shape: Shape


def _fixed(requests: int, concurrency: int, prompt_words: int, output_tokens: int, shared_words: int = 0) -> FixedShape:
    lengths = (Lengths(prompt_words, prompt_words), Lengths(output_tokens, output_tokens))
    return FixedShape(requests, concurrency, Shape(*lengths, shared_words))


SHAPES = {
    "single": _fixed(4, 1, 100, 64),
    "chat": _fixed(64, 16, 100, 64),
    "prefix": _fixed(32, 8, 20, 32, shared_words=900),
    "long": _fixed(8, 4, 1200, 16),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One server's repeats of one shape: output tokens a second (best and median), median TTFT in ms.

    Ratios are of medians against the best peer's; above 1 is better than every peer. None without a peer.
    """

    shape: str
    server: str
    best_tokens_per_s: float
    median_tokens_per_s: float
    median_ttft_ms: float | None
    throughput_ratio: float | None
    ttft_ratio: float | None
    failed: int
    repeats: Sequence[dict[str, object]]


async def measure(server: Server, fixed: FixedShape, seed: int) -> Summary:
    """One run of one shape after a warm-up request."""
    jobs = make_jobs(fixed.shape, fixed.requests, seed=seed)
    async with open_client(server.url, server.key) as client:
        load = Load(client, server.model)
        await warm_up(load, server, seed)
        return summarise(await run_once(load, Run(jobs, concurrency=fixed.concurrency)), Targets())


def measure_all(
    servers: dict[str, Server], shapes: Sequence[str], *, repeats: int, seed: int
) -> dict[tuple[str, str], list[Summary]]:
    """Summaries by (shape, server): in each repeat every server once, beginning with another one than before."""
    found: dict[tuple[str, str], list[Summary]] = {}
    names = list(servers)
    for shape in shapes:
        for repeat in range(repeats):
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                summary = asyncio.run(measure(servers[name], SHAPES[shape], seed + repeat))
                found.setdefault((shape, name), []).append(summary)
                print(f"{shape} {name}: {summary.output_tokens_per_s} tokens/s, {summary.completed} done", flush=True)
    return found


def compare(found: dict[tuple[str, str], list[Summary]]) -> list[Result]:
    """Best and median of every server, and its ratios against the best peer of the shape."""
    speeds = {at: statistics.median(each.output_tokens_per_s for each in runs) for at, runs in found.items()}
    first = {at: _median_ttft(runs) for at, runs in found.items()}
    results = []
    for (shape, name), runs in found.items():
        peers = [at for at in found if at[0] == shape and at[1] != OURS]
        fastest = max((speeds[at] for at in peers), default=None)
        soonest = min((value for at in peers if (value := first[at]) is not None), default=None)
        mine, speed = first[shape, name], speeds[shape, name]
        results.append(
            Result(
                shape=shape,
                server=name,
                best_tokens_per_s=max(each.output_tokens_per_s for each in runs),
                median_tokens_per_s=round(speed, 1),
                median_ttft_ms=None if mine is None else round(mine * 1000, 1),
                throughput_ratio=round(speed / fastest, 3) if fastest else None,
                ttft_ratio=round(soonest / mine, 3) if soonest and mine else None,
                failed=sum(each.requests - each.completed for each in runs),
                repeats=[dataclasses.asdict(each) for each in runs],
            )
        )
    return results


def _median_ttft(runs: Sequence[Summary]) -> float | None:
    values = [each.ttft_s.p50 for each in runs if each.ttft_s.p50 is not None]
    return statistics.median(values) if values else None


def table(results: Sequence[Result]) -> Table:
    """What is printed."""
    made = Table(title="Output tokens/s and TTFT; ratios against the best peer, above 1 is better")
    made.add_column("shape")
    made.add_column("server")
    for name in ("best tok/s", "median tok/s", "ratio", "TTFT p50 ms", "ratio", "not done"):
        made.add_column(name, justify="right")
    for each in results:
        figures = (each.best_tokens_per_s, each.median_tokens_per_s, each.throughput_ratio)
        figures += (each.median_ttft_ms, each.ttft_ratio, each.failed)
        made.add_row(each.shape, each.server, *("-" if figure is None else f"{figure:g}" for figure in figures))
    return made


def chart(results: Sequence[Result]) -> str:
    """Median tokens a second by shape, a bar each server."""
    shapes, names = (
        list(dict.fromkeys(values)) for values in zip(*((r.shape, r.server) for r in results), strict=True)
    )
    speed = {(each.shape, each.server): round(each.median_tokens_per_s) for each in results}
    series = [Series(name, tuple(speed[shape, name] for shape in shapes)) for name in names]
    return bar_chart("Output tokens a second", shapes, series)


def _named(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not (name and value) or name == OURS:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, with another name than {OURS}")
    return name, value


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millrace", metavar="URL", help="the gateway; the local stack's unless given")
    parser.add_argument("--key", help="API key of the gateway; the local stack's demo key unless given")
    parser.add_argument("--peer", type=_named, action="append", default=[], metavar="NAME=URL", help="repeat it")
    parser.add_argument("--peer-key", type=_named, action="append", default=[], metavar="NAME=KEY", help="where needed")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="random unless given")
    parser.add_argument("--json", type=Path, default=RESULTS / "peers.json", help="the plot lies beside it")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats is at least 1")
    keys = dict(arguments.peer_key)
    try:
        servers = {OURS: find_server(arguments.millrace, arguments.key, None)}
        servers |= {name: find_server(url, keys.get(name), None) for name, url in arguments.peer}
        found = measure_all(servers, arguments.shapes, repeats=arguments.repeats, seed=arguments.seed)
    except typer.Exit as problem:
        raise SystemExit(problem.exit_code) from None
    results = compare(found)
    Console().print(table(results))
    config = {"repeats": arguments.repeats, "seed": arguments.seed, "load_after": machine()["load"]}
    config["models"] = {name: server.model for name, server in servers.items()}
    print(save("peers", config, [dataclasses.asdict(each) for each in results], arguments.json))
    arguments.json.with_suffix(".svg").write_text(chart(results), encoding="utf-8")


if __name__ == "__main__":
    main()
