"""Text ⇄ token ids of one served model, from the tokenizer file of its worker's card. Pure; no I/O.

User text never becomes a control token: only the template's own control tokens do (`encode_rendered`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from millrace.worker.v1 import worker_service_pb2


class TokenizerError(Exception):
    """The tokenizer file cannot be used; one sentence."""


class Tokenizer(Protocol):
    """What the gateway needs of a tokenizer. All methods are thread-safe and block for the length of the text."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Text of every control token, longest first."""
        ...

    def encode(self, text: str) -> array[int]:
        """Ids of plain text; control tokens written in it stay text. No BOS is added."""
        ...

    def encode_rendered(self, rendered: str, guard: str) -> array[int]:
        """Ids of a rendered chat template.

        Control tokens count where they are whole; where `guard` splits them they are text, and `guard` is dropped.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, also of a control token; empty for an id outside the vocabulary."""
        ...

    def visible_bytes(self, token_id: int) -> bytes:
        """As `token_bytes`, but empty for control tokens: what a client sees."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Visible text of the ids; bytes that are not UTF-8 become U+FFFD."""
        ...


def load_tokenizer(card: worker_service_pb2.ModelCard, tokenizer_json: bytes) -> Tokenizer:
    """The tokenizer of a card; `tokenizer_json` may be empty for the fake runner. Blocks. Raises TokenizerError."""
    # Both know the Tokenizer protocol of this file, so they are imported where they are chosen.
    from services.gateway.echo_tokenizer import EchoTokenizer
    from services.gateway.file_tokenizer import FileTokenizer

    if not tokenizer_json and card.runner == "fake":
        return EchoTokenizer(card.vocab_size)
    if not tokenizer_json:
        raise TokenizerError("The worker sent an empty tokenizer file.")
    return FileTokenizer(tokenizer_json, vocab_size=card.vocab_size)
