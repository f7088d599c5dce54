"""Settings: every problem at once, unknown names refused, secrets hidden."""

from __future__ import annotations

import dataclasses

import pytest

from services.common.config import ConfigError, describe, load, parse_address, parse_bool, parse_positive, setting


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    redis_url: str = setting("redis://127.0.0.1:6379/0", help="where Redis is")
    workers: int = setting(2, parse=parse_positive, help="how many")
    listen: str = setting("127.0.0.1:0", parse=parse_address, help="where to listen")
    token: str = setting("", help="secret", secret=True)


def test_settings_come_from_the_environment_or_their_defaults() -> None:
    config = load(Example, {"MILLRACE_WORKERS": "5", "PATH": "/bin"})

    assert config == Example(workers=5)


def test_all_problems_are_reported_at_once_and_name_the_variable() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Example, {"MILLRACE_WORKERS": "0", "MILLRACE_LISTEN": "nowhere", "MILLRACE_REDIS_ULR": "x"})

    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert any("MILLRACE_REDIS_ULR" in line and "did you mean MILLRACE_REDIS_URL?" in line for line in lines)
    assert any(line.startswith("MILLRACE_WORKERS='0'") for line in lines)
    assert any(line.startswith("MILLRACE_LISTEN=") for line in lines)


def test_a_required_setting_that_is_missing_says_what_it_is_for() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Required:
        model: str = setting(help="the model to serve")

    with pytest.raises(ConfigError, match=r"MILLRACE_MODEL is required: the model to serve\."):
        load(Required, {})


def test_secrets_are_never_shown() -> None:
    assert describe(Example(token="hush"))["MILLRACE_TOKEN"] == "***"
    assert "hush" not in str(describe(Example(token="hush")))


@pytest.mark.parametrize("text", ["127.0.0.1:80", "unix:/run/x.sock", "[::1]:443", "localhost:0"])
def test_addresses_are_taken_as_they_are(text: str) -> None:
    assert parse_address(text) == text


@pytest.mark.parametrize("text", ["", "80", ":80", "host:", "host:http", "host:70000", "unix:"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        parse_address(text)


def test_booleans_are_words_people_write() -> None:
    assert [parse_bool(t) for t in ("true", "1", "YES", "on", "false", "0", "No", "off")] == [True] * 4 + [False] * 4
    with pytest.raises(ValueError, match="true or false"):
        parse_bool("maybe")
