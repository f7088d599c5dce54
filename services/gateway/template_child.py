"""The child process that renders chat templates: reads one request at a time from stdin, answers on stdout.

Each message is 4 bytes of length (big endian) and a JSON object. A render that uses up its CPU second dies by SIGPROF.
Imports nothing of the platform; started by template_renderer only.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import signal
import struct
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_CPU_SECONDS = 1.0
_OUTPUT_CHARACTERS = 8 * 1024 * 1024
_MEMORY_BYTES = 1024 * 1024 * 1024


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


def main() -> int:
    """Serve until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(4):
        request = json.loads(source.read(struct.unpack(">I", header)[0]))
        signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
        answer = render(request["source"], request["variables"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        payload = json.dumps(answer).encode()
        sink.write(struct.pack(">I", len(payload)) + payload)
        sink.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
