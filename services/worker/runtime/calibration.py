"""The sample text from which int8 kernels learn, at load, which inputs of their products are far larger than the rest.

Such inputs are a trait of the weights, hardly of the text: a hundred mixed tokens find them. Same text, same choice,
so two workers with the same weights compute the same bits.
"""

from __future__ import annotations

from tokenizers import Tokenizer

SAMPLE = (
    "The mill stands where the river bends; its wheel turns 12 stones that grind corn, rye and wheat.\n"
    'def add(a, b):\n    return a + b\n{"name": "Ada", "age": 36, "tags": ["x", "y"]}\n'
    "Il était une fois, en 1984, une petite ville. Der Fluss ist tief. El agua es fría.\n"
    "Q: What is the capital of Italy? A: Rome. 17 + 25 = 42; 3 < 5.\n"
)


def sample_ids(tokenizer_json: bytes, limit: int) -> list[int]:
    """Ids of the sample, at most `limit`."""
    ids: list[int] = Tokenizer.from_str(tokenizer_json.decode("utf-8")).encode(SAMPLE, add_special_tokens=False).ids
    return ids[:limit]
