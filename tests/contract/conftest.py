"""Running stacks that every client of the zoo talks to: one of the echo model, one of the embedded model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.stack import Stack, with_shared_kernels


def _running(stack: Stack) -> Iterator[Stack]:
    try:
        yield stack.wait_ready()
        assert stack.stop() == 0
    finally:
        if stack.process.poll() is None:
            stack.kill_all()


@pytest.fixture(scope="session")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Its i-th token is a known function of the request's id, so that every client can prove what it got."""
    yield from _running(Stack(tmp_path_factory.mktemp("zoo") / "home", "--model", "echo"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The embedded model."""
    yield from _running(Stack(with_shared_kernels(tmp_path_factory.mktemp("zoo-model") / "home")))
