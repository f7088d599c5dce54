"""What `millrace eval` asks of a model: a fixed text to predict, and small slices of tasks with exact scoring.

Data and scoring only; no network. The texts are in the public domain or written for this purpose.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable

# Passages by kind; perplexity is taken over all of them together.
PASSAGES = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, “and "
    "what is the use of a book,” thought Alice “without pictures or conversations?” So she was considering in her own "
    "mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making "
    "a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with "
    "pink eyes ran close by her. There was nothing so very remarkable in that; nor did Alice think it so very much out "
    "of the way to hear the Rabbit say to itself, “Oh dear! Oh dear! I shall be late!”",
    "When in the Course of human events, it becomes necessary for one people to dissolve the political bands which "
    "have connected them with another, and to assume among the powers of the earth, the separate and equal station to "
    "which the Laws of Nature and of Nature's God entitle them, a decent respect to the opinions of mankind requires "
    "that they should declare the causes which impel them to the separation. We hold these truths to be self-evident, "
    "that all men are created equal, that they are endowed by their Creator with certain unalienable Rights, that "
    "among these are Life, Liberty and the pursuit of Happiness.",
    "A water mill turns the fall of a river into work. Water is led from above a weir through a narrow channel, the "
    "mill race, to the wheel; a gate decides how much may enter, so that a flood upstream does not become a flood at "
    "the stones. An overshot wheel fills its buckets at the top and gives back what the fall was worth; an undershot "
    "wheel stands in the current and takes what it can. From the wheel a shaft and wooden gears carry the turning to "
    "the stones, where the grain runs in at the eye and leaves as meal at the rim. In a dry summer the miller waits.",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n        if "
    "left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n        else:\n            "
    "result.append(right[j])\n            j += 1\n    result.extend(left[i:])\n    result.extend(right[j:])\n    "
    "return result\n\n\ndef merge_sort(values):\n    if len(values) <= 1:\n        return values\n    "
    "middle = len(values) // 2\n    return merge(merge_sort(values[:middle]), merge_sort(values[middle:]))\n",
    '{"orders": [{"id": 1, "customer": "Ada", "items": [{"sku": "A-100", "count": 2}, {"sku": "B-200", "count": 1}], '
    '"paid": true}, {"id": 2, "customer": "Grace", "items": [{"sku": "C-300", "count": 5}], "paid": false}, {"id": 3, '
    '"customer": "Linus", "items": [{"sku": "A-100", "count": 1}], "paid": true}], "total": 3}',
    "Longtemps, je me suis couché de bonne heure. Parfois, à peine ma bougie éteinte, mes yeux se fermaient si vite "
    "que je n'avais pas le temps de me dire : « Je m'endors. » Et, une demi-heure après, la pensée qu'il était "
    "temps de chercher le sommeil m'éveillait.",
    "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett zu einem ungeheueren "
    "Ungeziefer verwandelt. Er lag auf seinem panzerartig harten Rücken und sah, wenn er den Kopf ein wenig hob, "
    "seinen gewölbten, braunen, von bogenförmigen Versteifungen geteilten Bauch.",
    "En un lugar de la Mancha, de cuyo nombre no quiero acordarme, no ha mucho tiempo que vivía un hidalgo de los de "
    "lanza en astillero, adarga antigua, rocín flaco y galgo corredor.",
)

Score = Callable[[str], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One prompt continued greedily for at most `max_tokens`; `passes` judges the text of the answer."""

    slice: str
    prompt: str
    max_tokens: int
    passes: Score


def tasks() -> list[Task]:
    """The whole fixed set, the same in every run."""
    rng = random.Random(20)  # noqa: S311 - a fixed set of questions, not a secret
    return [*_arithmetic(rng), *_copying(rng), *_retrieval(rng), *_json(rng), *_code(), *_languages()]


def _starts(expected: str) -> Score:
    return lambda answer: answer.strip().startswith(expected)


def _contains(expected: str) -> Score:
    return lambda answer: expected in answer


def _arithmetic(rng: random.Random) -> list[Task]:
    shown = "2 + 3 = 5\n4 + 1 = 5\n7 + 2 = 9\n6 + 6 = 12\n"
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(24)]
    return [Task("arithmetic", f"{shown}{a} + {b} =", 4, _starts(f"{a + b}")) for a, b in pairs]


_WORDS = (
    *("river", "stone", "wheel", "grain", "meal", "gate", "water", "weir", "shaft"),
    *("gear", "bucket", "mill", "summer", "flood", "bread", "market", "road"),
)


def _copying(rng: random.Random) -> list[Task]:
    found = []
    for _ in range(20):
        words = " ".join(rng.sample(_WORDS, 6))
        found.append(Task("copying", f"{words}\n{words}\n{words}\n", 16, _starts(words)))
    return found


def _retrieval(rng: random.Random) -> list[Task]:
    filler = PASSAGES[2] + "\n"
    found = []
    for index in range(12):
        name, code = rng.choice(("Ada", "Grace", "Linus", "Alan", "Edsger")), rng.randint(1000, 9999)
        fact = f"The secret code of {name} is {code}.\n"
        before = 1 + index % 4
        text = filler * before + fact + filler * (5 - before)
        found.append(Task("retrieval", f"{text}The secret code of {name} is", 6, _contains(str(code))))
    return found


def _json(rng: random.Random) -> list[Task]:
    def valid(opening: str) -> Score:
        def passes(answer: str) -> bool:
            try:
                json.loads(opening + answer.split("\n")[0])
            except ValueError:
                return False
            return True

        return passes

    shown = '{"name": "Ada", "age": 36}\n{"name": "Grace", "age": 41}\n{"name": "Alan", "age": 29}\n'
    found = []
    for name in rng.sample(("Linus", "Edsger", "Barbara", "Ken", "Dennis", "Margaret", "Tim", "Vint"), 8):
        opening = f'{{"name": "{name}",'
        found.append(Task("json", shown + opening, 12, valid(opening)))
    return found


def _code() -> list[Task]:
    cases = (
        ("def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return a", "- b"),
        ("for i in range(10):\n    print(i)\n\nfor j in range(20):\n    print(", "j"),
        ("numbers = [1, 2, 3]\ntotal = 0\nfor number in numbers:\n    total +=", "number"),
        ("def square(x):\n    return x * x\n\ndef cube(x):\n    return x * x *", "x"),
        ("if a > b:\n    largest = a\nelse:\n    largest =", "b"),
        ("with open(path) as file:\n    text = file.", "read"),
        ("import os\nimport sys\n\nprint(os.getcwd())\nprint(sys.", "argv"),
        (
            "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def pop(self):\n        self.",
            "items",
        ),
    )
    return [Task("code", prompt, 4, _starts(expected)) for prompt, expected in cases]


def _languages() -> list[Task]:
    cases = (
        ("Bonjour, je m'appelle Marie et j'habite à", "Paris"),
        ("La capitale de la France est", "Paris"),
        ("Die Hauptstadt von Deutschland ist", "Berlin"),
        ("La capital de España es", "Madrid"),
        ("La capitale dell'Italia è", "Rom"),
        ("Eins, zwei, drei,", "vier"),
        ("Uno, dos, tres,", "cuatro"),
        ("Un, deux, trois,", "quatre"),
        ("Lundi, mardi, mercredi,", "jeudi"),
        ("enero, febrero, marzo,", "abril"),
    )
    return [Task("languages", prompt, 8, _contains(expected)) for prompt, expected in cases]


# Chat questions whose answers are only measured in length.
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about a mill by a river.",
    "Explain photosynthesis to a child in three sentences.",
    "Name three uses of a wooden spoon.",
    "What is a good way to start the day?",
    "Describe the sea in one sentence.",
)
