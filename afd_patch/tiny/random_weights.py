"""Random weights: through a transformers model, or tensor by tensor for models that transformers lacks."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .checkpoint import Checkpoint


def from_transformers(
    config_class: str,
    config: dict[str, Any],
    *,
    seed: int,
    model_class: str | None = None,
    extra: dict[str, Any] | None = None,
) -> Checkpoint:
    """Initialise a transformers model at random and take the checkpoint that it would save.

    Saving goes through ``save_pretrained``, because that turns transformers' fused expert tensors back into the
    names and shapes of released checkpoints.
    """
    import transformers
    from safetensors.torch import load_file

    hf_config = getattr(transformers, config_class)(**copy.deepcopy(config))
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(seed)
        if model_class is None:
            model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
        else:
            model = getattr(transformers, model_class)(hf_config).to(torch.bfloat16)
        randomise(model, seed)
        with _no_progress_bar():
            model.save_pretrained(scratch, max_shard_size="1TB")
        tensors = load_file(f"{scratch}/model.safetensors")
        saved = json.loads(Path(scratch, "config.json").read_text())
    saved.update(extra or {})
    return Checkpoint(saved, tensors)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill what initialisation leaves at 0 or 1.

    A correction bias of zeros never changes a choice of experts and a norm of ones multiplies by one, so a bug in
    either would stay invisible.
    """
    generator = torch.Generator().manual_seed(seed + 1)

    def fresh(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        return (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)

    for name, tensor in _parameters_and_buffers(model):
        if not tensor.is_floating_point():
            continue
        if name.endswith("e_score_correction_bias"):
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator) * 0.5)
        elif name.endswith("norm.weight") and tensor.ndim == 1:
            tensor.data.add_(fresh(tensor, 0.05))
        elif name.endswith(".bias"):
            tensor.data.copy_(fresh(tensor, 0.1))


def _parameters_and_buffers(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Silence transformers' bar for one file, and give the user's setting back."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


class RandomTensors(dict[str, torch.Tensor]):
    """Named random tensors for checkpoints that are written by hand."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        """A standard normal tensor from this checkpoint's generator."""
        return torch.randn(*shape, generator=self.generator)

    def linear(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        """A weight of shape (out, in), or (experts, out, in)."""
        self[name] = (self.normal(*shape) * 0.1).to(dtype)

    def vector(
        self, name: str, size: int, mean: float = 1.0, std: float = 0.05, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """A norm weight (the default), a bias or a scale."""
        self[name] = (mean + self.normal(size) * std).to(dtype)

    def mlp(
        self,
        prefix: str,
        hidden: int,
        intermediate: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        """The three matrices of a gated MLP."""
        gate, up, down = names
        self.linear(f"{prefix}.{gate}.weight", intermediate, hidden)
        self.linear(f"{prefix}.{up}.weight", intermediate, hidden)
        self.linear(f"{prefix}.{down}.weight", hidden, intermediate)
