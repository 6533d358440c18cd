"""A checkpoint in memory, and how it becomes a directory: all of it, or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass
class Checkpoint:
    """Everything a model directory holds except the tokenizer."""

    config: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]
    files: dict[str, str] = field(default_factory=dict)
    """Further text files, name to content."""
    save_tokenizer: Callable[[Path], None] | None = None
    """Writes the model's own tokenizer; without it the tiny one is written."""


def check_target(target: Path, force: bool) -> None:
    """Refuse a directory that would have to be overwritten, before any work is done."""
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file; name a directory that does not exist yet.")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not force:
        raise ConfigError(f"{target} is not empty; name another directory, or pass --force to replace this one.")
    if not (target / "config.json").is_file():
        raise ConfigError(
            f"{target} is not empty and holds no config.json, so --force does not replace it; name another directory."
        )


def write(checkpoint: Checkpoint, target: Path, *, shards: int = 1, force: bool = False) -> None:
    """Write into a temporary sibling, then rename: a crash leaves no half checkpoint under the final name."""
    target = Path(os.path.realpath(target))
    check_target(target, force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            new = staging / "new"
            new.mkdir()
            _fill(checkpoint, new, shards)
            check_target(target, force)
            _swap(new, target, staging / "old")
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"Could not write {target}: {reason}; name a directory on a writable disk.") from error


def _swap(new: Path, target: Path, old: Path) -> None:
    """Put ``new`` where ``target`` is; what was there moves to ``old``, or back if that fails."""
    if not target.exists():
        os.replace(new, target)
        return
    os.replace(target, old)
    try:
        os.replace(new, target)
    except OSError:
        os.replace(old, target)
        raise


def _fill(checkpoint: Checkpoint, folder: Path, shards: int) -> None:
    from . import tokenizer

    write_tensors(checkpoint.tensors, folder, shards)
    (folder / "config.json").write_text(json.dumps(checkpoint.config, indent=2) + "\n")
    for name, text in checkpoint.files.items():
        (folder / name).write_text(text)
    if checkpoint.save_tokenizer is not None:
        checkpoint.save_tokenizer(folder)
    else:
        text_config = checkpoint.config.get("text_config", checkpoint.config)
        tokenizer.save(folder, text_config["vocab_size"])
    readable = 0o666 & ~_umask()
    for file in folder.iterdir():
        file.chmod(readable)  # safetensors files are created for their owner only


def write_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, shards: int = 1) -> None:
    """Write one safetensors file, or ``shards`` of about equal size with their index."""
    from safetensors.torch import save_file

    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(split(tensors, shards), start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def split(tensors: Mapping[str, torch.Tensor], shards: int) -> list[list[str]]:
    """Cut the names, in their order, into ``shards`` non-empty runs of about equal bytes."""
    if shards > len(tensors):
        raise ConfigError(f"--shards is {shards}, but there are only {len(tensors)} tensors; ask for fewer shards.")
    names = list(tensors)
    total = sum(tensor.nbytes for tensor in tensors.values())
    runs: list[list[str]] = [[]]
    done = 0
    for position, name in enumerate(names):
        left_to_start = shards - len(runs)
        must = len(names) - position == left_to_start
        if runs[-1] and left_to_start and (must or done >= total * len(runs) / shards):
            runs.append([])
        runs[-1].append(name)
        done += tensors[name].nbytes
    return runs


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
