"""The way in from outside: vLLM's plugin entry point, and the start-up file for images without it.

Both call ``register``, which reads the environment and activates once per process. Without ``AFD_ROLE`` nothing else
of afd_patch is imported. With it, anything that is wrong ends the process with one sentence: an exception would only be
logged in some of the places where vLLM loads plugins, and a silent native run is the one thing that must not happen.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any


def register() -> None:
    """Activate the role that ``AFD_ROLE`` names; the entry point ``vllm.general_plugins`` of this distribution."""
    if not os.environ.get("AFD_ROLE"):
        return
    from afd_patch import activation
    from afd_patch.config import AFDConfig

    if activation.current() is not None:
        return
    with activation.stopping():
        config = AFDConfig.from_env(os.environ)
        assert config is not None
        activation.start(config, from_environment=True)


def arm() -> None:
    """Call ``register`` when this process imports vLLM, and not before: most Python processes never do.

    Start-up files call this, and Python reads those of a virtual environment twice, so repeating it changes nothing.
    """
    if not os.environ.get("AFD_ROLE"):
        return
    if "vllm" in sys.modules:
        register()
    elif not any(isinstance(finder, _WhenVLLMIsImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenVLLMIsImported())


class _WhenVLLMIsImported:
    """A finder that finds nothing; it notices the import of ``vllm``, and leaves when the role is active.

    A wrong setting ends the process before anything of vLLM runs. The patches import torch, so they have to wait until
    vLLM did: it prepares the environment for that import first (``vllm/env_override.py``).
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "vllm":
            _check_settings()
        elif name.startswith("vllm.") and "torch" in sys.modules:
            register()
            # Only now: where the end of the process was caught (or was only the end of a thread), the next import from
            # vLLM ends it again. The list is replaced because the import that is going on iterates over it.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        return None


def _check_settings() -> None:
    from afd_patch.config import AFDConfig
    from afd_patch.errors import AFDError

    try:
        AFDConfig.from_env(os.environ)
    except AFDError as error:
        raise SystemExit(f"afd_patch: {error}") from None
