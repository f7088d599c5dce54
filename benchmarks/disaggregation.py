"""Do long prompts hold up running chats less when another worker prefills them? Two worker processes either way.

`python -m benchmarks.disaggregation` starts a stack of two aggregated workers, then one of a prefill and a decode
worker, each with the embedded model: gaps between the tokens of running chats while prompts of about 1,200 tokens
arrive, and what such a prompt waits for its first token when nothing runs. `--peer NAME=URL` measures a running server
of the same weights in the same sitting, with the same client; it idles while the stacks run. Writes
`benchmarks/results/disaggregation.json`; takes about two minutes a layout on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import httpx

from benchmarks.results import save
from tests.helpers.stack import running_stack

LAYOUTS = {"aggregated": ("--workers", "2"), "disaggregated": ("--prefill", "1", "--decode", "1")}
WORDS = ("river", "stone", "wheel", "gate", "field", "grain", "water", "mill", "road", "bridge", "market", "winter")


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """`chats` streams of `chat_tokens` run while `prompts` of `prompt_words` arrive, one each `prompt_every_s`."""

    chats: int = 4
    chat_tokens: int = 400
    prompts: int = 8
    prompt_words: int = 1_150
    prompt_every_s: float = 3.0
    idle_prompts: int = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds. Gaps are between chunks of running chats, from the first long prompt to the end of the last."""

    layout: str
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    long_ttft_p50_ms: float
    idle_ttft_p50_ms: float
    gaps: int


@contextlib.contextmanager
def _stack_of(model: str, layout: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Address and headers of a stack in a home of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder,
        running_stack(Path(folder) / "home", "--model", model, *LAYOUTS[layout]) as stack,
    ):
        yield stack.url, stack.headers


def _prompt(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def chunk_times(client: httpx.AsyncClient, model: str, prompt: str, tokens: int) -> AsyncIterator[float]:
    """When each chunk of an answer came. Raises RuntimeError when there is no answer."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            raise RuntimeError((await response.aread())[:200].decode(errors="replace"))
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if '"error"' in line[:20]:
                    raise RuntimeError(line[:200])
                yield time.perf_counter()


async def _first_token_s(client: httpx.AsyncClient, model: str, prompt: str) -> float:
    start = time.perf_counter()
    times = [at async for at in chunk_times(client, model, prompt, 2)]
    return times[0] - start


async def measure(layout: str, url: str, headers: Mapping[str, str], load: Load) -> Result:
    """One server of the OpenAI API that serves one model."""
    rng = random.Random(7)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        await _first_token_s(client, name, _prompt(rng, load.prompt_words))
        idle = [await _first_token_s(client, name, _prompt(rng, load.prompt_words)) for _ in range(load.idle_prompts)]
        gaps, firsts = await _under_prompts(client, name, load, rng)
    cuts = statistics.quantiles(gaps, n=100)
    numbers = (cuts[49], cuts[98], max(gaps), statistics.median(firsts), statistics.median(idle))
    return Result(layout, *(round(seconds * 1_000, 1) for seconds in numbers), len(gaps))


async def _under_prompts(
    client: httpx.AsyncClient, model: str, load: Load, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Gaps of the chats and first tokens of the long prompts, in seconds."""
    gaps: list[float] = []
    arriving = asyncio.Event()
    over = asyncio.Event()

    async def chat(number: int) -> None:
        while not over.is_set():
            last: float | None = None
            async for at in chunk_times(client, model, f"Chat {number}: {_prompt(rng, 20)}", load.chat_tokens):
                if last is not None and arriving.is_set() and not over.is_set():
                    gaps.append(at - last)
                last = at
                if over.is_set():
                    return

    chats = [asyncio.create_task(chat(number)) for number in range(load.chats)]
    await asyncio.sleep(2.0)
    arriving.set()
    prompts = []
    for _ in range(load.prompts):
        prompts.append(asyncio.create_task(_first_token_s(client, model, _prompt(rng, load.prompt_words))))
        await asyncio.sleep(load.prompt_every_s)
    firsts = await asyncio.gather(*prompts)
    over.set()
    await asyncio.gather(*chats)
    return gaps, firsts


def main() -> None:
    """Measure peers and both layouts, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="another server, running")
    parser.add_argument("--out", type=Path, default=None, help="JSON file; default benchmarks/results")
    for field in dataclasses.fields(Load):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args())
    model, out, peers = given.pop("model"), given.pop("out"), given.pop("peer")
    load = Load(**given)
    results: list[dict[str, object]] = []

    def take(layout: str, url: str, headers: Mapping[str, str]) -> None:
        results.append(dataclasses.asdict(asyncio.run(measure(layout, url, headers, load))))
        print(results[-1], flush=True)

    for name, _, url in (peer.partition("=") for peer in peers):
        take(name, url, {})
    for layout in LAYOUTS:
        with _stack_of(model, layout) as (url, headers):
            take(layout, url, headers)
    print(save("disaggregation", {"model": model, **dataclasses.asdict(load)}, results, out))


if __name__ == "__main__":
    main()
