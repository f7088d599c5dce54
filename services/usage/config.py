"""Settings of the usage service: the only file of this service that names environment variables."""

from __future__ import annotations

import dataclasses
import re

from services.common.config import parse_address, parse_positive, parse_seconds, setting
from services.common.redis_url import REDIS_URL, parse_redis_url
from services.usage.release_gate import check_keys

_SECRET = re.compile(r"mr_[0-9A-Za-z]{1,32}_[0-9A-Za-z]{16,128}")
_DATABASES = {"sqlite", "postgresql", "postgres", "postgresql+psycopg"}


def parse_database_url(text: str) -> str:
    """Check the form of a database's address; returns it unchanged. Raises ValueError.

    Loads no driver: the command line reads settings too.
    """
    scheme, separator, place = text.partition("://")
    if not (scheme and separator):
        raise ValueError("expected sqlite:///path or postgresql://user:password@host:port/database")
    if scheme not in _DATABASES:
        raise ValueError(f"{scheme} databases are not supported; use sqlite or postgresql")
    if scheme == "sqlite" and place.partition("?")[0].lstrip("/") in {"", ":memory:"}:
        raise ValueError("an SQLite ledger needs a file, for example sqlite:///usage.db")
    return text


def check_secret(secret: str) -> str:
    """Check the form of a secret that an operator chose; returns it. Raises ValueError."""
    if secret and _SECRET.fullmatch(secret) is None:
        raise ValueError("expected mr_<name>_<at least 16 letters and digits>")
    return secret


@dataclasses.dataclass(frozen=True, slots=True)
class UsageConfig:
    """Everything the usage service can be told from outside."""

    redis_url: str = setting(
        REDIS_URL, parse=parse_redis_url, secret=True, help="Redis of usage streams and key copies"
    )
    database_url: str = setting(
        "sqlite:///usage.sqlite3",
        parse=parse_database_url,
        secret=True,
        help="sqlite:///path or postgresql://user:password@host:port/database",
    )
    data_dir: str = setting("millrace-usage", help="folder of the key that signs exports and days")
    grpc_listen: str = setting("127.0.0.1:0", parse=parse_address, help="host:port (0 = any) or unix:/path")
    admin_http_listen: str = setting("127.0.0.1:0", parse=parse_address, help="host:port of the administrators' API")
    metrics_listen: str = setting("127.0.0.1:0", parse=parse_address, help="host:port of /metrics and /healthz")
    batch_size: int = setting(1_024, parse=parse_positive, help="most events a transaction")
    admin_token: str = setting(
        "", secret=True, help="bearer token of the administrator root, who makes keys for others; empty: no root"
    )
    bootstrap_key: str = setting(
        "", parse=check_secret, secret=True, help="API key of the tenant demo, created at start; empty for none"
    )
    release_keys: str = setting(
        "", parse=check_keys, help="public keys that releases may be signed with, by commas; empty: rollouts are forced"
    )
    tls_dir: str = setting("", help="Folder of ca.crt, tls.crt, tls.key for TLS between services; empty for none")
    drain_grace_s: float = setting(5.0, parse=parse_seconds, help="seconds that running calls get at the end")
    log_level: str = setting("info", help="debug, info, warning or error")
    otlp_endpoint: str = setting("", help="OTLP gRPC endpoint of a trace collector; empty turns traces off")
