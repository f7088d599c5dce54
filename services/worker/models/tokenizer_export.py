"""Vocabulary of a model file → one Hugging Face `tokenizers` JSON, so that a gateway needs no model files.

Owns the table of pre-tokenizers; refuses one it does not know, because a guess gives wrong ids silently.
Control tokens are added tokens flagged special: with `encode_special_tokens` set, text never becomes one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

from services.worker.models import gguf_metadata as meta
from services.worker.models.errors import ModelLoadError
from services.worker.models.tokenizer_pieces import (
    PRE_TOKENIZERS,
    PreTokenizer,
    added_token,
    bpe_document,
    sentencepiece_document,
    sentencepiece_merges,
)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# Control tokens that end a turn in some family, by their text; the id is believed only when the token is a control.
END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "<|return|>",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerExport:
    """All a gateway needs to template and tokenise.

    `json` is a `tokenizers` file, `digest` its SHA-256. `special_tokens` are (template name, text) pairs such as
    ("bos_token", "<s>"). `control_tokens` are (text, id) of every token that text must never become.
    """

    json: bytes
    digest: bytes
    vocab_size: int
    chat_template: str
    bos_token_id: int | None
    add_bos: bool
    eos_token_ids: frozenset[int]
    special_tokens: tuple[tuple[str, str], ...]
    control_tokens: tuple[tuple[str, int], ...]
    longest_token_bytes: int


def tokenizer_from_gguf(metadata: meta.Metadata) -> TokenizerExport:
    """Build the export from `tokenizer.*` keys; raises ModelLoadError for an unknown or broken vocabulary."""
    tokens = meta.text_list(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError("the file holds no vocabulary (tokenizer.ggml.tokens)")
    kinds = [int(kind) for kind in meta.number_list(metadata, "tokenizer.ggml.token_type")] or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelLoadError(f"the vocabulary has {len(tokens)} tokens but {len(kinds)} token types")
    if len(set(tokens)) != len(tokens):
        raise ModelLoadError("two tokens of the vocabulary have the same text")
    model = meta.optional_text(metadata, "tokenizer.ggml.model") or "unnamed"
    added = [
        added_token(index, token, special=kind == _CONTROL)
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    if model == "gpt2":
        document = _byte_level(metadata, tokens, added)
    elif model == "llama":
        document = _sentencepiece(metadata, tokens, added)
    else:
        raise ModelLoadError(f"the tokenizer model {model} is not supported (supported: gpt2, llama)")
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    return _export(metadata, tokens, kinds, text)


def _byte_level(metadata: meta.Metadata, tokens: list[str], added: list[dict[str, object]]) -> dict[str, object]:
    pre = meta.optional_text(metadata, "tokenizer.ggml.pre") or "absent"
    known: PreTokenizer | None = PRE_TOKENIZERS.get(pre)
    if known is None:
        raise ModelLoadError(f"the pre-tokenizer {pre} is not known, so token ids cannot be trusted")
    merges = []
    for merge in meta.text_list(metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise ModelLoadError(f"the merge {merge!r} is not two tokens")
        merges.append((left, right))
    vocabulary = set(tokens)
    for left, right in merges:
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelLoadError(f"the merge {left!r} {right!r} names a token that the vocabulary lacks")
    return bpe_document(tokens, merges, added, known)


def _sentencepiece(metadata: meta.Metadata, tokens: list[str], added: list[dict[str, object]]) -> dict[str, object]:
    scores = meta.number_list(metadata, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelLoadError(f"the vocabulary has {len(tokens)} tokens but {len(scores)} scores")
    merges = sentencepiece_merges(tokens, scores)
    prefix = meta.optional_bool(metadata, "tokenizer.ggml.add_space_prefix")
    unknown = meta.optional_int(metadata, "tokenizer.ggml.unknown_token_id")
    unknown_text = tokens[unknown] if unknown is not None and 0 <= unknown < len(tokens) else None
    return sentencepiece_document(tokens, merges, added, unknown_text, space_prefix=prefix is not False)


def _export(metadata: meta.Metadata, tokens: list[str], kinds: list[int], text: bytes) -> TokenizerExport:
    bos = _token_id(metadata, "bos", tokens)
    ends = {_token_id(metadata, name, tokens) for name in ("eos", "eot", "eom")} - {None}
    controls = tuple(
        (token, index) for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == _CONTROL
    )
    ends |= {index for token, index in controls if token in END_TEXTS}
    named = []
    for name in ("bos", "eos", "unknown", "padding"):
        index = _token_id(metadata, name, tokens)
        if index is not None:
            short = {"unknown": "unk", "padding": "pad"}.get(name, name)
            named.append((f"{short}_token", tokens[index]))
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    add_bos = meta.optional_bool(metadata, "tokenizer.ggml.add_bos_token")
    return TokenizerExport(
        json=text,
        digest=hashlib.sha256(text).digest(),
        vocab_size=len(tokens),
        chat_template=meta.optional_text(metadata, "tokenizer.chat_template") or "",
        bos_token_id=bos,
        add_bos=(sentencepiece if add_bos is None else add_bos) and bos is not None,
        eos_token_ids=frozenset(index for index in ends if index is not None),
        special_tokens=tuple(named),
        control_tokens=controls,
        longest_token_bytes=max(
            len(token.encode()) if sentencepiece or kind in (_CONTROL, _USER_DEFINED) else len(token)
            for token, kind in zip(tokens, kinds, strict=True)
        ),
    )


def _token_id(metadata: meta.Metadata, name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = meta.optional_int(metadata, key)
    if index is not None and not 0 <= index < len(tokens):
        raise ModelLoadError(f"{key} is {index}, outside the vocabulary of {len(tokens)}")
    return index
