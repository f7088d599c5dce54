"""Tokenizer of the echo model (PROTOCOL §14): token i reads `t<i> `. Called by `load_tokenizer` only."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

from services.gateway.tokenizer import TokenizerError

_OWN_WORD = re.compile(r"t(0|[1-9][0-9]{0,9}) ")


class EchoTokenizer:
    """`t<i> ` is id i; every other character is one id a UTF-8 byte
    (wrapped into a smaller vocabulary). It has no control tokens."""

    special_texts: tuple[str, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        """Raises TokenizerError for an empty vocabulary."""
        if vocab_size < 1:
            raise TokenizerError("The echo model has no vocabulary.")
        self.vocab_size = vocab_size

    def encode(self, text: str) -> array[int]:
        """Ids of text."""
        ids = array("I")
        at = 0
        while at < len(text):
            word = _OWN_WORD.match(text, at)
            if word is not None and int(word[1]) < self.vocab_size:
                ids.append(int(word[1]))
                at = word.end()
            else:
                ids.extend(byte % self.vocab_size for byte in text[at].encode("utf-8", "replace"))
                at += 1
        return ids

    def encode_rendered(self, rendered: str, guard: str) -> array[int]:
        """As `encode`: nothing in a rendered template is a control token."""
        return self.encode(rendered.replace(guard, "") if guard else rendered)

    def token_bytes(self, token_id: int) -> bytes:
        """`t<id> `; empty outside the vocabulary."""
        return b"t%d " % token_id if 0 <= token_id < self.vocab_size else b""

    def visible_bytes(self, token_id: int) -> bytes:
        """As `token_bytes`."""
        return self.token_bytes(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The words of the ids, joined."""
        return b"".join(map(self.token_bytes, token_ids)).decode()
