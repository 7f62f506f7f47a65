"""Two engine servers in one process, shared by the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron.rl.engines.server import EngineServers
from tests.megatron.rl.tiny import write_llama


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the servers start with."""
    return write_llama(tmp_path_factory.mktemp("served") / "llama")


@pytest.fixture(scope="session")
def running(model_path: Path) -> Iterator[EngineServers]:
    with EngineServers(model_path) as servers:
        yield servers


@pytest.fixture
def servers(running: EngineServers) -> EngineServers:
    """Both as they were when they started."""
    for port in range(2):
        running.tell(port, reset=True)
    return running
