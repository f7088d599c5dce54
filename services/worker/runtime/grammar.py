"""Structured output on the worker: grammars compiled for the served tokenizer, and each choice's place in its grammar.

Owns the cache of compiled grammars, keyed by what they say. A choice's place is its own and never shared. Compiling
takes up to seconds and runs on any thread; the rest takes microseconds and runs on the engine's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.common.grammar_source import LIMITS, GrammarError, grammar_source
from services.worker.engine.request import Grammar

CACHED_GRAMMARS = 64
Mask = npt.NDArray[np.bool_]


class GrammarCompiler:
    """Compiles for one tokenizer. All methods are thread-safe."""

    def __init__(
        self, tokenizer_json: bytes, *, vocab_size: int, eos_token_ids: Iterable[int], cache_size: int = CACHED_GRAMMARS
    ) -> None:
        """Reads the tokenizer, for about a second. Raises GrammarError when llguidance cannot use it.

        Ids below `vocab_size` that the tokenizer lacks are never allowed.
        """
        self._eos_token_ids = tuple(sorted(eos_token_ids))
        if not self._eos_token_ids:
            raise GrammarError("no token ends a text")
        try:
            self._tokenizer = LLTokenizer(
                tokenizer_json.decode(),
                n_vocab=vocab_size,
                eos_token=list(self._eos_token_ids),
                slices=LLTokenizer.json_slices(),
            )
        except Exception as error:  # the library raises what its parts raise
            raise GrammarError("the tokenizer cannot be used") from error
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar ready to run, from the cache when it is there. Blocks. Raises GrammarError."""
        with self._lock:
            found = self._cache.get(grammar)
            if found is not None:
                self._cache.move_to_end(grammar)
                return found
        compiled = self._compile(grammar)
        with self._lock:
            self._cache[grammar] = compiled
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        source = grammar_source(grammar.kind.value, grammar.text, grammar.choices)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise GrammarError("the grammar is not supported, or is too large")
        compiled = CompiledGrammar(matcher, self._tokenizer.vocab_size, self._eos_token_ids)
        # The first mask is the dearest one, and shows a grammar that matches nothing at all.
        compiled.start(()).mask()
        return compiled


class CompiledGrammar:
    """A grammar at its beginning. Immutable."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    def start(self, output_token_ids: Sequence[int]) -> GrammarPlace:
        """A new place after tokens that an earlier attempt produced. Raises GrammarError when they do not fit."""
        place = GrammarPlace(self._matcher.deep_copy(), self._vocab_size, self._eos_token_ids)
        for token_id in output_token_ids:
            place.accept(token_id)
        return place


class GrammarPlace:
    """How far one choice has come. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    @property
    def ended(self) -> bool:
        """The grammar is satisfied and allows nothing more."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def mask(self) -> Mask:
        """Which tokens may come next (vocab,), never none of them; ends of text only when the grammar is satisfied.

        Raises GrammarError when there is no such token, or finding them costs more than the limits.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError("the grammar became too complex, or allows no token here")
        mask: Mask = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not self._matcher.is_accepting():
            mask[self._eos_token_ids] = False
        if not mask.any():
            raise GrammarError("the grammar allows no token here")
        return mask

    def accept(self, token_id: int) -> None:
        """Step over a token. Raises GrammarError when the grammar does not allow it."""
        if not self._matcher.consume_token(token_id):
            raise GrammarError("a token does not fit the grammar")
