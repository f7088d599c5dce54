"""Chat messages → prompt text by the operator's Jinja template. Clients cannot send or change a template."""

from __future__ import annotations

import dataclasses

from millrace.worker.v1 import worker_service_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A model's template and the texts of its special tokens (`bos_token` …), as its card gives them."""

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()


def template_of(card: worker_service_pb2.ModelCard) -> ChatTemplate | None:
    """The template of a card, or None where the model has none."""
    if not card.chat_template:
        return None
    return ChatTemplate(card.chat_template, tuple(sorted(card.special_tokens.items())))
