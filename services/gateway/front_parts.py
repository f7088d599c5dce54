"""What both doors are built of. Values only; wiring.py fills it."""

from __future__ import annotations

import dataclasses

from services.common.clock import Clock
from services.gateway.batch_store import BatchStore, FileStore
from services.gateway.generation import Generator, KeyRing, ModelDirectory
from services.gateway.response_store import ResponseStore
from services.gateway.resumable import ResumableAnswers
from services.gateway.usage_reader import UsageReader
from services.gateway.validation import Validator


@dataclasses.dataclass(frozen=True, slots=True)
class FrontParts:
    """One validator for every door. `answers` and the stores are started and closed by wiring."""

    generator: Generator
    directory: ModelDirectory
    keyring: KeyRing
    clock: Clock
    validator: Validator
    answers: ResumableAnswers
    responses: ResponseStore
    files: FileStore
    batches: BatchStore
    usage: UsageReader
