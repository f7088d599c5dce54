"""Says before the queue whether a structured-output constraint can be kept: limits first, then a trial compile.

The compile runs in a child process with a CPU limit (S8). Owned by wiring: `close` ends the child.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from millrace.common.v1 import common_pb2

from services.common.errors import InvalidRequest
from services.common.grammar_source import LIMITS, GrammarError, grammar_source
from services.gateway.child_process import ChildDied, ChildProcess
from services.gateway.grammar_limits import check_grammar_limits
from services.gateway.limits import Limits
from services.gateway.request_draft import GrammarDraft

_CPU_SECONDS = 1.0
_REMEMBERED = 1_024


class GrammarChecker:
    """One compile at a time. Remembers what was found sound, by tenant, so that none learns what another sent."""

    def __init__(self, *, cpu_seconds: float = _CPU_SECONDS) -> None:
        self._child = ChildProcess("grammar_child.py", cpu_seconds=cpu_seconds)
        self._sound: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, tenant: str, grammar: GrammarDraft, limits: Limits) -> None:
        """Raises InvalidRequest or Unsupported, the field named, for a grammar that no worker could keep to."""
        check_grammar_limits(grammar, limits)
        kind = common_pb2.GrammarKind.Name(grammar.kind).removeprefix("GRAMMAR_KIND_").lower()
        try:
            source = grammar_source(kind, grammar.text, grammar.choices)
        except GrammarError as error:
            raise _refusal(grammar, str(error)) from None
        digest = hashlib.sha256(f"{tenant}\0{source}".encode("utf-8", "surrogatepass")).digest()
        if digest in self._sound:
            self._sound.move_to_end(digest)
            return
        try:
            answer = await self._child.ask({"source": source, "limits": LIMITS})
        except ChildDied:
            raise _refusal(grammar, "it takes too much to compile") from None
        if "refused" in answer:
            raise _refusal(grammar, answer["refused"])
        self._sound[digest] = None
        if len(self._sound) > _REMEMBERED:
            self._sound.popitem(last=False)

    async def close(self) -> None:
        """End the child."""
        await self._child.close()


def _refusal(grammar: GrammarDraft, reason: str) -> InvalidRequest:
    return InvalidRequest(f"`{grammar.field}` cannot be used: {reason}.", param=grammar.field)
