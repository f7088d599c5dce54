"""The parts of a `tokenizers` JSON document: regular expressions by pre-tokenizer name, BPE and SentencePiece shapes.

Pure functions of lists and strings. Called by `tokenizer_export` only.
Sources of the expressions: the original tokenizers' own `tokenizer.json`, named as llama.cpp names them.
"""

from __future__ import annotations

import dataclasses

JsonObject = dict[str, object]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclasses.dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Expressions applied one after the other, each match isolated; `ignore_merges` takes whole words first."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    normalise_nfc: bool = False


_DIGITS_THEN_GPT2 = PreTokenizer((_DIGIT, _GPT2))
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "llama-bpe": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "llama3": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "qwen2": PreTokenizer((_QWEN2,), normalise_nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
}


def added_token(index: int, content: str, *, special: bool) -> JsonObject:
    """One entry of `added_tokens`."""
    return {
        "id": index,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def bpe_document(
    tokens: list[str], merges: list[tuple[str, str]], added: list[JsonObject], pre: PreTokenizer
) -> JsonObject:
    """Byte-level BPE."""
    splits: list[JsonObject] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in pre.expressions
    ]
    byte_level: JsonObject = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    model = _bpe_model(tokens, merges)
    model["ignore_merges"] = pre.ignore_merges
    normalizer: JsonObject | None = {"type": "NFC"} if pre.normalise_nfc else None
    return _document(added, normalizer, {"type": "Sequence", "pretokenizers": [*splits, byte_level]}, byte_level, model)


def sentencepiece_document(
    tokens: list[str],
    merges: list[tuple[str, str]],
    added: list[JsonObject],
    unknown: str | None,
    *,
    space_prefix: bool,
) -> JsonObject:
    """SentencePiece-style BPE with byte fallback."""
    replace: JsonObject = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers = ([{"type": "Prepend", "prepend": "▁"}] if space_prefix else []) + [replace]
    decoders: list[JsonObject] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if space_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe_model(tokens, merges)
    model |= {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    normalizer: JsonObject = {"type": "Sequence", "normalizers": normalizers}
    return _document(added, normalizer, None, {"type": "Sequence", "decoders": decoders}, model)


def sentencepiece_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """All ways to make a token of two others, best score of the result first (SentencePiece's own order)."""
    ids = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-score, left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _bpe_model(tokens: list[str], merges: list[tuple[str, str]]) -> JsonObject:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [list(pair) for pair in merges],
    }


def _document(
    added: list[JsonObject],
    normalizer: JsonObject | None,
    pre_tokenizer: JsonObject | None,
    decoder: JsonObject,
    model: JsonObject,
) -> JsonObject:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
