"""Typed settings from the environment: the one file that reads it.

A service declares a frozen dataclass whose fields are `setting(...)`; `load` reads `MILLRACE_<FIELD>` for each, reports
every problem at once as ConfigError (one sentence a line), and refuses MILLRACE_* variables that no field knows.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

PREFIX = "MILLRACE_"
# Read by the shell around the services, not by a service's own config.
SHARED_NAMES = frozenset({"MILLRACE_CRASH_AT", "MILLRACE_HOME"})

ConfigT = TypeVar("ConfigT")


class ConfigError(Exception):
    """The environment cannot be understood; `str()` has one sentence a line."""


def setting(
    default: Any = dataclasses.MISSING, *, parse: Callable[[str], Any] = str, help: str, secret: bool = False
) -> Any:
    """Declare one setting. `parse` turns the variable's text into the field's value and raises ValueError."""
    return dataclasses.field(default=default, metadata={"parse": parse, "help": help, "secret": secret})


def env_name(field_name: str) -> str:
    """`redis_url` → `MILLRACE_REDIS_URL`."""
    return PREFIX + field_name.upper()


def load(config_class: type[ConfigT], environ: Mapping[str, str] | None = None) -> ConfigT:
    """Build `config_class` from the environment. Raises ConfigError that lists all problems."""
    source = os.environ if environ is None else environ
    problems: list[str] = []
    values: dict[str, Any] = {}
    fields = {env_name(f.name): f for f in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    for name in sorted(n for n in source if n.startswith(PREFIX) and n not in fields and n not in SHARED_NAMES):
        near = difflib.get_close_matches(name, fields, n=1)
        problems.append(f"{name} is not a setting of this service" + (f"; did you mean {near[0]}?" if near else "."))
    for name, field in fields.items():
        if name in source:
            try:
                values[field.name] = field.metadata["parse"](source[name])
            except ValueError as error:
                shown = "***" if field.metadata["secret"] else repr(source[name])
                problems.append(f"{name}={shown}: {error}.")
        elif field.default is dataclasses.MISSING:
            problems.append(f"{name} is required: {field.metadata['help']}.")
    if problems:
        raise ConfigError("\n".join(problems))
    return config_class(**values)


def describe(config: object) -> dict[str, str]:
    """Effective settings by variable name, secrets redacted (`--print-config`)."""
    return {
        env_name(f.name): "***" if f.metadata["secret"] and getattr(config, f.name) else str(getattr(config, f.name))
        for f in dataclasses.fields(config)  # type: ignore[arg-type]
    }


def parse_bool(text: str) -> bool:
    """true/false, 1/0, yes/no, on/off."""
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off"}:
        return False
    raise ValueError("expected true or false")


def parse_positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError("expected a whole number of at least 1")
    return value


def parse_seconds(text: str) -> float:
    """A number of seconds, at least 0 and below a day."""
    value = float(text)
    if not 0.0 <= value < 86_400.0:
        raise ValueError("expected a number of seconds, at least 0")
    return value


def parse_address(text: str) -> str:
    """`host:port` or `unix:/path`; the text is returned unchanged."""
    if text.startswith("unix:") and len(text) > len("unix:"):
        return text
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError("expected host:port or unix:/path")
    return text
