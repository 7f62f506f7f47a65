"""Worlds of real ranks, begun when first asked for and shared by all tests of the session."""

from collections.abc import Iterator

import pytest

from tests.spawn import World


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[World]:
    with World(2) as world:
        yield world


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[World]:
    with World(4) as world:
        yield world
