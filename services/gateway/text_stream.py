"""Tokens → text, choice by choice: whole characters only, stop strings held back and never sent.

Pure and synchronous. Knows which tokens each piece of text delivers, so that the doors can say what was delivered.
Whoever detokenises owns stop strings: that is here, and nowhere else. They are looked for in the answer, not in the
reasoning before it; tool calls are read from what they leave.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence

from millrace.common.v1 import common_pb2

from services.gateway.detokenizer import Detokenizer
from services.gateway.generation import Generation, TokenEvent, ValidRequest
from services.gateway.reasoning import ReasoningMarkers
from services.gateway.tokenizer import Tokenizer
from services.gateway.tool_calls import ToolCallDelta, ToolCallParser, merged_calls


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
    `reasoning` is text before the answer, `reasoning_delivered` counts the choice's tokens of it up to here.
    """

    choice: int
    text: str
    tokens: tuple[TextToken, ...]
    delivered: int
    finish_reason: common_pb2.FinishReason.ValueType | None = None
    prompt_logprobs: tuple[common_pb2.PositionLogprobs, ...] = ()
    reasoning: str = ""
    reasoning_delivered: int = 0
    calls: tuple[ToolCallDelta, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    """A token, and how much of the answer and of the reasoning must be sent before it is delivered."""

    token: TextToken
    answer_end: int
    thought_end: int
    reasoned: bool


class ChoiceText:
    """Text state of one choice."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        min_tokens: int,
        choice: int = 0,
        *,
        markers: ReasoningMarkers | None = None,
        thinking: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._choice = choice
        self._markers = markers
        self._thinking = thinking
        # Newlines next to a marker belong to neither side.
        self._behind_marker = thinking
        self._detokenizer = Detokenizer()
        self._held = ""
        self._thought = ""
        self._sent_chars = 0
        self._sent_thought = 0
        # Text before it came before `min_tokens` and is no part of a stop string.
        self._stop_from = 0
        self._waiting: list[_Waiting] = []
        self._seen = 0
        self._delivered = 0
        self._reasoned = 0
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
            self._write(self._detokenizer.flush())
            matched = self._match_stop()
            if matched is not None:
                self._held = self._held[:matched]
            return self._finish(event.finish_reason, event)
        return self._emit(len(self._held) - self._held_back(), event)

    def _take(self, token_id: int, logprobs: common_pb2.PositionLogprobs | None, *, visible: bool) -> None:
        start = self._sent_chars + len(self._held)
        if visible and not self._passed_marker(token_id):
            self._write(self._detokenizer.feed(self._tokenizer.visible_bytes(token_id)))
            reasoned = self._thinking
        else:
            reasoned = False
        # A token that ends inside a character is delivered with the rest of that character.
        inside = 1 if self._detokenizer.pending_byte_count else 0
        answer_end = self._sent_chars + len(self._held) + (0 if self._thinking else inside)
        thought_end = self._sent_thought + len(self._thought) + (inside if self._thinking else 0)
        self._waiting.append(_Waiting(TextToken(token_id, start, logprobs), answer_end, thought_end, reasoned))
        self._seen += 1
        if self._seen < self._min_tokens:
            self._stop_from = self._sent_chars + len(self._held)

    def _write(self, text: str) -> None:
        if self._behind_marker:
            text = text.lstrip("\n")
            self._behind_marker = not text
        if self._thinking:
            self._thought += text
        else:
            self._held += text

    def _passed_marker(self, token_id: int) -> bool:
        markers = self._markers
        if markers is None or token_id != (markers.close_id if self._thinking else markers.open_id):
            return False
        self._write(self._detokenizer.flush())
        self._thinking = not self._thinking
        self._behind_marker = True
        return True

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
        end = self._sent_chars + len(self._held)
        text, self._held = self._held, ""
        # A token of the stop string has no text; its offset is where the text ends.
        tokens = tuple(
            w.token if w.token.start <= end else dataclasses.replace(w.token, start=end) for w in self._waiting
        )
        return self._delta(text, tokens, event, reason)

    def _emit(self, length: int, event: TokenEvent) -> TextDelta | None:
        text, self._held = self._held[:length], self._held[length:]
        self._sent_chars += len(text)
        thought_end = self._sent_thought + len(self._thought)
        count = 0
        while count < len(self._waiting) and (
            self._waiting[count].answer_end <= self._sent_chars and self._waiting[count].thought_end <= thought_end
        ):
            count += 1
        tokens = tuple(waiting.token for waiting in self._waiting[:count])
        if not text and not tokens and not self._thought and not event.prompt_logprobs:
            return None
        return self._delta(text, tokens, event, None)

    def _delta(
        self,
        text: str,
        tokens: tuple[TextToken, ...],
        event: TokenEvent,
        reason: common_pb2.FinishReason.ValueType | None,
    ) -> TextDelta:
        thought, self._thought = self._thought, ""
        self._sent_thought += len(thought)
        self._delivered += len(tokens)
        self._reasoned += sum(waiting.reasoned for waiting in self._waiting[: len(tokens)])
        del self._waiting[: len(tokens)]
        return TextDelta(
            self._choice,
            text,
            tokens,
            self._delivered,
            reason,
            event.prompt_logprobs,
            reasoning=thought,
            reasoning_delivered=self._reasoned,
        )


class ToolText:
    """Text state of one choice whose tool calls are read. Counts tokens one by one, however they arrive."""

    def __init__(self, text: ChoiceText, parser: ToolCallParser, *, single: bool) -> None:
        self._text = text
        self._parser = parser
        self._single = single
        self._fed_chars = 0
        # Deltas whose text the parser still holds, with the count of characters that ends them.
        self._waiting: list[tuple[int, TextDelta]] = []
        self._delivered = self._reasoned = 0
        self.finished = False

    def feed(self, event: TokenEvent) -> TextDelta | None:
        """As ChoiceText's; with `single` the first whole call finishes the choice."""
        joined: TextDelta | None = None
        for part in _token_by_token(event):
            delta = self._text.feed(part) if not self.finished else None
            read = None if delta is None else self._read(delta)
            if read is not None:
                joined = read if joined is None else _joined(joined, read)
        return joined

    def _read(self, delta: TextDelta) -> TextDelta | None:
        self._fed_chars += len(delta.text)
        self._waiting.append((self._fed_chars, delta))
        pieces = [self._parser.feed(delta.text)]
        reason = delta.finish_reason
        if reason is not None:
            pieces.append(self._parser.finish())
        if self._parser.call_count and reason == common_pb2.FINISH_REASON_STOP:
            reason = common_pb2.FINISH_REASON_TOOL_CALLS
        if self._single and self._parser.finished_calls:
            reason = common_pb2.FINISH_REASON_TOOL_CALLS
        self.finished = reason is not None
        known = self._fed_chars if self.finished else self._fed_chars - self._parser.held_count
        ready = [waiting for end, waiting in self._waiting if end <= known]
        del self._waiting[: len(ready)]
        if ready:
            self._delivered, self._reasoned = ready[-1].delivered, ready[-1].reasoning_delivered
        content = "".join(piece.content for piece in pieces)
        calls = tuple(call for piece in pieces for call in piece.calls if call.index == 0 or not self._single)
        if not ready and not content and not calls and not delta.reasoning:
            return None
        return dataclasses.replace(
            delta,
            text=content,
            calls=calls,
            tokens=tuple(token for waiting in ready for token in waiting.tokens),
            delivered=self._delivered,
            reasoning_delivered=self._reasoned,
            finish_reason=reason,
        )


class TextStream:
    """The deltas of all choices of one generation; a stop string ends its choice in the worker too."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._left = generation.request.sampling.choice_count
        self._texts: list[ChoiceText | ToolText] = []
        self._prompt = _PromptLogprobs() if generation.request.sampling.HasField("prompt_logprob_count") else None

    @property
    def over(self) -> bool:
        """Every choice has finished, and all deltas were taken."""
        return (self._left == 0 or self._generation.done) and (self._prompt is None or not self._prompt.ready)

    def take(self) -> TextDelta | None:
        """The next delta that is there; None for nothing yet, or no more. Raises what `Generation.pull` raises."""
        if self._prompt is not None and self._prompt.ready:
            return self._prompt.ready.popleft()
        while self._left:
            event = self._generation.pull()
            if event is None:
                return None
            delta = self._feed(event)
            if delta is not None and self._prompt is not None:
                self._prompt.add(delta)
                return self.take()
            if delta is not None:
                return delta
        return None

    def _feed(self, event: TokenEvent) -> TextDelta | None:
        if not self._texts:
            # Only now it is certain whose tokens these are.
            request_id, request = self._generation.request_id, self._generation.request
            self._texts = [_choice_text(request_id, request, choice) for choice in range(self._left)]
        text = self._texts[event.choice]
        was_finished = text.finished
        delta = text.feed(event)
        if text.finished and not was_finished:
            self._left -= 1
            if event.finish_reason is None and delta is not None:
                self._generation.stop_choice(event.choice, delta.delivered)
        return delta


class _PromptLogprobs:
    """Gives the prompt's logprobs, which come with choice 0, to every choice; other choices wait for them."""

    def __init__(self) -> None:
        self.ready: deque[TextDelta] = deque()
        self._early: list[TextDelta] = []
        self._prompt: tuple[common_pb2.PositionLogprobs, ...] | None = None
        self._opened: set[int] = set()

    def add(self, delta: TextDelta) -> None:
        """One more delta; what is ready to go out is in `ready`."""
        if self._prompt is None and delta.choice != 0:
            self._early.append(delta)
            return
        self._prompt = delta.prompt_logprobs if self._prompt is None else self._prompt
        for ready in (delta, *self._early):
            first = ready.choice not in self._opened
            self._opened.add(ready.choice)
            self.ready.append(dataclasses.replace(ready, prompt_logprobs=self._prompt if first else ()))
        self._early.clear()


async def text_deltas(generation: Generation) -> AsyncGenerator[TextDelta, None]:
    """All deltas until every choice has finished. Raises what `Generation.pull` raises."""
    stream = TextStream(generation)
    while not stream.over:
        delta = stream.take()
        if delta is not None:
            yield delta
        elif not stream.over:
            await generation.more()


def _choice_text(request_id: str, request: ValidRequest, choice: int) -> ChoiceText | ToolText:
    text = ChoiceText(
        request.model.tokenizer,
        request.stop,
        request.sampling.min_token_count,
        choice,
        markers=request.reasoning,
        thinking=request.starts_in_reasoning,
    )
    if not request.tools.active:
        return text

    def call_id(index: int) -> str:
        # The same however often the answer is made; nine plain characters are what every chat template takes.
        digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).digest()
        return base64.b32encode(digest).decode().lower()[:9]

    names = frozenset(tool.name for tool in request.tools.callable_tools)
    return ToolText(text, ToolCallParser(names, call_id), single=request.tools.single)


def _token_by_token(event: TokenEvent) -> Iterator[TokenEvent]:
    last = len(event.token_ids) - 1
    if last < 1:
        yield event
        return
    for at, token_id in enumerate(event.token_ids):
        yield TokenEvent(
            event.choice,
            event.first_index + at,
            (token_id,),
            event.logprobs[at : at + 1],
            event.prompt_logprobs if at == 0 else (),
            event.finish_reason if at == last else None,
            event.stop_token_id if at == last else None,
        )


def _joined(first: TextDelta, second: TextDelta) -> TextDelta:
    return dataclasses.replace(
        second,
        text=first.text + second.text,
        tokens=first.tokens + second.tokens,
        reasoning=first.reasoning + second.reasoning,
        calls=merged_calls(first.calls + second.calls),
    )
