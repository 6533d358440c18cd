"""One tiny checkpoint for all commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serve.deployment import Deployment, run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoints") / "qwen3_moe"
    assert run("afd_patch.tiny", "qwen3_moe", str(folder)).returncode == 0
    return str(folder)


@pytest.fixture
def deploy() -> Iterator[Callable[..., Deployment]]:
    """``deploy(model, *flags)``: a launcher that does not survive the test."""
    started: list[Deployment] = []

    def start(*args: Any, **kwargs: Any) -> Deployment:
        started.append(Deployment(*args, **kwargs))
        return started[-1]

    yield start
    for deployment in started:
        deployment.destroy()
