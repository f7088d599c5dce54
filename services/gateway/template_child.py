"""Renders chat templates inside a child process (`child_main`). Imports nothing of the platform."""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_OUTPUT_CHARACTERS = 8 * 1024 * 1024


class TemplateRefusal(Exception):
    """The template itself refuses these messages (`raise_exception`)."""


class _OutputTooLarge(Exception):
    pass


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what trainers learn from; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None) -> str:
    # The guard character must stay what it is, so output is never escaped.
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)


def _now(layout: str) -> str:
    return datetime.datetime.now().astimezone().strftime(layout)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


def render(source: str, variables: dict[str, Any]) -> dict[str, str]:
    """`{"text": …}`, or `{"refused": message}` by the template, or `{"failed": kind}`."""
    try:
        pieces, size = [], 0
        for piece in _compiled(source).generate(**variables):
            size += len(piece)
            if size > _OUTPUT_CHARACTERS:
                raise _OutputTooLarge
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except TemplateRefusal as refusal:
        return {"refused": str(refusal)[:1000]}
    except _OutputTooLarge:
        return {"failed": "output too large"}
    except Exception as error:  # whatever a template does to its input
        return {"failed": type(error).__name__}


def answer(request: dict[str, Any]) -> dict[str, str]:
    """What `child_main` calls for each request."""
    return render(request["source"], request["variables"])
