"""The wheel holds every file that the services read beside their code."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
# Where the wheel puts what lies elsewhere in the repository.
MOVED = {"protos/gen/millrace/": "millrace/"}


def test_the_wheel_holds_each_tracked_file_of_its_packages_and_nothing_of_the_tests(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "services", "cli", "protos/gen/millrace"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = set(listed.stdout.split())
    for old, new in MOVED.items():
        wanted = {new + name.removeprefix(old) if name.startswith(old) else name for name in wanted}

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])

    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {Path(name).suffix for name in wanted} >= {".py", ".lua", ".h", ".cpp"}
    assert sorted(wanted - held) == []
    assert {name.split("/")[0] for name in held} == {"services", "cli", "millrace"}
