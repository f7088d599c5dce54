"""Prices and what a request costs by them. Pure and in integers: micro-units of a currency, never floats.

A price holds for micro-units a million tokens, from a moment on. Prices are never edited: a later one with the same
start takes the place of an earlier one. Called by the rater and by tests.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from services.usage.events import Tokens

TOKEN_KINDS = ("prompt", "cached", "completion", "reasoning")
# What an hour of an accelerator costs: its price is micro-units an hour, and no request is billed by it.
ACCELERATOR_HOUR = "accelerator_hour"
# Where a part has no price of its own, it costs what its whole does.
WHOLE_OF = {"cached": "prompt", "reasoning": "completion"}
MILLION = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Price:
    """Micro-units of `currency` a million tokens of one kind (or an accelerator-hour), in [start, end).

    Empty selectors mean any.
    """

    price_id: int
    plan: str
    model: str
    version: str
    priority_class: str
    token_kind: str
    currency: str
    micros_per_million: int
    start: datetime
    end: datetime | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What is priced: who asked for what, when it ended, and what was billed."""

    plan: str
    model: str
    version: str
    priority_class: str
    end_time: datetime
    billed: Tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Amounts:
    """Micro-units by token kind, in the order of TOKEN_KINDS; the total is their sum, exactly."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Prompt, cached, completion, reasoning."""
        return (self.prompt, self.cached, self.completion, self.reasoning)

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(self.parts)

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(*(mine + its for mine, its in zip(self.parts, other.parts, strict=True)))

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(*(mine - its for mine, its in zip(self.parts, other.parts, strict=True)))


class PriceList:
    """All prices, indexed by what they select."""

    def __init__(self, prices: Iterable[Price]) -> None:
        self._prices: dict[tuple[str, str, str, str, str], list[Price]] = defaultdict(list)
        for price in prices:
            key = (price.plan, price.model, price.version, price.priority_class, price.token_kind)
            self._prices[key].append(price)
        for same in self._prices.values():
            # Newest first: of two with one start, the one that was set later.
            same.sort(key=lambda price: (price.start, price.price_id), reverse=True)

    def __bool__(self) -> bool:
        return bool(self._prices)

    def find(self, work: Work, token_kind: str) -> Price | None:
        """The price of one kind: the most specific that holds at the end of the work; the plan counts most, then the
        version, then the class."""
        for plan in dict.fromkeys((work.plan, "")):
            for version in dict.fromkeys((work.version, "")):
                for priority_class in dict.fromkeys((work.priority_class, "")):
                    for price in self._prices.get((plan, work.model, version, priority_class, token_kind), ()):
                        if price.start <= work.end_time and (price.end is None or work.end_time < price.end):
                            return price
        return None

    def rate(self, work: Work) -> Mapping[str, Amounts]:
        """What the work costs, by currency; empty where no price holds."""
        parts = _parts(work.billed)
        rates: dict[str, list[int]] = {}
        for index, kind in enumerate(TOKEN_KINDS):
            price = self.find(work, kind)
            if price is None and kind in WHOLE_OF:
                price = self.find(work, WHOLE_OF[kind])
            if price is not None:
                rates.setdefault(price.currency, [0] * len(TOKEN_KINDS))[index] = price.micros_per_million
        return {currency: amounts_of(parts, by_kind) for currency, by_kind in rates.items()}


def token_nanos(prices: Sequence[Price], plan: str, now: datetime) -> dict[str, tuple[int, int]]:
    """Nanos of the currency unit for a token of input and of output, rounded up, as budgets hold them: by `model` or
    `model@version`, with ` batch` behind it where that class costs something else. All currencies count as one."""
    listed, found = PriceList(prices), {}
    for model, version in sorted({(price.model, price.version) for price in prices}):
        name = f"{model}@{version}" if version else model

        def rates(priority_class: str, model: str = model, version: str = version) -> tuple[int, int]:
            work = Work(plan, model, version, priority_class, now, Tokens())
            each = [listed.find(work, kind) for kind in ("prompt", "completion")]
            # A micro-unit a million tokens is a thousandth of a nano a token.
            of_input, of_output = (0 if price is None else -(-price.micros_per_million // 1_000) for price in each)
            return of_input, of_output

        found[name] = rates("interactive")
        if rates("batch") != found[name]:
            found[f"{name} batch"] = rates("batch")
    return found


def amounts_of(tokens: Sequence[int], micros_per_million: Sequence[int]) -> Amounts:
    """Round so that the parts sum to the rounded whole: each part is the growth of the rounded running sum.

    The total is the exact amount to the nearest micro-unit (halves up); each part is less than one off.
    """
    parts: list[int] = []
    exact = rounded = 0
    for count, rate in zip(tokens, micros_per_million, strict=True):
        exact += count * rate
        now = (2 * exact + MILLION) // (2 * MILLION)
        parts.append(now - rounded)
        rounded = now
    return Amounts(*parts)


def _parts(billed: Tokens) -> tuple[int, int, int, int]:
    """Each token once: cached ones are no longer in the prompt, reasoning ones no longer in the completion."""
    return (billed.prompt - billed.cached, billed.cached, billed.completion - billed.reasoning, billed.reasoning)
