"""What both doors are built of. Values only; wiring.py fills it."""

from __future__ import annotations

import dataclasses

from services.common.clock import Clock
from services.gateway.batch_store import BatchStore, FileStore
from services.gateway.generation import Generator, KeyRing, ModelDirectory
from services.gateway.grammar_checker import GrammarChecker
from services.gateway.response_store import ResponseStore
from services.gateway.resumable import ResumableAnswers
from services.gateway.template_renderer import TemplateRenderer


@dataclasses.dataclass(frozen=True, slots=True)
class FrontParts:
    """`renderer`, `grammars`, `answers` and the stores are started and closed by wiring."""

    generator: Generator
    directory: ModelDirectory
    keyring: KeyRing
    clock: Clock
    renderer: TemplateRenderer
    grammars: GrammarChecker
    answers: ResumableAnswers
    responses: ResponseStore
    files: FileStore
    batches: BatchStore
