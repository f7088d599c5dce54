"""`millrace eval`: what counts as a regression, and that the fixed tasks can be passed and failed."""

from __future__ import annotations

import copy

import pytest

from cli.eval_tasks import tasks
from cli.evaluate import Report, regressions

BASE: Report = {
    "model": "m@1",
    "perplexity": 20.0,
    "token_count": 1000,
    "slices": {"copying": {"count": 20, "passed": 15}},
    "mean_answer_tokens": 40.0,
}


def changed(**fields: object) -> Report:
    report = copy.deepcopy(BASE)
    report.update(fields)  # type: ignore[typeddict-item]
    return report


def test_a_version_like_its_baseline_or_better_passes() -> None:
    better = changed(perplexity=19.0, slices={"copying": {"count": 20, "passed": 20}})

    assert regressions(BASE, BASE) == []
    assert regressions(better, BASE) == []


@pytest.mark.parametrize(
    ("kept", "lost"),
    [
        ({"perplexity": 20.29}, {"perplexity": 20.31}),
        ({"perplexity": 20.0}, {"perplexity": float("nan")}),
        ({"slices": {"copying": {"count": 20, "passed": 13}}}, {"slices": {"copying": {"count": 20, "passed": 12}}}),
        ({}, {"slices": {"copying": {"count": 19, "passed": 19}}}),
        ({}, {"slices": {}}),
        ({"mean_answer_tokens": 47.9}, {"mean_answer_tokens": 48.1}),
        ({"mean_answer_tokens": 32.1}, {"mean_answer_tokens": 31.9}),
    ],
)
def test_each_figure_may_fall_by_its_tolerance_and_no_further(kept: dict[str, object], lost: dict[str, object]) -> None:
    assert regressions(changed(**kept), BASE) == []
    assert len(regressions(changed(**lost), BASE)) == 1


def test_the_tasks_are_the_same_in_every_run_and_none_passes_an_empty_answer() -> None:
    first, second = tasks(), tasks()

    assert [(each.slice, each.prompt) for each in first] == [(each.slice, each.prompt) for each in second]
    assert {each.slice for each in first} == {"arithmetic", "copying", "retrieval", "json", "code", "languages"}
    assert not any(each.passes("") for each in first)


def test_right_answers_pass() -> None:
    by_slice = {each.slice: each for each in tasks()}

    assert by_slice["copying"].passes(by_slice["copying"].prompt.split("\n")[0] + "\n")
    assert by_slice["json"].passes(' "age": 30}\n{')
    assert by_slice["code"].passes("items.pop()")
    a, b = by_slice["arithmetic"].prompt.rsplit("\n", 1)[1].removesuffix(" =").split(" + ")
    assert by_slice["arithmetic"].passes(f" {int(a) + int(b)}\n")
