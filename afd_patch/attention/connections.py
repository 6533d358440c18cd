"""Which connector belongs to which model of this process.

A forward context knows its model by ``no_compile_layers``, which is the dict that vLLM's ``VllmConfig`` of that model
holds as ``compilation_config.static_forward_context``. That dict is the key here.
"""

from __future__ import annotations

from typing import Any

from afd_patch.connectors.contract import FFNConnector

# The dict is kept next to its connector so that its id cannot be given to another one.
_connectors: dict[int, tuple[dict[str, Any], FFNConnector]] = {}
# How many layers of a model hand over rows, by the same id.
_crossing: dict[int, int] = {}


def bind(layers: dict[str, Any], connector: FFNConnector) -> None:
    """Forwards over ``layers`` use ``connector`` from now on; an earlier one is closed."""
    previous = _connectors.get(id(layers))
    _connectors[id(layers)] = (layers, connector)
    if previous is not None:
        previous[1].close()


def lookup(layers: dict[str, Any]) -> FFNConnector | None:
    entry = _connectors.get(id(layers))
    return entry[1] if entry is not None else None


def note_crossing(layers: dict[str, Any], count: int) -> None:
    """Remember that ``count`` layers of the model of ``layers`` hand over rows in each forward."""
    _crossing[id(layers)] = count


def crossing_layers() -> int:
    """Layers that hand over rows in each forward, of all models of this process."""
    return sum(_crossing.get(key, 0) for key in _connectors)


def total_calls() -> int:
    """Calls made by all models of this process."""
    return sum(connector.calls for _, connector in _connectors.values())


def close_all() -> None:
    """Close every connector of this process."""
    _crossing.clear()
    while _connectors:
        _, (_, connector) = _connectors.popitem()
        connector.close()
