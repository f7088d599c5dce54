"""Databases for the suites of the usage service, each test on SQLite and on PostgreSQL; spans in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

from services.usage.store import Store, open_store
from tests.helpers import containers


@pytest.fixture(scope="session")
def new_postgres_url() -> Iterator[Callable[[], str]]:
    """Makes empty PostgreSQL databases; skips where there is no PostgreSQL, unless REQUIRE_POSTGRES is set."""
    if containers.postgres_source() is None and not os.environ.get("REQUIRE_POSTGRES"):
        pytest.skip("no PostgreSQL: apt-get install postgresql")
    backend = containers.start_postgres()
    yield backend.new_url
    backend.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/usage.sqlite3"
    return str(request.getfixturevalue("new_postgres_url")())


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    opened = open_store(database_url)
    yield opened
    opened.close()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Every span that ends in this test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    yield exporter
    provider.shutdown()
