"""Checkpoints for benchmarks: the one that was named, or a small one made for the occasion, and what is in it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from afd_patch.errors import ConfigError
from afd_patch.identity import read_header


def checkpoint(model: str | None, folder: Path, architecture: str) -> Path:
    """The folder of ``model``; without one, a new random ``architecture`` in ``folder``."""
    if model is None:
        from afd_patch import tiny

        return Path(tiny.make(architecture, folder / architecture))
    if not (Path(model) / "config.json").is_file():
        raise ConfigError(f"{model} is no model folder: it has no config.json; give the folder with config.json")
    return Path(model)


def weight_files(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def tensors(model: Path) -> dict[str, dict[str, Any]]:
    """Name to ``dtype``, ``shape`` and ``data_offsets`` of all checkpoint tensors."""
    found: dict[str, dict[str, Any]] = {}
    for path in weight_files(model):
        found |= read_header(path)[1]
    found.pop("__metadata__", None)
    return found


def parameters(model: Path) -> int:
    """Elements of all checkpoint tensors."""
    return sum(math.prod(entry["shape"]) for entry in tensors(model).values())
