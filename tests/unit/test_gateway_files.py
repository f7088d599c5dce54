"""Uploads at their limits: each refusal names what it is over, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.common.errors import MillraceError
from services.gateway.app import Edge, refused
from services.gateway.batch_store import FileStore, batch_database
from services.gateway.files_endpoint import FilesEndpoint
from services.gateway.limits import Limits
from tests.helpers.echo_generation import AsgiClient, FakeKeyRing, HttpAnswer, key
from tests.helpers.fake_clock import FakeClock

LIMITS = Limits(
    batch_file_bytes=100_000, batch_lines=50, batch_line_bytes=4_000, tenant_files=3, tenant_file_bytes=150_000
)


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[SimpleNamespace]:
    clock = FakeClock()
    database = batch_database(tmp_path)
    endpoint = FilesEndpoint(FileStore(database, tmp_path / "files", clock, LIMITS), LIMITS)
    routes = [
        Route("/v1/files", endpoint.create, methods=["POST"]),
        Route("/v1/files", endpoint.list, methods=["GET"]),
        Route("/v1/files/{id}", endpoint.get, methods=["GET"]),
    ]
    handlers = {MillraceError: _failed}
    app = Edge(Starlette(routes=routes, exception_handlers=handlers), FakeKeyRing(secret=key()), LIMITS, {})
    yield SimpleNamespace(client=AsgiClient(app), clock=clock, folder=tmp_path / "files")
    await database.close()


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, MillraceError)
    return refused(request, error)


def form(raw: bytes, *, purpose: str = "batch", extra: bytes = b"") -> bytes:
    part = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    fields = part % (b"purpose", b"", purpose.encode()) + part % (b"file", b'; filename="in.jsonl"', raw)
    return fields + extra + b"--b--\r\n"


async def upload(client: AsgiClient, body: bytes, *, kind: bytes = b"multipart/form-data; boundary=b") -> HttpAnswer:
    headers = [(b"authorization", b"Bearer secret"), (b"content-type", kind)]
    return await client.ask("POST", "/v1/files", body, headers=headers)


def lines(count: int, size: int) -> bytes:
    return (b"x" * size + b"\n") * count


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (lines(1, 4_001), "Line 1 is longer than 4000 bytes."),
        (lines(51, 1), "The file has more than 50 lines."),
        (lines(26, 3_999), "A file takes at most 100000 bytes."),
        (lines(100, 3_999), "A file takes at most 100000 bytes."),
    ],
)
async def test_a_file_past_a_limit_is_refused_by_it_and_leaves_nothing(
    door: SimpleNamespace, raw: bytes, message: str
) -> None:
    refused = await upload(door.client, form(raw))

    assert (refused.status, refused.error["message"], refused.error["param"]) == (413, message, "file")
    assert not door.folder.exists() or list(door.folder.iterdir()) == []


@pytest.mark.parametrize("raw", [lines(1, 4_000), lines(50, 1), lines(25, 3_999)])
async def test_a_file_at_a_limit_is_taken_as_it_is(door: SimpleNamespace, raw: bytes) -> None:
    taken = await upload(door.client, form(raw))

    assert taken.status == 200, taken.body
    assert taken.json()["bytes"] == len(raw)
    assert (door.folder / f"{taken.json()['id']}.jsonl").read_bytes() == raw


async def test_a_tenant_has_only_so_much_room(door: SimpleNamespace) -> None:
    large = form(lines(25, 3_999))

    assert (await upload(door.client, large)).status == 200
    over = await upload(door.client, large)
    assert (over.status, "in all" in over.error["message"]) == (413, True)
    for _ in range(2):
        assert (await upload(door.client, form(b"x\n"))).status == 200
    many = await upload(door.client, form(b"x\n"))
    assert (many.status, "At most 3 files" in many.error["message"]) == (400, True)
    assert len(list(door.folder.iterdir())) == 3


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        (b"{}", b"application/json", "content-type"),
        (b"--b\r\nbroken", b"multipart/form-data; boundary=b", "purpose"),
        (b"", b"multipart/form-data", None),
        (form(b"x", purpose="assistants"), b"multipart/form-data; boundary=b", "purpose"),
        (
            form(b"x", extra=b'--b\r\nContent-Disposition: form-data; name="other"\r\n\r\n1\r\n'),
            b"multipart/form-data; boundary=b",
            "other",
        ),
    ],
)
async def test_another_form_is_a_400_that_names_the_field(
    door: SimpleNamespace, body: bytes, kind: bytes, param: str | None
) -> None:
    refused = await upload(door.client, body, kind=kind)

    assert (refused.status, refused.error["param"]) == (400, param)


async def test_a_file_is_gone_after_its_time_and_its_room_with_it(door: SimpleNamespace) -> None:
    first = (await upload(door.client, form(b"x\n"))).json()["id"]
    door.clock.jump(30 * 86_400 + 1)

    assert (await door.client.ask("GET", f"/v1/files/{first}")).status == 404
    second = (await upload(door.client, form(b"y\n"))).json()["id"]
    assert [each.name for each in door.folder.iterdir()] == [f"{second}.jsonl"]
