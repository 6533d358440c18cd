"""The activation of this process: which role it has, and the patch manager that carries it.

There is one activation per process at a time, whichever way it came about (entry point, start-up file, Python), and
repeating it changes nothing. Importing this file imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from afd_patch.config import PLUGIN_NAME, AFDConfig
from afd_patch.errors import AFDError, ConfigError
from afd_patch.patch_manager import PatchManager

logger = logging.getLogger("vllm.afd_patch")


@dataclass
class Activation:
    """``from_environment``: nobody in this process asked for it by name, so an error has nobody to be raised to."""

    config: AFDConfig
    manager: PatchManager
    from_environment: bool
    previous_environment: dict[str, str | None] = field(default_factory=dict)


_current: Activation | None = None


def current() -> Activation | None:
    """The activation of this process, or ``None``."""
    return _current


def start(config: AFDConfig, *, from_environment: bool) -> Activation:
    """Activate ``config``; the same one again is no change, another one is an error."""
    global _current
    _check_plugins(os.environ)
    # The patches need torch, and vLLM prepares the environment before it imports torch. This import may activate the
    # role that the environment names (see plugin.arm), so it comes before the look at what is active.
    import vllm  # noqa: F401

    if _current is not None:
        if _current.config != config:
            raise ConfigError(
                f"this process already has the {_current.config.role} role with other settings; call "
                "afd_patch.deactivate() first"
            )
        return _current
    from afd_patch.patches import patch_set

    manager = PatchManager()
    manager.register(*patch_set(config))
    manager.apply()
    _current = Activation(config, manager, from_environment)
    if not from_environment:
        for name, value in config.to_env().items():
            _current.previous_environment[name] = os.environ.get(name)
            os.environ[name] = value
    return _current


def stop() -> None:
    """Restore vLLM and the environment; without an activation, nothing happens."""
    global _current
    if _current is None:
        return
    activation, _current = _current, None
    for name, value in activation.previous_environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    connections = sys.modules.get("afd_patch.attention.connections")
    if connections is not None:
        connections.close_all()
    activation.manager.restore()


@contextmanager
def stopping() -> Iterator[None]:
    """Turn an ``AFDError`` into the end of the process, with one sentence, when the environment asked for the role."""
    try:
        yield
    except AFDError as error:
        if _current is not None and not _current.from_environment:
            raise
        raise SystemExit(f"afd_patch: {error}") from None


def _check_plugins(environ: Mapping[str, str]) -> None:
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        raise ConfigError(
            f"AFD_ROLE is set, and VLLM_PLUGINS={allowed!r} keeps {PLUGIN_NAME} out of vLLM's other processes; "
            f"add it (VLLM_PLUGINS={','.join(filter(None, [allowed, PLUGIN_NAME]))}) or unset VLLM_PLUGINS"
        )


def status() -> dict[str, Any]:
    """What is in effect in this process, as plain data."""
    if _current is None:
        return {"role": None, "patches": []}
    return {
        "role": _current.config.role,
        "settings": _current.config.to_env(),
        "patches": [
            {"name": s.name, "target": s.target, "state": s.state.name, "detail": s.detail}
            for s in _current.manager.status()
        ],
    }
