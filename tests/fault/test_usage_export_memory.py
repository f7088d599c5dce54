"""A million rows leave in the memory of a hundred thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.export import export, service
from benchmarks.ledger_rows import load
from cli.usage_verify import verify_file
from services.usage.store import open_store

MORE_MIB = 48


@pytest.mark.fault
@pytest.mark.timeout(1_200)
def test_the_memory_of_an_export_does_not_follow_its_rows(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/usage.sqlite3"
    peaks = []
    for rows in (100_000, 1_000_000):
        store = open_store(url)
        load(store, rows)
        store.close()
        output = tmp_path / f"{rows}.csv"
        with service(url, tmp_path) as (address, pid):
            _, ours, theirs = export(address, pid, "csv", output)
        peaks.append((ours.peak_mib, theirs.peak_mib))
        assert verify_file(output, None, None).row_count == rows

    (small, big) = peaks
    assert big[0] <= small[0] + MORE_MIB
    assert big[1] <= small[1] + MORE_MIB
