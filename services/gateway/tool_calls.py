"""Text of one answer → content and tool calls, as it comes. Pure; called by text_stream for requests with tools.

Two forms are read: Hermes, `<tool_call>{"name": …, "arguments": {…}}</tool_call>` anywhere and repeatedly; and plain
JSON, where the answer *begins* with one such object or an array of them (`parameters` is read as `arguments`).

The rule for what is no clean JSON: a call exists from the moment that its head, `{"name": "<an offered tool>",
"arguments": {`, is complete (in another order of keys: the whole object). What never gets there is content, as it was
written. What breaks later stays a call, and its arguments are the raw text, up to `</tool_call>` or the end.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Callable, Collection, Sequence

from services.gateway.chat_template import JsonValue
from services.gateway.tools import CALL_CLOSE, CALL_OPEN

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[a-zA-Z0-9_-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\s*\{\s*"((?:[^"\\]|\\.)*)"')
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
_OUTSIDE_STRINGS = frozenset(" \t\r\n,:+-.0123456789truefalsn" + "E")
_ARRAY_START = re.compile(r"\s*(\[\s*)?")
# What may stand behind a call and is no content; a brace too many is a common slip.
_AFTER_PLAIN, _AFTER_HERMES = " \t\r\n,]", " \t\r\n}"


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the call `index` of a choice; `call_id` and `name` come with its first delta only."""

    index: int
    arguments: str
    call_id: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text turned out to be."""

    content: str
    calls: tuple[ToolCallDelta, ...]


class _State(enum.Enum):
    START = enum.auto()  # nothing but whitespace so far
    CONTENT = enum.auto()
    HEAD = enum.auto()  # inside an object that may be a call
    ARGUMENTS = enum.auto()
    RAW = enum.auto()  # arguments that broke
    TAIL = enum.auto()  # the arguments are over, the call's object is not
    BETWEEN = enum.auto()  # after the object


class _Value:
    """Finds where a JSON value that comes in pieces ends; `broken` where it cannot be JSON."""

    def __init__(self, *opened: str) -> None:
        self._closers = list(opened)
        self._in_string = self._escaped = False
        self.closed = self.broken = False

    def take(self, text: str) -> int:
        """How many characters of `text` still belong to the value."""
        for at, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._closers.append("}" if character == "{" else "]")
            elif character in "}]":
                self.broken = not self._closers or self._closers.pop() != character
                if self.broken:
                    return at
                if not self._closers:
                    self.closed = True
                    return at + 1
            elif character not in _OUTSIDE_STRINGS:
                self.broken = True
                return at
        return len(text)


class ToolCallParser:
    """The state of one choice. `names` are the tools that may be called, `call_id` makes the id of a call's index."""

    def __init__(self, names: Collection[str], call_id: Callable[[int], str]) -> None:
        self._names = names
        self._call_id = call_id
        self._state = _State.START
        self._held = ""
        # What was taken away in front of an object that may be a call: given back when it is none.
        self._lead = ""
        self._hermes = False
        self._value = _Value()
        self._scanned = 0
        self._content: list[str] = []
        self._made: list[ToolCallDelta] = []
        self.call_count = 0
        self.finished_calls = 0

    @property
    def held_count(self) -> int:
        """Characters whose meaning is not known yet."""
        return len(self._lead) + len(self._held)

    def feed(self, text: str) -> Parsed:
        """What is certain after `text`."""
        self._held += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> Parsed:
        """What is left at the end of the answer."""
        rest, self._held, lead, self._lead = self._held, "", self._lead, ""
        if self._state is _State.HEAD:
            self._content.append(lead + rest)
        elif self._state is _State.RAW:
            self._say(rest)
        elif self._state in (_State.START, _State.CONTENT) and (rest.strip() or not self.call_count):
            self._content.append(rest)
        return self._take()

    def _take(self) -> Parsed:
        parsed = Parsed("".join(self._content), merged_calls(self._made))
        self._content, self._made = [], []
        return parsed

    def _step(self) -> bool:
        """One transition; False when more text is needed."""
        return {
            _State.START: self._start,
            _State.CONTENT: self._in_content,
            _State.HEAD: self._head,
            _State.ARGUMENTS: self._arguments,
            _State.RAW: self._raw,
            _State.TAIL: self._tail,
            _State.BETWEEN: self._between,
        }[self._state]()

    def _start(self) -> bool:
        found = _ARRAY_START.match(self._held)
        end = found.end() if found is not None else 0
        if end == len(self._held):
            return False
        if self._held[end] == "{":
            self._open(end, hermes=False)
        else:
            self._state = _State.CONTENT
        return True

    def _in_content(self) -> bool:
        at = self._held.find(CALL_OPEN)
        marked = at >= 0
        if not marked:
            at = len(self._held) - _partial(self._held, CALL_OPEN)
        # Whitespace in front of a call is no content.
        content = self._held[:at].rstrip()
        self._content.append(content)
        self._held = self._held[len(content) :]
        if marked:
            self._open(at - len(content) + len(CALL_OPEN), hermes=True)
        return marked

    def _open(self, lead: int, *, hermes: bool) -> None:
        self._lead, self._held = self._held[:lead], self._held[lead:]
        self._hermes = hermes
        self._value, self._scanned = _Value(), 0
        self._state = _State.HEAD

    def _head(self) -> bool:
        if self._held.lstrip()[:1] not in ("", "{"):
            return self._no_call()
        head = _HEAD.match(self._held)
        if head is not None and head["name"] in self._names:
            self._held = self._held[head.end() :]
            self._call(head["name"])
            self._value = _Value()
            self._state = _State.ARGUMENTS
            return True
        first_key = _FIRST_KEY.match(self._held)
        if head is not None or (first_key is not None and first_key[1] not in _CALL_KEYS):
            return self._no_call()
        self._scanned += self._value.take(self._held[self._scanned :])
        if self._value.broken:
            return self._no_call()
        return self._whole(self._held[: self._scanned]) if self._value.closed else False

    def _no_call(self) -> bool:
        self._content.append(self._lead)
        self._lead = ""
        self._state = _State.CONTENT
        return True

    def _whole(self, text: str) -> bool:
        call = _call_of(text)
        if call is None or call[0] not in self._names:
            return self._no_call()
        self._held = self._held[len(text) :]
        self._call(call[0])
        self._say(call[1])
        self._end_call(_State.BETWEEN)
        return True

    def _arguments(self) -> bool:
        count = self._value.take(self._held)
        self._say(self._held[:count])
        self._held = self._held[count:]
        if self._value.closed:
            self._value = _Value("}")
            self._end_call(_State.TAIL)
        elif self._value.broken:
            self._state = _State.RAW
        else:
            return False
        return True

    def _raw(self) -> bool:
        at = self._held.find(CALL_CLOSE) if self._hermes else -1
        end = len(self._held) - (_partial(self._held, CALL_CLOSE) if self._hermes else 0) if at < 0 else at
        self._say(self._held[:end])
        self._held = self._held[end:]
        if at >= 0:
            self._end_call(_State.BETWEEN)
        return at >= 0

    def _tail(self) -> bool:
        count = self._value.take(self._held)
        self._held = self._held[count:]
        done = self._value.closed or self._value.broken
        self._state = _State.BETWEEN if done else _State.TAIL
        return done

    def _between(self) -> bool:
        self._held = self._held.lstrip(_AFTER_HERMES if self._hermes else _AFTER_PLAIN)
        if not self._held or (self._hermes and len(self._held) < len(CALL_CLOSE) and CALL_CLOSE.startswith(self._held)):
            return False
        if not self._hermes and self._held[0] == "{":
            self._open(0, hermes=False)
            return True
        self._held = self._held.removeprefix(CALL_CLOSE) if self._hermes else self._held
        self._state = _State.CONTENT
        return True

    def _call(self, name: str) -> None:
        self._lead = ""
        self._made.append(ToolCallDelta(self.call_count, "", self._call_id(self.call_count), name))
        self.call_count += 1

    def _say(self, arguments: str) -> None:
        if arguments:
            self._made.append(ToolCallDelta(self.call_count - 1, arguments))

    def _end_call(self, state: _State) -> None:
        self.finished_calls += 1
        self._state = state


def _partial(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of the marker."""
    longest = min(len(marker) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of a whole object, None when it is no call."""
    try:
        sent: JsonValue = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(sent, dict) or not isinstance(name := sent.get("name"), str):
        return None
    arguments = sent.get("arguments", sent.get("parameters"))
    if arguments is None:
        return name, "{}"
    if isinstance(arguments, str):
        # Encoded twice: the string is what the call's arguments are.
        return name, arguments
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def merged_calls(made: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """One delta for each call in a row."""
    merged: list[ToolCallDelta] = []
    for delta in made:
        if merged and merged[-1].index == delta.index:
            merged[-1] = dataclasses.replace(merged[-1], arguments=merged[-1].arguments + delta.arguments)
        else:
            merged.append(delta)
    return tuple(merged)
