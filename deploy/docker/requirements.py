"""Prints the requirements of a Millrace install with the given extras, one a line, from pyproject.toml.

The image builds and the wheelhouse script call it, so that dependencies live in pyproject.toml alone and an image's
dependency layer changes only when they do.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path


def name_of(requirement: str) -> str:
    """The distribution name a requirement line starts with, normalised."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def requirements(project: Path, extras: list[str], without: list[str]) -> list[str]:
    """Base requirements and those of `extras`, less the names in `without`; raises ValueError.

    The extra `build-system` stands for what builds the package itself.
    """
    document = tomllib.loads(project.read_text(encoding="utf-8"))
    optional = {
        **document["project"].get("optional-dependencies", {}),
        "build-system": document["build-system"]["requires"],
    }
    unknown = sorted(set(extras) - set(optional))
    if unknown:
        raise ValueError(f"no such extra: {', '.join(unknown)}; {project} has {', '.join(sorted(optional))}")
    lines = list(document["project"]["dependencies"])
    for extra in extras:
        lines += optional[extra]
    left_out = {name_of(name) for name in without}
    return sorted({line for line in lines if name_of(line) not in left_out})


def main() -> int:
    """Command line: requirements.py [--without NAME]... PYPROJECT [EXTRA...]."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("project", type=Path, help="path of pyproject.toml")
    parser.add_argument("extras", nargs="*", help="extras to include")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="a distribution to leave out")
    arguments = parser.parse_args()
    try:
        lines = requirements(arguments.project, arguments.extras, arguments.without)
    except (OSError, ValueError, KeyError) as problem:
        sys.stderr.write(f"requirements: {problem}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
