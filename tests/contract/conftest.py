"""Running stacks that every client of the zoo talks to: one of the echo model, one of the embedded model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.stack import Stack, running_stack, with_shared_kernels


@pytest.fixture(scope="session")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Its i-th token is a known function of the request's id, so that every client can prove what it got."""
    with running_stack(tmp_path_factory.mktemp("zoo") / "home", "--model", "echo") as stack:
        yield stack


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The embedded model."""
    with running_stack(with_shared_kernels(tmp_path_factory.mktemp("zoo-model") / "home")) as stack:
        yield stack
