"""Where the local stack writes what it runs, so that other commands find it: `<home>/stack.json`."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

_FILE = "stack.json"


@dataclasses.dataclass(frozen=True, slots=True)
class StackState:
    """A running local stack. `processes` maps a service's name to its process id; `pid` is the supervisor."""

    pid: int
    url: str
    grpc_address: str
    usage_address: str
    router_address: str
    model: str
    processes: dict[str, int]
    # Folder of the operator's certificate, empty without TLS between services.
    tls_dir: str = ""
    # Path of the socket at which the stack is told to upgrade.
    control: str = ""


def home_dir() -> Path:
    """`$MILLRACE_HOME`, else `~/.millrace`."""
    return Path(os.environ.get("MILLRACE_HOME") or Path.home() / ".millrace").expanduser().absolute()


def read_state(home: Path | None = None) -> StackState | None:
    """The running stack of this home, or None when none runs."""
    path = (home or home_dir()) / _FILE
    try:
        state = StackState(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return state if process_alive(state.pid) else None


def write_state(home: Path, state: StackState) -> None:
    """Replace the state file in one step."""
    partial = home / f"{_FILE}.new"
    partial.write_text(json.dumps(dataclasses.asdict(state), indent=2) + "\n")
    partial.replace(home / _FILE)


def clear_state(home: Path) -> None:
    """Remove the state file."""
    (home / _FILE).unlink(missing_ok=True)


def process_alive(pid: int) -> bool:
    """Whether a process with this id exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def demo_key(home: Path | None = None) -> str | None:
    """Secret of the demo tenant's key of this home, or None."""
    try:
        return ((home or home_dir()) / "demo_key").read_text().strip() or None
    except FileNotFoundError:
        return None
