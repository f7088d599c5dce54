"""Tokens → text, choice by choice: whole characters only, stop strings held back and never sent.

Pure and synchronous. Knows which tokens each piece of text delivers, so that the doors can say what was delivered.
Whoever detokenises owns stop strings: that is here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence

from millrace.common.v1 import common_pb2

from services.gateway.detokenizer import Detokenizer
from services.gateway.generation import Generation, TokenEvent, ValidRequest
from services.gateway.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class TextToken:
    """One token of a piece; `start` is the offset of its text in the choice's text."""

    token_id: int
    start: int
    logprobs: common_pb2.PositionLogprobs | None


@dataclasses.dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice and the tokens that it completes; `delivered` counts the choice's tokens up to here.

    `finish_reason` is set on the last delta of the choice. `prompt_logprobs` comes with the first delta of each choice.
    """

    choice: int
    text: str
    tokens: tuple[TextToken, ...]
    delivered: int
    finish_reason: common_pb2.FinishReason.ValueType | None = None
    prompt_logprobs: tuple[common_pb2.PositionLogprobs, ...] = ()


class ChoiceText:
    """Text state of one choice."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int, choice: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._choice = choice
        self._detokenizer = Detokenizer()
        self._held = ""
        self._sent_chars = 0
        # Text before it came before `min_tokens` and is no part of a stop string.
        self._stop_from = 0
        self._waiting: list[tuple[int, TextToken]] = []
        self._seen = 0
        self._delivered = 0
        self.finished = False

    def feed(self, event: TokenEvent) -> TextDelta | None:
        """The delta that an event completes, None when all of it is held back. Ignores events after the finish."""
        if self.finished:
            return None
        for index, token_id in enumerate(event.token_ids):
            logprobs = event.logprobs[index] if index < len(event.logprobs) else None
            ends_choice = event.stop_token_id is not None and index == len(event.token_ids) - 1
            self._take(token_id, logprobs, visible=not ends_choice)
            matched = self._match_stop()
            if matched is not None:
                self._held = self._held[:matched]
                return self._finish(common_pb2.FINISH_REASON_STOP, event)
        if event.finish_reason is not None:
            self._held += self._detokenizer.flush()
            matched = self._match_stop()
            if matched is not None:
                self._held = self._held[:matched]
            return self._finish(event.finish_reason, event)
        return self._emit(len(self._held) - self._held_back(), event)

    def _take(self, token_id: int, logprobs: common_pb2.PositionLogprobs | None, *, visible: bool) -> None:
        start = self._sent_chars + len(self._held)
        if visible:
            self._held += self._detokenizer.feed(self._tokenizer.visible_bytes(token_id))
        # A token that ends inside a character is delivered with the rest of that character.
        end = self._sent_chars + len(self._held) + (1 if self._detokenizer.pending_byte_count else 0)
        self._waiting.append((end, TextToken(token_id, start, logprobs)))
        self._seen += 1
        if self._seen < self._min_tokens:
            self._stop_from = self._sent_chars + len(self._held)

    def _match_stop(self) -> int | None:
        if not self._stop or self._seen < self._min_tokens:
            return None
        begin = max(0, self._stop_from - self._sent_chars)
        found = [at for stop in self._stop if (at := self._held.find(stop, begin)) >= 0]
        return min(found, default=None)

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        if self._seen < self._min_tokens:
            return 0
        longest = 0
        most = len(self._held) - max(0, self._stop_from - self._sent_chars)
        for stop in self._stop:
            for length in range(min(len(stop) - 1, most), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _finish(self, reason: common_pb2.FinishReason.ValueType, event: TokenEvent) -> TextDelta:
        self.finished = True
        text, self._held = self._held, ""
        end = self._sent_chars + len(text)
        # A token of the stop string has no text; its offset is where the text ends.
        tokens = tuple(TextToken(t.token_id, min(t.start, end), t.logprobs) for _, t in self._waiting)
        self._waiting.clear()
        self._delivered = self._seen
        return TextDelta(self._choice, text, tokens, self._seen, reason, event.prompt_logprobs)

    def _emit(self, length: int, event: TokenEvent) -> TextDelta | None:
        text, self._held = self._held[:length], self._held[length:]
        self._sent_chars += len(text)
        count = 0
        while count < len(self._waiting) and self._waiting[count][0] <= self._sent_chars:
            count += 1
        tokens = tuple(token for _, token in self._waiting[:count])
        del self._waiting[:count]
        self._delivered += count
        if not text and not tokens and not event.prompt_logprobs:
            return None
        return TextDelta(self._choice, text, tokens, self._delivered, None, event.prompt_logprobs)


async def text_deltas(generation: Generation, request: ValidRequest) -> AsyncGenerator[TextDelta, None]:
    """Deltas of all choices until each has finished; a stop string ends its choice in the worker too.

    Raises what `Generation.events` raises.
    """
    deltas = _choice_deltas(generation, request)
    if request.sampling.HasField("prompt_logprob_count"):
        deltas = _with_prompt_logprobs(deltas)
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            yield delta


async def _with_prompt_logprobs(deltas: AsyncGenerator[TextDelta, None]) -> AsyncGenerator[TextDelta, None]:
    """Gives the prompt's logprobs, which come with choice 0, to every choice; other choices wait for them."""
    early: list[TextDelta] = []
    prompt: tuple[common_pb2.PositionLogprobs, ...] | None = None
    opened: set[int] = set()
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            if prompt is None and delta.choice != 0:
                early.append(delta)
                continue
            prompt = delta.prompt_logprobs if prompt is None else prompt
            for ready in (delta, *early):
                first = ready.choice not in opened
                opened.add(ready.choice)
                yield dataclasses.replace(ready, prompt_logprobs=prompt if first else ())
            early.clear()


async def _choice_deltas(generation: Generation, request: ValidRequest) -> AsyncGenerator[TextDelta, None]:
    sampling = request.sampling
    texts = [
        ChoiceText(request.model.tokenizer, request.stop, sampling.min_token_count, choice)
        for choice in range(sampling.choice_count)
    ]
    left = len(texts)
    async for event in generation.events():
        text = texts[event.choice]
        was_finished = text.finished
        delta = text.feed(event)
        if text.finished and not was_finished:
            left -= 1
            if event.finish_reason is None and delta is not None:
                generation.stop_choice(event.choice, delta.delivered)
        if delta is not None:
            yield delta
        if left == 0:
            return
