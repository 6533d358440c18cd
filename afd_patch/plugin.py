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
    """Call ``register`` when this process imports vLLM, and not before: most Python processes never do."""
    if os.environ.get("AFD_ROLE") and "vllm" not in sys.modules:
        sys.meta_path.insert(0, _WhenVLLMIsImported())


class _WhenVLLMIsImported:
    """A finder that finds nothing; it only notices the import of ``vllm`` and leaves."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "vllm":
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            register()
        return None
