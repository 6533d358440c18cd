"""Which module has the model class of an architecture, read from vLLM's registry by syntax."""

from __future__ import annotations

import ast

from afd_patch.doctor.names import statements
from afd_patch.doctor.source import SourceTree

_REGISTRY = "vllm.model_executor.models.registry"
_RELATIVE_TO = "vllm.model_executor.models"


def architectures(tree: SourceTree) -> dict[str, tuple[str, str]]:
    """Every architecture that ``tree`` knows, with its module and class; empty when the registry is not there."""
    found: dict[str, tuple[str, str]] = {}
    parsed = tree.parse(_REGISTRY)
    for node in statements(parsed.body if parsed else ()):
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(value, ast.Dict):
            for key, item in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and (place := _place(item)):
                    found.setdefault(key.value, place)
    return found


def _place(node: ast.expr) -> tuple[str, str] | None:
    try:
        module, cls = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    if not (isinstance(module, str) and isinstance(cls, str)):
        return None
    return (module if module.startswith("vllm.") else f"{_RELATIVE_TO}.{module}"), cls
