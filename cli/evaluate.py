"""`millrace eval`: what a served version is worth, in figures that another version's can be held against."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, TypedDict, TypeVar

import httpx
import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cli.chat import check, first_model
from cli.eval_tasks import PASSAGES, QUESTIONS, Task, tasks
from cli.stack_state import demo_key, home_dir, read_state
from cli.up import fail

# A version passes beside its baseline when it keeps all three.
PERPLEXITY_TOLERANCE = 1.015
SLICE_TOLERANCE = 0.10
LENGTH_TOLERANCE = 0.20
ANSWER_TOKENS = 64

Result = TypeVar("Result")


class Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class Choice(msgspec.Struct):
    text: str = ""
    logprobs: Logprobs | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class Answer(msgspec.Struct):
    """What is read of an answer of either endpoint."""

    choices: list[Choice]
    usage: Usage


class Slice(TypedDict):
    """Tasks of one kind: how many, and how many were answered exactly."""

    count: int
    passed: int


class Report(TypedDict):
    """What one run found; `--out` writes it, `--baseline` reads it."""

    model: str
    perplexity: float
    token_count: int
    slices: dict[str, Slice]
    mean_answer_tokens: float


def evaluate(
    model: Annotated[
        str | None, typer.Option(help="`model` or `model@version`; the first served unless given.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Report of another version to be held against.")
    ] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Where to write the report (JSON).")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Requests at a time.")] = 8,
    url: Annotated[
        str | None, typer.Option(envvar="MILLRACE_URL", help="Gateway; the local stack's unless given.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="MILLRACE_API_KEY", help="API key; the demo key unless given.")
    ] = None,
) -> None:
    """Perplexity on a fixed text, small task slices with exact scoring, and answer length.

    Exits with 1 when a figure is worse than the baseline's by more than its tolerance: perplexity by 1.5 %, a slice by
    a tenth of its tasks, answer length by a fifth.
    """
    state = read_state(home_dir())
    url = url or (state.url if state else None)
    if url is None:
        raise fail("No stack is running: start one with `millrace up`, or name a gateway with --url.")
    key = key or demo_key(home_dir()) or ""
    known = _read(baseline) if baseline is not None else None
    if model is None:
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}) as client:
            model = first_model(client)
    try:
        report = asyncio.run(_run(url, key, model, concurrency))
    except httpx.HTTPError as error:
        raise fail(f"The gateway at {url} does not answer: {error}") from error
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    problems = [] if known is None else regressions(report, known)
    Console().print(_table(report, known))
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(1)


def regressions(report: Report, baseline: Report) -> list[str]:
    """One sentence a figure that is worse than the baseline's by more than its tolerance."""
    found = []
    ratio = report["perplexity"] / baseline["perplexity"]
    if not ratio <= PERPLEXITY_TOLERANCE:
        found.append(f"Perplexity is {ratio:.4f} times the baseline's; at most {PERPLEXITY_TOLERANCE} is allowed.")
    for name, before in baseline["slices"].items():
        now = report["slices"].get(name)
        if now is None or now["count"] != before["count"]:
            found.append(f"The slice {name} has other tasks than the baseline's.")
        elif before["passed"] - now["passed"] > SLICE_TOLERANCE * before["count"]:
            found.append(f"The slice {name} fell from {before['passed']} to {now['passed']} of {before['count']}.")
    change = report["mean_answer_tokens"] / max(baseline["mean_answer_tokens"], 1.0) - 1.0
    if abs(change) > LENGTH_TOLERANCE:
        found.append(f"Answers are {change:+.0%} longer than the baseline's; {LENGTH_TOLERANCE:.0%} is allowed.")
    return found


async def _run(url: str, key: str, model: str, concurrency: int) -> Report:
    jobs = tasks()
    slots = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=600) as client:
        with Progress(transient=True) as progress:
            bar = progress.add_task(f"Evaluating {model}", total=len(PASSAGES) + len(jobs) + len(QUESTIONS))

            async def step(work: Coroutine[None, None, Result]) -> Result:
                async with slots:
                    result = await work
                progress.advance(bar)
                return result

            async with asyncio.TaskGroup() as group:
                predicted = [group.create_task(step(_logprobs(client, model, text))) for text in PASSAGES]
                solved = [group.create_task(step(_solve(client, model, job))) for job in jobs]
                lengths = [group.create_task(step(_length(client, model, text))) for text in QUESTIONS]
    logprobs = [value for task in predicted for value in task.result()]
    slices: dict[str, Slice] = {}
    for job, outcome in zip(jobs, solved, strict=True):
        entry = slices.setdefault(job.slice, Slice(count=0, passed=0))
        entry["count"] += 1
        entry["passed"] += outcome.result()
    return Report(
        model=model,
        perplexity=math.exp(-sum(logprobs) / len(logprobs)),
        token_count=len(logprobs),
        slices=slices,
        mean_answer_tokens=sum(task.result() for task in lengths) / len(lengths),
    )


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, object]) -> Answer:
    response = await client.post(path, json=body | {"temperature": 0})
    check(response)
    return msgspec.json.decode(response.content, type=Answer)


async def _logprobs(client: httpx.AsyncClient, model: str, text: str) -> list[float]:
    """Of every token of `text` but the first, as the model saw it."""
    body = {"model": model, "prompt": text, "max_tokens": 1, "echo": True, "logprobs": 0}
    answer = await _post(client, "/v1/completions", body)
    values = answer.choices[0].logprobs
    if values is None:
        raise fail(f"{model} gives no logprobs for its prompt.")
    return [value for value in values.token_logprobs[: answer.usage.prompt_tokens] if value is not None]


async def _solve(client: httpx.AsyncClient, model: str, job: Task) -> bool:
    answer = await _post(
        client, "/v1/completions", {"model": model, "prompt": job.prompt, "max_tokens": job.max_tokens}
    )
    return job.passes(answer.choices[0].text)


async def _length(client: httpx.AsyncClient, model: str, question: str) -> int:
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS}
    return (await _post(client, "/v1/chat/completions", body)).usage.completion_tokens


def _read(path: Path) -> Report:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except msgspec.DecodeError as error:
        raise fail(f"{path} is not a report of `millrace eval`: {error}") from error


def _table(report: Report, baseline: Report | None) -> Table:
    table = Table("figure", report["model"], *([baseline["model"]] if baseline else []))

    def row(name: str, text: Callable[[Report], str]) -> None:
        table.add_row(name, text(report), *([text(baseline)] if baseline else []))

    row(f"perplexity of {report['token_count']} tokens", lambda r: f"{r['perplexity']:.4f}")
    for name in report["slices"]:
        row(name, lambda r, name=name: _passed(r["slices"].get(name)))  # type: ignore[misc]
    row("tokens an answer", lambda r: f"{r['mean_answer_tokens']:.1f}")
    return table


def _passed(found: Slice | None) -> str:
    return "-" if found is None else f"{found['passed']} of {found['count']}"
