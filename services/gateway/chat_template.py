"""Chat messages → variables of the operator's Jinja template. Clients cannot send or change a template. Pure.

What a client wrote is guarded: a control token spelled in it is split by a character that occurs nowhere else, so the
tokenizer takes it for text (S7). The rendering itself happens in template_child.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from millrace.worker.v1 import worker_service_pb2

from services.common.errors import InvalidRequest

JsonValue = str | int | float | bool | list["JsonValue"] | dict[str, "JsonValue"] | None

_ITERATES_CONTENT = re.compile(r"in\s+\w+(\.content\b|\[\s*['\"]content['\"]\s*\])|content['\"]?\]?\[0\]")
_PRIVATE_USE = (*range(0xE100, 0xF8FF), *range(0xF0000, 0xFFFFD))
_ECHO_SOURCE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


@dataclasses.dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A model's template and the texts of its special tokens (`bos_token` …), as its card gives them."""

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()

    @property
    def wants_parts(self) -> bool:
        """The template walks over content parts and knows no plain string."""
        return "is string" not in self.source and _ITERATES_CONTENT.search(self.source) is not None

    @property
    def knows_developer(self) -> bool:
        """The template names the `developer` role; else it is shown as `system`."""
        return "developer" in self.source

    @property
    def knows_tools(self) -> bool:
        """The template can show tools."""
        return "tools" in self.source


@dataclasses.dataclass(frozen=True, slots=True)
class Guarded:
    """Template variables that are safe to render, and the character that guards control tokens in them."""

    variables: dict[str, JsonValue]
    guard: str


def template_of(card: worker_service_pb2.ModelCard) -> ChatTemplate | None:
    """The template of a card, or None where the model has none. The echo model has a plain one of its own."""
    if card.chat_template:
        return ChatTemplate(card.chat_template, tuple(sorted(card.special_tokens.items())))
    return ChatTemplate(_ECHO_SOURCE) if card.runner == "fake" else None


def guarded_variables(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, JsonValue]],
    *,
    tools: Sequence[JsonValue] | None,
    special_texts: Sequence[str],
    allowed: Mapping[str, JsonValue],
) -> Guarded:
    """Variables for the template; `allowed` are the client's template settings, already checked against a list.

    Raises InvalidRequest when the text leaves no free guard character.
    """
    client: dict[str, JsonValue] = {
        "messages": [_shaped(message, template) for message in messages],
        "tools": list(tools) if tools is not None else None,
        **allowed,
    }
    guard = _free_character(template.source, client)
    splitter = _Splitter(special_texts, guard)
    variables = {name: splitter.split(value) for name, value in client.items()}
    variables |= {"add_generation_prompt": True, **dict(template.special_tokens)}
    return Guarded(variables, guard)


def _shaped(message: Mapping[str, JsonValue], template: ChatTemplate) -> dict[str, JsonValue]:
    shaped = dict(message)
    if shaped.get("role") == "developer" and not template.knows_developer:
        shaped["role"] = "system"
    content = shaped.get("content")
    if template.wants_parts and isinstance(content, str):
        shaped["content"] = [{"type": "text", "text": content}]
    return shaped


def _strings(value: JsonValue) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)


def _free_character(source: str, client: JsonValue) -> str:
    used = set(source)
    for text in _strings(client):
        if not text.isascii():
            used |= set(text)
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequest("The messages use every private-use character.", param="messages")


class _Splitter:
    """Puts the guard behind the first character of each control token, and of one that a string ends inside of."""

    def __init__(self, special_texts: Sequence[str], guard: str) -> None:
        self._texts = [text for text in special_texts if len(text) > 1]
        self._whole = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._first = {text[0] for text in self._texts}
        self._longest = max(map(len, self._texts), default=0)
        self._guard = guard

    def split(self, value: JsonValue) -> JsonValue:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self.split(item) for item in value]
        if isinstance(value, dict):
            return {self._text(key): self.split(item) for key, item in value.items()}
        return value

    def _text(self, text: str) -> str:
        # Again after each pass: a control token may contain another.
        while self._whole.search(text):
            text = self._whole.sub(lambda found: found[0][0] + self._guard + found[0][1:], text)
        return self._split_end(text)

    def _split_end(self, text: str) -> str:
        # A template may strip the end and join what follows.
        end = len(text.rstrip())
        for start in range(max(0, end - self._longest), end):
            tail = text[start:end]
            if tail[0] in self._first and any(special.startswith(tail) for special in self._texts):
                return text[: start + 1] + self._guard + text[start + 1 :]
        return text
