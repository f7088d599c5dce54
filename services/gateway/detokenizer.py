"""Token bytes → text, piece by piece; never half a character. One per choice; called by text_stream."""

from __future__ import annotations

import codecs


class Detokenizer:
    """Incremental UTF-8: equal to decoding all bytes at once, however they are cut."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Text that `data` completes; an unfinished character is held. What is not UTF-8 becomes U+FFFD."""
        return self._decoder.decode(data)

    @property
    def pending_byte_count(self) -> int:
        """Bytes held of an unfinished character, 0 to 3."""
        return len(self._decoder.getstate()[0])

    def flush(self) -> str:
        """The held bytes as U+FFFD; the detokenizer is then empty."""
        return self._decoder.decode(b"", final=True)
