"""Fixtures: tiny checkpoints, made once a session, and a pair of roles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from afd_patch import tiny
from tests.engine.children import Child
from tests.engine.engines import ffn_server, generate


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``checkpoint(architecture, shards=1)``: the folder of a tiny checkpoint."""
    made: dict[tuple[str, int], str] = {}
    root = tmp_path_factory.mktemp("checkpoints")

    def make(architecture: str, shards: int = 1) -> str:
        key = (architecture, shards)
        if key not in made:
            folder = root / f"{architecture}-{shards}"
            # In a child: this process imports neither torch nor transformers.
            Child(tiny.make, architecture, str(folder), shards=shards).result()
            made[key] = str(folder)
        return made[key]

    return make


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/ffn.sock"


@pytest.fixture
def serving(endpoint: str) -> Callable[..., AbstractContextManager[Child]]:
    """``with serving(model, **engine) as server``: an FFN server at ``endpoint``."""

    @contextmanager
    def start(model: str, *, env: dict[str, str] | None = None, **engine: Any) -> Iterator[Child]:
        server = Child(ffn_server, model, endpoint, env=env, **engine)
        try:
            yield server
        finally:
            server.stop()

    return start


@pytest.fixture
def attention(endpoint: str) -> dict[str, str]:
    """The environment of the attention role."""
    return {"AFD_ROLE": "attention", "AFD_FFN": endpoint, "AFD_CONNECT_TIMEOUT": "120"}


@pytest.fixture
def both_ways(
    serving: Callable[..., AbstractContextManager[Child]], attention: dict[str, str]
) -> Callable[..., tuple[dict[str, Any], dict[str, Any]]]:
    """``both_ways(model, prompts, sampling, **engine)``: what stock vLLM says, and what AFD says."""

    def run(
        model: str, prompts: Any = None, sampling: Any = None, *, env: dict[str, str] | None = None, **engine: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        with serving(model, env=env, **engine):
            split = Child(generate, model, prompts, sampling, env={**(env or {}), **attention}, **engine)
            stock = Child(generate, model, prompts, sampling, env=env, **engine).result()
            return stock, split.result()

    return run
