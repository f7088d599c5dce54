"""The HTTP door: who may ask, what is refused before it is parsed, models, health and metrics."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator

import pytest
from starlette.routing import Route
from structlog.testing import capture_logs

from services.common.errors import StoreUnavailable
from services.common.metrics import Metrics
from services.gateway.app import OPEN_PATHS, Edge, create_app
from services.gateway.chat_template import JsonValue
from services.gateway.limits import Limits
from tests.helpers.echo_generation import (
    AsgiClient,
    FakeDirectory,
    FakeGenerator,
    FakeKeyRing,
    front,
    front_parts,
    key,
    one_by_one,
    served,
)

KEYED = (b"authorization", b"Bearer secret")
LIMITS = Limits()


def client() -> AsgiClient:
    return front(FakeGenerator(one_by_one([65])))


def routes(app: object) -> Iterator[tuple[str, str]]:
    """Method and path of every route of the application itself."""
    inner = app._app if isinstance(app, Edge) else app  # the door is deny-by-default around it
    for route in inner.routes:  # type: ignore[attr-defined]
        assert isinstance(route, Route)
        for method in route.methods or {"GET"}:
            yield method, route.path.replace("{model:path}", "tiny")


@pytest.mark.parametrize("header", [None, b"Bearer wrong", b"secret", b"Basic secret", b""])
async def test_every_route_but_health_and_metrics_asks_for_a_key(header: bytes | None) -> None:
    asked = client()
    found = list(routes(asked.app))
    assert len({path for _, path in found}) >= 7

    for method, path in found:
        answer = await asked.ask(method, path, headers=[] if header is None else [(b"authorization", header)])
        if path in OPEN_PATHS:
            assert answer.status == 200, path
        else:
            assert answer.status == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.error["code"] == "INVALID_API_KEY"
    assert {"/healthz", "/readyz", "/metrics"} == OPEN_PATHS


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/openapi.json/", "/admin", "/v1", "/v1/audio", "//healthz", "/healthz/", "/metrics/x"]
)
async def test_a_path_that_does_not_exist_asks_for_a_key_too(path: str) -> None:
    asked = client()

    assert (await asked.ask("GET", path, headers=[])).status == 401
    known = await asked.ask("GET", path)
    assert known.status in (404, 307)


async def test_two_authorization_headers_are_no_key() -> None:
    assert (await client().ask("GET", "/v1/models", headers=[KEYED, KEYED])).status == 401


async def test_a_wrong_method_is_404_in_the_shape_of_every_error() -> None:
    answer = await client().ask("DELETE", "/v1/chat/completions")

    assert answer.status == 404
    assert answer.error["type"] == "invalid_request_error"


async def test_a_key_ring_without_its_store_is_503_with_a_time_to_wait() -> None:
    class Broken(FakeKeyRing):
        async def authenticate(self, authorization: str | None) -> object:  # type: ignore[override]
            raise StoreUnavailable("The store cannot be reached.", retry_after_s=1.5)

    answer = await front(FakeGenerator(), keyring=Broken()).chat()

    assert answer.status == 503
    assert answer.headers["retry-after"] == "2"


async def test_a_defect_in_an_endpoint_is_a_dull_500_in_the_shape_of_every_error() -> None:
    generator = FakeGenerator()
    generator.refusal = KeyError("/secret/path")

    answer = await front(generator).chat()

    assert answer.status == 500
    assert answer.error["type"] == "server_error"
    assert b"secret" not in answer.body


async def test_a_defect_in_the_key_ring_is_a_dull_500() -> None:
    class Broken(FakeKeyRing):
        async def authenticate(self, authorization: str | None) -> object:  # type: ignore[override]
            raise KeyError("/secret/path")

    answer = await front(FakeGenerator(), keyring=Broken()).chat()

    assert answer.status == 500
    assert b"secret" not in answer.body


# Metrics, health


@pytest.mark.parametrize("peer", [("10.0.0.7", 5), ("127.0.0.1.evil", 5), ("::ffff:10.0.0.7", 5), None])
async def test_metrics_do_not_exist_for_peers_elsewhere(peer: tuple[str, int] | None) -> None:
    answer = await client().ask("GET", "/metrics", headers=[], peer=peer)

    assert answer.status == 404
    assert b"millrace_" not in answer.body


@pytest.mark.parametrize("header", [b"x-forwarded-for", b"forwarded", b"x-real-ip", b"via"])
async def test_metrics_do_not_exist_behind_a_proxy_on_this_machine(header: bytes) -> None:
    answer = await client().ask("GET", "/metrics", headers=[(header, b"10.0.0.7")])

    assert answer.status == 404


@pytest.mark.parametrize("peer", [("127.0.0.1", 5), ("::1", 5)])
async def test_metrics_are_told_to_local_peers(peer: tuple[str, int]) -> None:
    answer = await client().ask("GET", "/metrics", headers=[], peer=peer)

    assert answer.status == 200
    assert b"# TYPE" in answer.body


async def test_ready_means_open_and_a_model_is_served() -> None:
    assert (await front(FakeGenerator()).ask("GET", "/readyz", headers=[])).status == 200
    closed = await front(FakeGenerator(), ready=False).ask("GET", "/readyz", headers=[])
    assert (closed.status, closed.headers["retry-after"]) == (503, "1")
    assert (await front(FakeGenerator(), ready=False).ask("GET", "/healthz", headers=[])).status == 200


# Models


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_a_session_decides_the_version_before_the_user_at_every_endpoint(path: str, said: JsonValue) -> None:
    parts = front_parts(FakeGenerator(one_by_one([65])), served())
    asking = AsgiClient(create_app(parts, metrics=Metrics(), ready=lambda: True))
    assert isinstance(said, dict)
    body = {"model": "tiny", "user": "ann", **said}

    with_session = await asking.ask("POST", path, body, headers=[KEYED, (b"x-millrace-session", b"s1")])
    without = await asking.ask("POST", path, body, headers=[KEYED])

    assert (with_session.status, without.status) == (200, 200)
    assert isinstance(parts.directory, FakeDirectory)
    assert [ask.key for ask in parts.directory.asks] == ["acme\0s1", "acme\0ann"]


async def test_a_prompt_cache_key_keeps_requests_on_one_version_unless_a_session_does() -> None:
    parts = front_parts(FakeGenerator(one_by_one([65])), served())
    asking = AsgiClient(create_app(parts, metrics=Metrics(), ready=lambda: True))
    for path, said in (("/v1/completions", {"prompt": "hi"}), ("/v1/responses", {"input": "hi"})):
        for headers in ([KEYED], [KEYED, (b"x-millrace-session", b"s1")]):
            body = {"model": "tiny", "user": "ann", "prompt_cache_key": "p1", **said}
            assert (await asking.ask("POST", path, body, headers=headers)).status == 200

    assert isinstance(parts.directory, FakeDirectory)
    assert [ask.key for ask in parts.directory.asks] == ["acme\0p1", "acme\0s1"] * 2


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nothing", b"", 404),
        ("DELETE", "/v1/models", b"", 404),
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/embeddings", b"{}", 400),
        ("POST", "/tokenize", b"{}", 400),
        ("GET", "/v1/responses/x", b"", 404),
    ],
)
async def test_a_refusal_has_an_id_in_header_and_body(method: str, path: str, body: bytes, status: int) -> None:
    answer = await client().ask(method, path, body)

    assert answer.status == status
    assert len(answer.headers["x-request-id"]) == 26
    assert answer.error["request_id"] == answer.headers["x-request-id"]


async def test_a_fault_of_ours_says_its_id_and_logs_it() -> None:
    generator = FakeGenerator()
    generator.refusal = ValueError("/secret")

    with capture_logs() as logs:
        answer = await front(generator).chat()

    assert answer.status == 500
    assert "secret" not in answer.body.decode()
    assert answer.error["request_id"] in [line.get("request_id") for line in logs]


async def test_models_are_those_that_the_key_may_use() -> None:
    models = [served("tiny", "v2"), served("tiny", "v1"), served("other", "v1")]
    keys = FakeKeyRing(all=key(), tiny=key("b", "tiny"), old=key("c", "tiny@v1"), none=key("d", "zzz"))
    asked = front(FakeGenerator(), *models, keyring=keys)

    async def ids(secret: str) -> list[str]:
        answer = await asked.ask("GET", "/v1/models", headers=[(b"authorization", f"Bearer {secret}".encode())])
        assert answer.json()["object"] == "list"
        return [model["id"] for model in answer.json()["data"]]

    assert await ids("all") == ["tiny", "tiny@v2", "tiny@v1", "other", "other@v1"]
    assert await ids("tiny") == ["tiny", "tiny@v2", "tiny@v1"]
    assert "tiny@v2" not in await ids("old")
    assert "tiny@v1" in await ids("old")
    assert await ids("none") == []


async def test_one_model_is_found_by_name_and_version() -> None:
    asked = front(FakeGenerator(), served("org/tiny", "v2"))

    found = await asked.ask("GET", "/v1/models/org/tiny@v2")

    assert found.json()["id"] == "org/tiny@v2"
    assert found.json()["max_model_len"] == 4_096
    assert found.json()["owned_by"] == "acme"
    assert found.json()["millrace"]["version"] == "v2"
    assert found.json()["millrace"]["capabilities"] == ["completions", "embeddings", "chat", "tools"]
    assert (await asked.ask("GET", "/v1/models/org/tiny@v9")).status == 404


@pytest.mark.parametrize("name", ["other", "zzz", "tiny@v9", "", "x" * 256, "x" * 257, "../tiny"])
async def test_a_model_that_the_key_may_not_use_looks_as_if_it_did_not_exist(name: str) -> None:
    asked = front(FakeGenerator(), served(), served("other"), keyring=FakeKeyRing(secret=key("a", "tiny")))

    answer = await asked.chat(model=name)

    assert answer.status == 404
    assert (answer.error["code"], answer.error["param"]) == ("MODEL_NOT_FOUND", "model")


async def test_nothing_served_yet_is_503_with_a_time_to_wait() -> None:
    app = create_app(front_parts(FakeGenerator()), metrics=Metrics(), ready=lambda: True)
    answer = await AsgiClient(app).chat()

    assert answer.status == 503
    assert answer.headers["retry-after"] == "2"


# Limits before parsing


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"br", b"GZIP", b"gzip, identity"])
async def test_a_compressed_body_is_refused_unread(encoding: bytes) -> None:
    bomb = gzip.compress(b" " * 10_000_000)
    generator = FakeGenerator()

    answer = await front(generator).ask(
        "POST", "/v1/chat/completions", bomb, headers=[KEYED, (b"content-encoding", encoding)]
    )

    assert answer.status == 400
    assert answer.error["param"] == "content-encoding"
    assert generator.requests == []


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_of_the_limit_is_taken_and_one_byte_more_is_413(declared: bool, extra: int) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hi"}).encode()
    body += b" " * (LIMITS.body_bytes - len(body) + extra)
    headers = [KEYED, (b"content-length", str(len(body)).encode())] if declared else [KEYED]
    pieces = [body[at : at + 500_000] for at in range(0, len(body), 500_000)]

    answer = await client().ask("POST", "/v1/completions", headers=headers, pieces=pieces)

    assert answer.status == (413 if extra else 200)


@pytest.mark.parametrize("length", [b"-1", b"abc", b"1" * 5_000, b"\xb2"])
async def test_a_wrong_content_length_is_refused(length: bytes) -> None:
    answer = await client().ask("POST", "/v1/completions", b"{}", headers=[KEYED, (b"content-length", length)])

    assert answer.status in (400, 413)


async def test_a_body_that_trickles_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = client()
    edge = asked.app
    assert isinstance(edge, Edge)
    monkeypatch.setattr("services.gateway.handlers.asyncio.timeout", lambda _s: asyncio.timeouts.timeout(0.02))
    messages = [{"type": "http.request", "body": b"{", "more_body": True}]
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [KEYED],
        "query_string": b"",
        "client": ("127.0.0.1", 1),
    }
    await edge(scope, receive, send)  # type: ignore[arg-type]

    assert sent[0]["status"] == 504


@pytest.mark.parametrize("over", [False, True])
async def test_headers_are_limited_in_number(over: bool) -> None:
    headers = [KEYED, *[(b"x-%d" % i, b"1") for i in range(LIMITS.header_count - 1 + over)]]

    answer = await client().ask("GET", "/v1/models", headers=headers)

    assert answer.status == (400 if over else 200)


@pytest.mark.parametrize("over", [False, True])
async def test_headers_are_limited_in_size(over: bool) -> None:
    rest = LIMITS.header_bytes - len(KEYED[0] + KEYED[1]) - 1 + over

    answer = await client().ask("GET", "/v1/models", headers=[KEYED, (b"x", b"y" * rest)])

    assert answer.status == (400 if over else 200)


# Ids of clients


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        (b"abc-1_2.X", True),
        (b"a" * 128, True),
        (b"a" * 129, False),
        ("🙂".encode(), False),
        (b"a b", False),
        (b"a\nb", False),
        (b"", False),
    ],
)
async def test_a_clients_id_is_a_label_that_is_given_back_once_or_dropped(sent: bytes, echoed: bool) -> None:
    asked = client()
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()

    answer = await asked.ask("POST", "/v1/completions", body, headers=[KEYED, (b"x-request-id", sent)])

    assert answer.status == 200
    assert answer.headers["x-request-id"].startswith("01J")
    assert answer.headers.get("x-client-request-id") == (sent.decode() if echoed else None)
    assert not sent or sent not in answer.body


async def test_a_megabyte_of_client_id_is_refused_and_not_repeated() -> None:
    answer = await client().ask("GET", "/v1/models", headers=[KEYED, (b"x-request-id", b"a" * 1_000_000)])

    assert answer.status == 400
    assert len(answer.body) < 1_000


async def test_websockets_get_no_answer() -> None:
    async def never(*_args: object) -> None:
        raise AssertionError("nothing may be read or sent")

    await client().app({"type": "websocket", "path": "/"}, never, never)  # type: ignore[arg-type]
