"""Money: whole micro-units, parts that sum to the whole, prices that hold exactly from their start to their end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.usage.events import Tokens
from services.usage.prices import TOKEN_KINDS, Amounts, Price, PriceList, Work, amounts_of

START = datetime(2026, 3, 1, tzinfo=UTC)
TICK = timedelta(microseconds=1)
counts = st.integers(0, 2**31 - 1)
rates = st.integers(0, 10**15)


def price(kind: str, rate: int, *, number: int = 1, start: datetime = START, **fields: object) -> Price:
    chosen = {"plan": "", "model": "m", "version": "", "priority_class": "", "currency": "USD", "end": None} | fields
    return Price(price_id=number, token_kind=kind, micros_per_million=rate, start=start, **chosen)  # type: ignore[arg-type]


def work(billed: Tokens, *, plan: str = "", version: str = "1", end: datetime = START) -> Work:
    return Work(plan, "m", version, "interactive", end, billed)


@settings(deadline=None)
@given(st.lists(st.tuples(counts, rates), min_size=4, max_size=4))
@example([(1, 500_000)] * 4)
@example([(1, 499_999)] * 4)
def test_parts_sum_to_the_exact_total_to_the_nearest_micro_unit_and_are_less_than_one_off(
    parts: list[tuple[int, int]],
) -> None:
    amounts = amounts_of(*zip(*parts, strict=True))

    exact = [Fraction(count * rate, 10**6) for count, rate in parts]
    assert sum(amounts.parts) == amounts.total
    assert -Fraction(1, 2) < amounts.total - sum(exact) <= Fraction(1, 2)
    for got, wanted in zip(amounts.parts, exact, strict=True):
        assert abs(got - wanted) < 1 or got == wanted
        assert got >= 0


@settings(deadline=None)
@given(prompt=counts, completion=counts, data=st.data())
def test_one_price_for_all_kinds_costs_each_token_once(prompt: int, completion: int, data: st.DataObject) -> None:
    cached, reasoning = data.draw(st.integers(0, prompt)), data.draw(st.integers(0, completion))
    prices = PriceList([price(kind, 10**6) for kind in TOKEN_KINDS])

    amounts = prices.rate(work(Tokens(prompt, cached, completion, reasoning)))["USD"]

    assert amounts == Amounts(prompt - cached, cached, completion - reasoning, reasoning)


@settings(deadline=None)
@given(st.permutations(range(3)))
def test_a_price_holds_from_its_start_up_to_but_not_at_its_end(order: list[int]) -> None:
    day = timedelta(days=1)
    listed = [
        price("prompt", 1, number=1, end=START + day),
        price("prompt", 2, number=2, start=START + day),
        price("prompt", 3, number=3, start=START + 2 * day, end=START + 3 * day),
    ]
    prices = PriceList([listed[index] for index in order])

    def held(moment: datetime) -> int | None:
        found = prices.find(work(Tokens(1), end=moment), "prompt")
        return None if found is None else found.micros_per_million

    edges = {
        START - TICK: None,
        START: 1,
        START + day - TICK: 1,
        START + day: 2,
        START + 2 * day - TICK: 2,
        START + 2 * day: 3,
        START + 3 * day - TICK: 3,
        START + 3 * day: 2,
    }
    assert {moment: held(moment) for moment in edges} == edges


def test_the_more_specific_price_wins_and_of_equals_the_one_set_later() -> None:
    ladder = [
        price("prompt", 1, number=1),
        price("prompt", 2, number=2),
        price("prompt", 3, number=3, priority_class="interactive"),
        price("prompt", 4, number=4, version="1"),
        price("prompt", 5, number=5, plan="gold"),
        price("prompt", 6, number=6, plan="gold", version="1", priority_class="interactive"),
    ]
    gold = work(Tokens(1), plan="gold")

    won = []
    for count in range(2, len(ladder) + 1):
        found = PriceList(ladder[:count]).find(gold, "prompt")
        won.append(found.micros_per_million if found else None)

    assert won == [2, 3, 4, 5, 6]
    other = PriceList(ladder).find(work(Tokens(1), plan="silver", version="2"), "prompt")
    assert other is not None
    assert other.micros_per_million == 3


def test_cached_and_reasoning_tokens_cost_what_their_whole_does_unless_they_have_a_price() -> None:
    tokens = Tokens(prompt=3_000_000, cached=1_000_000, completion=2_000_000, reasoning=1_000_000)
    whole = [price("prompt", 4), price("completion", 8)]

    assert PriceList(whole).rate(work(tokens)) == {"USD": Amounts(8, 4, 8, 8)}
    assert PriceList([*whole, price("cached", 1)]).rate(work(tokens)) == {"USD": Amounts(8, 1, 8, 8)}
    assert PriceList([price("cached", 1)]).rate(work(tokens)) == {"USD": Amounts(0, 1, 0, 0)}
    assert PriceList([]).rate(work(tokens)) == {}


def test_kinds_in_different_currencies_stay_apart() -> None:
    prices = PriceList([price("prompt", 10**6), price("completion", 10**6, currency="EUR")])

    assert prices.rate(work(Tokens(prompt=2, completion=3))) == {
        "USD": Amounts(2, 0, 0, 0),
        "EUR": Amounts(0, 0, 3, 0),
    }
