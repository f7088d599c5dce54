"""What a load test sends and what its answers are worth: lengths, arrivals, traces, goodput, the knee.

Pure: no clock, no network. `bench_client` sends, `bench` and `benchmarks.peers` report. All times are seconds since the
start of the run; latency counts from when a request was due, so a client or server that falls behind hides nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence

GOODPUT_SHARE = 0.95
MAX_RATES = 100
# Words of a trace's prompt that one entry of its `hash_ids` stands for, as in Mooncake's traces.
TRACE_BLOCK = 512
WARM_UP_WORDS, WARM_UP_TOKENS = 30, 8
# One token each for most vocabularies, so that words are close to tokens.
_TEXT = """the of and to in a is that for it as was with be by on not he his but at are this have from or had an they
which one you were her all she there would their we him been has when who will more no if out so said what up its about
into than them can only other new some could time these two may then do first any my now such like our over man me even
most made after also did many before must through back years where much your way well down should because each just
those people how too little state good very make world still own see men work long get here between both life being"""
WORDS = tuple(_TEXT.split())


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers from 1 on: `low` to `high` evenly, or lognormal around the mean `low`."""

    low: int
    high: int
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`100`, `uniform:50:150`, `lognormal:100` or `lognormal:100:0.5` (sigma, 0.8 unless given).

        Raises ValueError with a sentence.
        """
        kind, *rest = text.split(":") if ":" in text else ("fixed", text)
        try:
            if kind == "uniform" and len(rest) == 2:
                made = cls(int(rest[0]), int(rest[1]))
            elif kind == "lognormal" and len(rest) in (1, 2):
                made = cls(int(rest[0]), int(rest[0]), float(rest[1]) if len(rest) == 2 else 0.8)
            elif kind == "fixed":
                made = cls(int(rest[0]), int(rest[0]))
            else:
                raise ValueError
        except ValueError:
            raise ValueError(f"{text!r} is none of N, uniform:A:B, lognormal:MEAN[:SIGMA]") from None
        if not (1 <= made.low <= made.high and 0 <= made.sigma <= 4):
            raise ValueError(f"{text!r}: lengths start at 1, A is not above B, SIGMA is from 0 to 4")
        return made

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.sigma:
            return max(1, round(self.low * rng.lognormvariate(-self.sigma * self.sigma / 2, self.sigma)))
        return rng.randint(self.low, self.high)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One completion to ask for. `due_s` is not heeded in a closed loop."""

    prompt: str
    max_tokens: int
    due_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What requests look like: `shared_words` begin every prompt, `prompt_words` of its own follow."""

    prompt_words: Lengths
    output_tokens: Lengths
    shared_words: int = 0


def seeded(seed: int | str) -> random.Random:
    """Equal seeds give equal loads."""
    return random.Random(seed)  # noqa: S311 - no secret


def words(rng: random.Random, count: int) -> str:
    """`count` random words."""
    return " ".join(rng.choices(WORDS, k=count))


def make_jobs(shape: Shape, count: int, *, seed: int, rate: float | None = None) -> list[Job]:
    """The same seed makes the same work. With `rate` (a second) arrivals are Poisson, else all are due at once."""
    rng, due = seeded(seed), 0.0
    shared = words(rng, shape.shared_words) + " " if shape.shared_words else ""
    jobs = []
    for _ in range(count):
        due += rng.expovariate(rate) if rate is not None else 0.0
        jobs.append(Job(shared + words(rng, shape.prompt_words.draw(rng)), shape.output_tokens.draw(rng), due))
    return jobs


def warm_up_job(seed: int) -> Job:
    """A short request that pays for what only the first one pays, and shares nothing with the rest."""
    return Job(words(seeded(f"{seed}/warm-up"), WARM_UP_WORDS), WARM_UP_TOKENS)


def trace_jobs(lines: Iterable[str], *, seed: int) -> list[Job]:
    """Jobs of a trace in Mooncake's format: JSON lines of `timestamp` (ms), `input_length`, `output_length`.

    With `hash_ids` prompts of equal ids begin with equal text, 512 words an id.
    The first is due at once. Raises ValueError with line and reason.
    """
    rng, jobs = seeded(seed), []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            due, length, output = float(entry["timestamp"]) / 1000, int(entry["input_length"]), entry["output_length"]
            blocks = [words(seeded(f"{seed}/{each}"), TRACE_BLOCK) for each in entry.get("hash_ids", ())]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"line {number} is no object with timestamp, input_length and output_length") from None
        if not (0 <= due < math.inf and length >= 1 and isinstance(output, int) and output >= 1):
            raise ValueError(f"line {number}: a timestamp is not negative, lengths are at least 1")
        known = " ".join(blocks).split()[:length]
        jobs.append(Job(" ".join([*known, *rng.choices(WORDS, k=length - len(known))]), output, due))
    if not jobs:
        raise ValueError("it has no entries")
    start = min(job.due_s for job in jobs)
    jobs = [dataclasses.replace(job, due_s=job.due_s - start) for job in jobs]
    return sorted(jobs, key=lambda job: job.due_s)


def ramp_rates(text: str) -> list[float]:
    """`A:B:step` → A, A + step … up to B. Raises ValueError with a sentence."""
    try:
        first, last, step = (float(part) for part in text.split(":"))
    except ValueError:
        raise ValueError(f"{text!r} is not A:B:STEP") from None
    if not (0 < first <= last < math.inf and 0 < step < math.inf and (last - first) / step < MAX_RATES):
        raise ValueError(f"{text!r}: rates and step are above 0, A is not above B, at most {MAX_RATES} rates")
    return [round(first + step * place, 6) for place in range(int((last - first) / step + 1e-9) + 1)]


class Ending(enum.Enum):
    """How a request ended. REFUSED is 429 or 503: the server said that it is full."""

    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it. `gaps_s` lie between chunks with text, the first of which came at `first_s`.

    Token counts are the server's usage; `is_estimated`: it sent none, so chunks with text are counted.
    """

    due_s: float
    sent_s: float
    first_s: float
    end_s: float
    ending: Ending
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    is_estimated: bool = False
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Seconds an output token after the first."""
        return sum(self.gaps_s) / max(1, self.completion_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s


@dataclasses.dataclass(frozen=True, slots=True)
class Targets:
    """What a request must meet to count; None asks nothing. The defaults are MLPerf's for a chat of 70B parameters."""

    ttft_ms: float | None = 2000.0
    tpot_ms: float | None = 200.0
    e2e_s: float | None = None

    def met_by(self, outcome: Outcome) -> bool:
        """Whether it completed within every target."""
        return (
            outcome.ending is Ending.COMPLETED
            and (self.ttft_ms is None or outcome.ttft_s * 1000 <= self.ttft_ms)
            and (self.tpot_ms is None or outcome.tpot_s * 1000 <= self.tpot_ms)
            and (self.e2e_s is None or outcome.e2e_s <= self.e2e_s)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Percentiles:
    """Nearest rank; all None of nothing."""

    p50: float | None
    p95: float | None
    p99: float | None


def percentiles(values: Iterable[float]) -> Percentiles:
    """Each is a value that occurred: the smallest that is not below its share of all."""
    ordered = sorted(values)
    if not ordered:
        return Percentiles(None, None, None)
    p50, p95, p99 = (round(ordered[math.ceil(len(ordered) * part / 100) - 1], 5) for part in (50, 95, 99))
    return Percentiles(p50, p95, p99)


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """One run. `goodput_share` is of all requests sent: refused and failed ones missed. Latencies: completed ones'.

    `rate`: offered requests a second, None in a closed loop. `max_lag_s`: how late the client itself sent.
    """

    rate: float | None
    requests: int
    completed: int
    refused: int
    failed: int
    estimated: int
    wall_s: float
    goodput_share: float
    goodput_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    max_lag_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    itl_s: Percentiles
    e2e_s: Percentiles
    errors: dict[str, int]


def summarise(outcomes: Sequence[Outcome], targets: Targets, *, rate: float | None = None) -> Summary:
    """Figures of at least one outcome."""
    good = [each for each in outcomes if each.ending is Ending.COMPLETED]
    endings = Counter(each.ending for each in outcomes)
    wall = max(each.end_s for each in outcomes)
    met = sum(targets.met_by(each) for each in outcomes)
    tokens_in, tokens_out = sum(each.prompt_tokens for each in good), sum(each.completion_tokens for each in good)
    return Summary(
        rate=rate,
        requests=len(outcomes),
        completed=len(good),
        refused=endings[Ending.REFUSED],
        failed=endings[Ending.FAILED],
        estimated=sum(each.is_estimated for each in good),
        wall_s=round(wall, 3),
        goodput_share=met / len(outcomes),
        goodput_per_s=round(met / wall, 3),
        input_tokens_per_s=round(tokens_in / wall, 1),
        output_tokens_per_s=round(tokens_out / wall, 1),
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        cached_tokens=sum(each.cached_tokens for each in good),
        max_lag_s=round(max(each.sent_s - each.due_s for each in outcomes), 4),
        ttft_s=percentiles(each.ttft_s for each in good),
        tpot_s=percentiles(each.tpot_s for each in good if each.completion_tokens > 1),
        itl_s=percentiles(gap for each in good for gap in each.gaps_s),
        e2e_s=percentiles(each.e2e_s for each in good),
        errors=dict(Counter(each.error for each in outcomes if each.error).most_common(5)),
    )


def holds(summary: Summary) -> bool:
    """Whether goodput is 95 % or more."""
    return summary.goodput_share >= GOODPUT_SHARE


def knee(summaries: Iterable[Summary]) -> Summary | None:
    """The highest rate up to which every rate of the ramp holds; None when not even the first does."""
    best = None
    for each in sorted(summaries, key=lambda summary: summary.rate or 0.0):
        if not holds(each):
            break
        best = each
    return best
