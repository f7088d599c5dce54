"""Settings of the worker: the only file of this service that names environment variables.

The engine's knobs share one variable, so that a worker has few settings; they keep the names the field knows.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from services.common.config import parse_address, parse_positive, parse_seconds, setting
from services.common.redis_url import REDIS_URL, parse_redis_url
from services.common.release import parse_keys


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class SpeculationSetting:
    """How tokens are guessed ahead: `off`, `ngram`, `draft:<model>` or `self:<layers>` of the served model."""

    kind: str = "off"
    model: str | None = None
    layers: int | None = None

    def __repr__(self) -> str:
        argument = self.model if self.model is not None else self.layers
        return self.kind if argument is None else f"{self.kind}:{argument}"


def parse_speculation(text: str) -> SpeculationSetting:
    """Raises ValueError for anything but the four forms."""
    kind, separator, argument = text.partition(":")
    if kind in ("off", "ngram") and not separator:
        return SpeculationSetting(kind)
    if kind == "draft" and argument:
        return SpeculationSetting(kind, model=argument)
    if kind == "self" and separator:
        return SpeculationSetting(kind, layers=parse_positive(argument))
    raise ValueError("expected off, ngram, draft:<model> or self:<layers>")


class WorkerRole(enum.Enum):
    """Which part of a request a worker does."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"

    def __repr__(self) -> str:
        return self.value


def parse_role(text: str) -> WorkerRole:
    """Raises ValueError for anything but the three names."""
    try:
        return WorkerRole(text)
    except ValueError:
        raise ValueError("expected aggregated, prefill or decode") from None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSettings:
    """Knobs of the engine; None or "auto" lets the model and the machine decide.

    `role`: `aggregated` does everything, `prefill` computes blocks of prompts for others, `decode` may have them so
    computed. Blocks of peers land in `kv_staging_bytes` of memory; each side gives up `kv_lease_ms` after the last sign
    of the other. `kv_transfer`: `nixl`, `grpc`, or `auto`, which is NIXL where it is installed and TLS is off.

    `num_blocks` fixes the KV pool instead of `gpu_memory_utilization`. Cached blocks that the pool gives up go to
    `host_kv_bytes` of memory, then to `disk_kv_bytes` of files in the folder `disk_kv_path`; 0 turns a tier off.
    `tpot_target_ms` bounds how long prefills may make a step that running answers wait for (or by a tenth where these
    take longer alone); 0 does not bound it. `max_draft_count` are the tokens guessed for a row
    in a step, `max_draft_batch` the rows above which nothing is guessed; `speculation` says how.

    `release` is the file of a release manifest signed with `release_key`: the worker serves that or does not start.
    """

    role: WorkerRole = WorkerRole.AGGREGATED
    kv_staging_bytes: int = 128 << 20
    kv_lease_ms: int = 3_000
    kv_transfer: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int = 256
    tpot_target_ms: int = 200
    gpu_memory_utilization: float = 0.5
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    threads: int | None = None
    host_kv_bytes: int = 0
    disk_kv_bytes: int = 0
    disk_kv_path: str = ""
    speculation: SpeculationSetting = SpeculationSetting()
    max_draft_count: int = 4
    max_draft_batch: int = 4
    release: str = ""
    release_key: str = ""


def parse_transfer(text: str) -> str:
    """Raises ValueError for anything but the three names."""
    if text not in ("auto", "grpc", "nixl"):
        raise ValueError("expected auto, grpc or nixl")
    return text


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise ValueError("expected a number above 0 and at most 1")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("expected a whole number, 0 or more")
    return value


def _release_key(text: str) -> str:
    if len(parse_keys(text)) != 1:
        raise ValueError("expected one public key")
    return text


_Knob = int | float | str | SpeculationSetting | WorkerRole
_KNOBS: dict[str, Callable[[str], _Knob]] = {
    "role": parse_role,
    "kv_staging_bytes": parse_positive,
    "kv_lease_ms": parse_positive,
    "kv_transfer": parse_transfer,
    "max_model_len": parse_positive,
    "max_num_seqs": parse_positive,
    "max_num_batched_tokens": parse_positive,
    "max_prefill_chunk": parse_positive,
    "tpot_target_ms": _whole,
    "gpu_memory_utilization": _fraction,
    "dtype": str,
    "kv_cache_dtype": str,
    "block_size": parse_positive,
    "num_blocks": parse_positive,
    "threads": parse_positive,
    "host_kv_bytes": _whole,
    "disk_kv_bytes": _whole,
    "disk_kv_path": str,
    "speculation": parse_speculation,
    "max_draft_count": parse_positive,
    "max_draft_batch": parse_positive,
    "release": str,
    "release_key": _release_key,
}


def parse_engine(text: str) -> EngineSettings:
    """`name=value,name=value`. Raises ValueError that names the first knob that is unknown or out of range."""
    values: dict[str, _Knob] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, separator, value = (item.strip() for item in part.partition("="))
        if not separator or name not in _KNOBS:
            raise ValueError(f"{part!r} is not a knob; expected name=value with one of {', '.join(_KNOBS)}")
        if name in values:
            raise ValueError(f"{name} is given twice")
        try:
            values[name] = _KNOBS[name](value)
        except ValueError as error:
            raise ValueError(f"{name}={value}: {error}") from error
    if values.get("disk_kv_bytes") and not values.get("disk_kv_path"):
        raise ValueError("disk_kv_bytes needs disk_kv_path, a folder for this worker alone")
    if bool(values.get("release")) != bool(values.get("release_key")):
        raise ValueError("release needs release_key, the public key it is signed with, and the other way round")
    return EngineSettings(**values)  # type: ignore[arg-type]


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 86_400.0:
        raise ValueError("expected a number of at least 0")
    return value


def parse_name(text: str) -> str:
    """A name that may stand in keys and in `model@version`. Raises ValueError."""
    if not text or len(text) > 128 or any(c in "{}@:, " or not c.isprintable() for c in text):
        raise ValueError("expected 1 to 128 printable characters without spaces or any of {}@:,")
    return text


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything a worker can be told from outside."""

    redis_url: str = setting(REDIS_URL, parse=parse_redis_url, secret=True, help="Redis of registry and terminals")
    grpc_listen: str = setting("127.0.0.1:0", parse=parse_address, help="host:port (0 = any) or unix:/path")
    advertise: str = setting("", help="address that routers and gateways dial; empty means the bound one")
    metrics_listen: str = setting("127.0.0.1:0", parse=parse_address, help="host:port of /metrics and /healthz")
    model: str = setting("smollm2-135m", help="a known model, `echo`, or the path of a GGUF file or folder")
    model_name: str = setting("", parse=parse_name, help="name to serve the model under; empty means its own")
    model_version: str = setting("1", parse=parse_name, help="version of the model that this worker serves")
    pool: str = setting("default", parse=parse_name, help="named pool that this worker takes work from")
    engine: EngineSettings = setting(  # noqa: RUF009 - a field specifier over a frozen value
        EngineSettings(), parse=parse_engine, help="engine knobs, e.g. max_num_seqs=32,max_model_len=4096,dtype=float32"
    )
    echo_step_ms: float = setting(1.0, parse=_not_negative, help="time one step of the echo model takes")
    tls_dir: str = setting("", help="Folder of ca.crt, tls.crt, tls.key for TLS between services; empty for none")
    drain_grace_s: float = setting(30.0, parse=parse_seconds, help="seconds that running streams get at the end")
    data_dir: str = setting("", help="folder for compiled kernels; empty means the user's cache folder")
    log_level: str = setting("info", help="debug, info, warning or error")
    otlp_endpoint: str = setting("", help="OTLP gRPC endpoint of a trace collector; empty turns traces off")
