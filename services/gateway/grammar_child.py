"""Tries to compile grammars inside a child process (`child_main`). Imports nothing of the platform.

A vocabulary of single bytes stands for the model's: what the grammar allows is the same.
"""

from __future__ import annotations

import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# An eighth of what a worker's thread usually has: what recurses too deep there has long died here.
_STACK_BYTES = 1024 * 1024
_REASON_CHARACTERS = 200


class _Bytes:
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


_TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))


def _check(source: str, limits: dict[str, Any]) -> dict[str, str]:
    matcher = LLMatcher(_TOKENIZER, source, log_level=0, limits=LLParserLimits(**limits))
    if not matcher.is_error():
        matcher.compute_bitmask()
        if matcher.is_error():
            return {"refused": "it matches nothing, or is too complex"}
        return {}
    return {"refused": matcher.get_error().strip().split("\n")[0][:_REASON_CHARACTERS]}


def answer(request: dict[str, Any]) -> dict[str, str]:
    """`{}` when `request["source"]` compiles under `request["limits"]`, else `{"refused": reason}`."""
    found: list[dict[str, str]] = []
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=lambda: found.append(_check(request["source"], request["limits"])))
    thread.start()
    thread.join()
    return found[0]
