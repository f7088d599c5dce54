"""The form in which the hot copy of a key stands in Redis: JSON of a KeyRecord, fields with their defaults left out."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from services.common.admission_types import KeyRecord, LengthCap, QuotaLimits


def dump_key(key: KeyRecord) -> str:
    """JSON of the record."""
    fields = {f.name: getattr(key, f.name) for f in dataclasses.fields(key)}
    for name in ("limits", "key_limits"):
        fields[name] = {k: v for k, v in dataclasses.asdict(fields[name]).items() if v is not None}
    fields["length_caps"] = {model: cap.row() for model, cap in key.length_caps.items()}
    fields["prices"] = dict(key.prices)
    return json.dumps({name: value for name, value in fields.items() if value not in (None, {}, ())})


def load_key(text: str | bytes) -> KeyRecord:
    """The record that `dump_key` wrote."""
    fields: dict[str, Any] = {"models": (), "scopes": (), **json.loads(text)}
    for name in ("limits", "key_limits"):
        fields[name] = QuotaLimits(**fields.get(name, {}))
    for name in ("models", "scopes"):
        fields[name] = tuple(fields[name])
    fields["length_caps"] = {model: LengthCap(*cap) for model, cap in fields.get("length_caps", {}).items()}
    fields["prices"] = {model: tuple(price) for model, price in fields.get("prices", {}).items()}
    return KeyRecord(**fields)
