"""A `tokenizers` JSON document as a Tokenizer in which no text can spell a control token. Called by `load_tokenizer`.

Each control token is renamed, in vocabulary and added tokens, to an alias that no client can guess; ids stay. A
rendered template has its own control tokens replaced by aliases, so that one plain encode gives the usual ids.
"""

from __future__ import annotations

import json
import re
import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tokenizers

from services.gateway.tokenizer import TokenizerError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


class FileTokenizer:
    """Byte-level BPE, and SentencePiece-style BPE or unigram with byte fallback."""

    def __init__(self, document: bytes, *, vocab_size: int) -> None:
        """Raises TokenizerError for a document that is broken or of another kind."""
        try:
            root = json.loads(document)
            added = root["added_tokens"]
            specials = {str(t["content"]): int(t["id"]) for t in added if t["special"]}
            pieces = _pieces(root["model"]["vocab"]) | {int(t["id"]): str(t["content"]) for t in added}
            piece_bytes = _piece_decoder(root)
            plain = {int(t["id"]) for t in added}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokenizerError("The tokenizer file is not a tokenizers document.") from error
        table = [b""] * max(vocab_size, max(pieces, default=-1) + 1)
        for token_id, piece in pieces.items():
            table[token_id] = piece.encode("utf-8", "replace") if token_id in plain else piece_bytes(piece)
        self._bytes = table
        self._visible = list(table)
        for token_id in specials.values():
            self._visible[token_id] = b""
        self._size = vocab_size or len(table)
        self._specials = tuple(sorted(specials, key=len, reverse=True))
        nonce = secrets.token_hex(12)
        self._alias = {text: f"\ue000{nonce}.{token_id}\ue001" for text, token_id in specials.items()}
        self._special_pattern = re.compile("|".join(map(re.escape, self._specials)) or r"(?!)")
        self._tokenizer = self._build(root)

    def _build(self, root: Any) -> tokenizers.Tokenizer:
        _rename(root, self._alias)
        # Ours alone adds BOS, and an answer is never cut or padded.
        root["post_processor"] = root["truncation"] = root["padding"] = None
        try:
            return tokenizers.Tokenizer.from_str(json.dumps(root))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError("The tokenizer file cannot be loaded.") from error

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self._size

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Text of every control token, longest first."""
        return self._specials

    def encode(self, text: str) -> array[int]:
        """Ids of plain text."""
        return array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_rendered(self, rendered: str, guard: str) -> array[int]:
        """Ids of a rendered template."""
        aliased = self._special_pattern.sub(lambda found: self._alias[found[0]], rendered)
        return self.encode(aliased.replace(guard, "") if guard else aliased)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def visible_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, none for a control token."""
        return self._visible[token_id] if 0 <= token_id < len(self._visible) else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Visible text."""
        return b"".join(map(self.visible_bytes, token_ids)).decode("utf-8", "replace")


def _pieces(vocab: dict[str, int] | list[list[Any]]) -> dict[int, str]:
    if isinstance(vocab, dict):
        return {token_id: piece for piece, token_id in vocab.items()}
    return {token_id: str(entry[0]) for token_id, entry in enumerate(vocab)}


def _rename(root: Any, alias: dict[str, str]) -> None:
    model = root["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {alias.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:
        model["vocab"] = [[alias.get(entry[0], entry[0]), *entry[1:]] for entry in vocab]
    if "merges" in model:
        # A merge that ends in (or starts from) a control token would let text spell it.
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, alias)]
    if model.get("unk_token") in alias:
        model["unk_token"] = alias[model["unk_token"]]
    for token in root["added_tokens"]:
        if token["special"]:
            token["content"] = alias[token["content"]]
            token["normalized"] = False


def _touches(merge: str | list[str], alias: dict[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in alias or right in alias or left + right in alias


def _piece_decoder(root: Any) -> Callable[[str], bytes]:
    kinds = set(_kinds(root.get("decoder")))
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"Metaspace", "ByteFallback"}:
        return _space_marked
    raise TokenizerError(f"The tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported.")


def _kinds(decoder: Any) -> Iterable[str]:
    if decoder is None:
        return
    yield decoder["type"]
    for inner in decoder.get("decoders", ()):
        yield from _kinds(inner)


def _space_marked(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE_MARK, " ").encode("utf-8", "replace")


def _byte_of_character() -> dict[str, int]:
    # GPT-2's table: printable bytes stand for themselves, the rest follow from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for offset, byte in enumerate(b for b in range(256) if b not in set(printable)):
        table[chr(0x100 + offset)] = byte
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")
