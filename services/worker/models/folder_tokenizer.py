"""tokenizer.json and its neighbours in a model folder → TokenizerExport.

Owns what is taken from which file. The post-processor goes: the gateway adds the one BOS itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from services.worker.models import gguf_metadata as meta
from services.worker.models.errors import ModelLoadError
from services.worker.models.json_file import read_bounded, read_object, section
from services.worker.models.model_config import MAX_VOCAB
from services.worker.models.tokenizer_export import END_TEXTS, TokenizerExport

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclasses.dataclass(frozen=True, slots=True)
class _Added:
    token_id: int
    text: str
    special: bool


def tokenizer_from_folder(folder: Path, settings: dict[str, object]) -> TokenizerExport:
    """Read the tokenizer of `folder` whose config.json is `settings`; raises ModelLoadError."""
    document = read_object(folder / "tokenizer.json")
    options = read_object(folder / "tokenizer_config.json", optional=True)
    generation = read_object(folder / "generation_config.json", optional=True)
    vocabulary = _vocabulary(document)
    added = _added(document)
    ids = {**vocabulary, **{token.text: token.token_id for token in added}}
    named = tuple((name, text) for name in _NAMES if (text := _text_of(options, name)) is not None)
    bos = _text_of(options, "bos_token")
    bos_id = ids.get(bos) if bos is not None else meta.optional_int(settings, "bos_token_id")
    wants_bos = meta.optional_bool(options, "add_bos_token")
    if wants_bos is None:
        wants_bos = bos is not None and _leads_with(section(document, "post_processor"), bos)
    eos = _text_of(options, "eos_token")
    ends = {*_id_list(generation, "eos_token_id"), *_id_list(settings, "eos_token_id")}
    ends |= {token.token_id for token in added if token.special and token.text in END_TEXTS}
    if eos in ids:
        ends.add(ids[eos])
    size = max(ids.values()) + 1
    if any(not 0 <= end < size for end in ends):
        raise ModelLoadError(f"an end-of-text id {max(ends)} is outside the vocabulary of {size}")
    exported = json.dumps({**document, "post_processor": None}, ensure_ascii=False, separators=(",", ":")).encode()
    byte_level = '"ByteLevel"' in json.dumps(document.get("decoder"))
    lengths = [len(token) if byte_level else len(token.encode()) for token in vocabulary]
    lengths += [len(token.text.encode()) for token in added]
    return TokenizerExport(
        json=exported,
        digest=hashlib.sha256(exported).digest(),
        vocab_size=size,
        chat_template=_chat_template(folder, options),
        bos_token_id=bos_id,
        add_bos=wants_bos and bos_id is not None,
        eos_token_ids=frozenset(ends),
        special_tokens=named,
        control_tokens=tuple((token.text, token.token_id) for token in added if token.special),
        longest_token_bytes=max(lengths),
    )


def _vocabulary(document: dict[str, object]) -> dict[str, int]:
    model = section(document, "model")
    kind = meta.optional_text(model, "type") or "unnamed"
    if kind != "BPE":
        raise ModelLoadError(f"the tokenizer model {kind} of tokenizer.json is not supported (supported: BPE)")
    vocabulary = section(model, "vocab")
    if not 1 <= len(vocabulary) <= MAX_VOCAB:
        raise ModelLoadError(f"tokenizer.json holds {len(vocabulary)} tokens, outside 1 to {MAX_VOCAB}")
    return {token: _checked_id(index, token) for token, index in vocabulary.items()}


def _added(document: dict[str, object]) -> list[_Added]:
    entries = document.get("added_tokens") or []
    if not isinstance(entries, list) or len(entries) > MAX_VOCAB:
        raise ModelLoadError("added_tokens of tokenizer.json is not a list of tokens")
    found = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise ModelLoadError("added_tokens of tokenizer.json is not a list of tokens")
        text = entry["content"]
        found.append(_Added(_checked_id(entry.get("id"), text), text, entry.get("special") is True))
    return found


def _checked_id(value: object, token: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_VOCAB:
        raise ModelLoadError(f"the token {token[:40]!r} of tokenizer.json has no valid id")
    return value


def _text_of(options: dict[str, object], name: str) -> str | None:
    """A special token's text, stored plain or as an object with `content`."""
    value = options.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _id_list(data: dict[str, object], key: str) -> list[int]:
    value = data.get(key)
    found: list[int] = []
    for item in value if isinstance(value, list) else [value]:
        if item is None and not isinstance(value, list):
            continue
        if isinstance(item, bool) or not isinstance(item, int):
            raise ModelLoadError(f"{key} is neither a token id nor a list of them")
        found.append(item)
    return found


def _leads_with(processor: dict[str, object], bos: str) -> bool:
    """Whether the post-processor, or one inside a sequence, puts `bos` in front of a single text."""
    inner = processor.get("processors")
    if isinstance(inner, list):
        return any(_leads_with(each, bos) for each in inner if isinstance(each, dict))
    single = processor.get("single")
    if not isinstance(single, list) or not single or not isinstance(single[0], dict):
        return False
    first = single[0].get("SpecialToken")
    return isinstance(first, dict) and first.get("id") == bos


def _chat_template(folder: Path, options: dict[str, object]) -> str:
    """chat_template.jinja, else the text or the template called "default" in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_bounded(path).decode("utf-8")
        except UnicodeDecodeError:
            raise ModelLoadError("chat_template.jinja is not UTF-8") from None
    value = options.get("chat_template")
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[0].get("template") if named else None
    if value is not None and not isinstance(value, str):
        raise ModelLoadError("chat_template of tokenizer_config.json is not a text")
    return value or ""
