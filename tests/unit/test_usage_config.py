"""Settings of the usage service: the form of a database's address, checked without its driver."""

from __future__ import annotations

import pytest

from services.usage.config import parse_database_url


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///usage.sqlite3",
        "sqlite:////var/lib/usage.db",
        "postgresql://user:p%40ss@host:5432/database",
        "postgresql://user:pa[ss#w?rd@host/database",
        "postgres://host/database",
        "postgresql+psycopg:///database?host=/run/postgresql",
    ],
)
def test_an_address_that_the_store_knows_is_kept_as_it_is(url: str) -> None:
    assert parse_database_url(url) == url


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "expected sqlite"),
        ("usage.db", "expected sqlite"),
        ("sqlite:usage.db", "expected sqlite"),
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
        ("mysql://host/database", "mysql databases are not supported"),
    ],
)
def test_what_is_no_ledger_is_refused_in_one_sentence(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_database_url(url)
