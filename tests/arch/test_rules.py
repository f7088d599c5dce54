"""House rules that a linter does not know: no code in data, one file reads the environment, clocks are injected."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = sorted((ROOT / "services").rglob("*.py"))
BANNED_MODULES = {"pickle", "cPickle", "dill", "shelve", "marshal", "cloudpickle", "joblib"}
BANNED_CALLS = {"eval", "exec", "torch.load", "compile", "__import__", "numpy.load", "np.load"}
# The last one sets what a C library reads.
ENVIRONMENT_READERS = {
    "services/common/config.py",
    "services/common/lifecycle.py",
    "services/worker/runtime/transfers/nixl.py",
}


def calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_nothing_received_can_become_code() -> None:
    found = {}
    for path in SERVICES:
        tree = ast.parse(path.read_text())
        bad = (set(imports(tree)) & BANNED_MODULES) | (set(calls(tree)) & BANNED_CALLS)
        if bad:
            found[str(path.relative_to(ROOT))] = bad

    assert found == {}


def test_only_named_files_read_the_environment() -> None:
    readers = {
        str(p.relative_to(ROOT))
        for p in SERVICES
        if any(s in p.read_text() for s in ("os.environ", "os.getenv", "getenv("))
    }

    assert readers <= ENVIRONMENT_READERS


def test_every_module_says_what_it_owns() -> None:
    silent = [
        str(p.relative_to(ROOT))
        for p in SERVICES
        if p.read_text().strip() and ast.get_docstring(ast.parse(p.read_text())) is None
    ]

    assert silent == []


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("services.gateway.wiring, services.router.wiring, services.usage.wiring", ("torch", "triton")),
        # Each command would pay for them.
        ("cli.main", ("torch", "triton", "numpy", "sqlalchemy", "psycopg", "redis", "pyarrow")),
    ],
)
def test_who_needs_no_heavy_library_loads_none(modules: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    python = ROOT / ".venv" / "bin" / "python"
    result = subprocess.run(
        [str(python) if python.exists() else "python3", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert result.stdout.strip() == "[]"
