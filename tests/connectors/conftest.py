"""Fixtures: servers and connectors that end with their test, in the shortest folder a socket path can have."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import Server, connector, free_endpoint

from afd_patch.connectors import retry
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.identity import Identity

# A process that has made a pool of threads cannot be forked and use it in the child.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_PAUSE", 0.02)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="afd-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["unix", "tcp"])
def endpoint(request: pytest.FixtureRequest, folder: Path) -> Endpoint:
    return free_endpoint(request.param, folder)


@pytest.fixture
def tcp(folder: Path) -> Endpoint:
    return free_endpoint("tcp", folder)


@pytest.fixture
def unix(folder: Path) -> Endpoint:
    return free_endpoint("unix", folder)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Server]]:
    """``start(endpoint, identity, **settings)`` starts a server."""
    servers: list[Server] = []

    def start_server(endpoint: Endpoint, who: Identity | None = None, **settings: Any) -> Server:
        servers.append(Server(endpoint, folder, who, **settings))
        return servers[-1]

    yield start_server
    for server in servers:
        log = server.log()
        server.kill()
        assert not [line for line in log if "defect" in line or "child failed" in line], log


@pytest.fixture
def connect() -> Iterator[Callable[..., RetryingConnector]]:
    """``connect(*endpoints, **settings)`` makes a connector that has shaken hands."""
    made: list[RetryingConnector] = []

    def connect_client(*endpoints: Endpoint, **settings: Any) -> RetryingConnector:
        made.append(connector(*endpoints, **settings))
        made[-1].connect()
        return made[-1]

    yield connect_client
    for client in made:
        client.close()
