"""Attention-FFN disaggregation for unmodified vLLM, by runtime patching.

``activate``, ``deactivate``, ``activated`` and ``status`` are the Python way in; ``AFD_ROLE`` in the environment is the
other one. Importing this package imports neither vLLM nor torch, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["activate", "activated", "deactivate", "status"]
__version__ = "0.1.0"


def activate(*, role: str, ffn: Sequence[str] | str = (), **settings: Any) -> None:
    """Give this process, and the processes that it starts from now on, the role ``role``.

    ``ffn`` lists the endpoints of the FFN servers (attention role). ``settings`` are those of ``AFDConfig``, such as
    ``call_timeout`` in seconds. The same activation again is no change; another one raises ``ConfigError``, like every
    wrong setting. Models that exist already are not changed.
    """
    from afd_patch import activation
    from afd_patch.config import AFDConfig

    activation.start(AFDConfig.build(role=role, ffn=ffn, **settings), from_environment=False)


def deactivate() -> None:
    """Restore vLLM exactly. A model that was built for the attention role cannot run any more and says so."""
    from afd_patch import activation

    activation.stop()


@contextmanager
def activated(*, role: str, ffn: Sequence[str] | str = (), **settings: Any) -> Iterator[None]:
    """``activate``, and ``deactivate`` at the end of the block."""
    activate(role=role, ffn=ffn, **settings)
    try:
        yield
    finally:
        deactivate()


def status() -> dict[str, Any]:
    """Role, settings and the state of every patch of this process, as plain data."""
    from afd_patch import activation

    return activation.status()
