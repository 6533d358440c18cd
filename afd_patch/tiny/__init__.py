"""Small checkpoints to try AFD on: real files, random weights, seconds to make.

    python -m afd_patch.tiny --list
    python -m afd_patch.tiny qwen3_moe /tmp/qwen3_moe

or, from Python, ``make("qwen3_moe", "/tmp/qwen3_moe")``. Every checkpoint has config.json, safetensors and a tokenizer
with a chat template, so all of vLLM's ways in work on it. Two of the models are real: ``smollm2`` and ``smollm2-moe``
answer in English. Importing this package imports neither torch nor transformers nor vLLM.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from ..errors import ConfigError
from . import deepseek, deepseek_v4, dense_and_gqa, drafters, more, quantised, smollm2
from .architecture import Architecture, Options
from .checkpoint import check_target, write

__all__ = ["ARCHITECTURES", "Architecture", "lookup", "make"]

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for family in (dense_and_gqa, deepseek, smollm2, more, deepseek_v4, quantised, drafters)
    for architecture in family.ARCHITECTURES
}
"""Every architecture by its name, the most used ones first."""


def lookup(name: str) -> Architecture:
    """The architecture called ``name``; '-' and '_' are the same. Raises ConfigError with the nearest names."""
    plain = {_plain(known): known for known in ARCHITECTURES}
    if _plain(name) in plain:
        return ARCHITECTURES[plain[_plain(name)]]
    near = difflib.get_close_matches(_plain(name), plain, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(plain[n] for n in near)}?" if near else "see --list for the names."
    raise ConfigError(f"There is no architecture {name!r}; {hint}")


def make(
    architecture: str,
    directory: str | os.PathLike[str],
    *,
    shards: int = 1,
    seed: int = 0,
    force: bool = False,
    gguf: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a checkpoint and return its directory.

    Args:
        architecture: A name from ``ARCHITECTURES``.
        directory: Where to write. It must not exist, be empty, or (with ``force``) hold a checkpoint to replace.
        shards: Number of safetensors files; more than one come with an index.
        seed: Random weights are the same for the same seed. The real models ignore it.
        force: Replace a checkpoint that is already there.
        gguf: The GGUF file for the real models, if it is not in an installed package.

    Raises:
        ConfigError: An argument is wrong or an input is missing; the directory is then as it was.
    """
    chosen = lookup(architecture)
    if shards < 1:
        raise ConfigError(f"--shards is {shards}; it must be at least 1.")
    target = Path(directory)
    check_target(target, force)
    options: Options = {"gguf": gguf}
    if chosen.check is not None:
        chosen.check(options)
    write(chosen.build(seed, options), target, shards=shards, force=force)
    return target


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(".", "_")
