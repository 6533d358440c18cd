"""What every architecture file speaks in: the shared sizes and the record that the registry keeps.

Nothing heavy is imported here, so that listing and argument errors cost milliseconds.

The sizes are chosen so that vLLM's CPU kernels accept them: hidden and intermediate sizes are multiples of 32
(AMX), attention heads are 64 or 128 wide, the MLA latent is 512 + 64. Where an architecture has both, there is a
dense layer and at least two expert layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

VOCAB, HIDDEN, INTERMEDIATE, MOE_INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 512, 256, 512, 128, 8, 2, 4
MAX_POSITIONS = 2048

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Every model. The large ``initializer_range`` keeps the logits of a random model apart."""

GQA: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
MLA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

Options = dict[str, Any]
Builder = Callable[[int, Options], "Checkpoint"]


@dataclass(frozen=True)
class Architecture:
    """One name that ``python -m afd_patch.tiny`` knows."""

    name: str
    about: str
    """One line for ``--list``."""
    build: Builder
    """``build(seed, options)`` returns the checkpoint; nothing is written yet."""
    check: Callable[[Options], None] | None = None
    """Raises ConfigError when the inputs (a GGUF file, a package) are missing; cheap, runs first."""


def hf(
    name: str,
    about: str,
    config_class: str,
    *parts: dict[str, Any],
    model_class: str | None = None,
    extra: dict[str, Any] | None = None,
    **config: Any,
) -> Architecture:
    """A row of a table: a transformers configuration filled with random weights.

    Args:
        name: Name on the command line.
        about: One line for ``--list``.
        config_class: Name of the class in ``transformers``.
        *parts: Shared configuration dictionaries; later ones win.
        model_class: Name of the model class when the automatic choice is not the wanted one.
        extra: Entries for config.json that the configuration class drops or computes, but vLLM reads.
        **config: More configuration; wins over the parts.
    """

    def build(seed: int, options: Options) -> Checkpoint:
        from .random_weights import from_transformers

        merged = dict(COMMON)
        for part in parts:
            merged.update(part)
        merged.update(config)
        return from_transformers(config_class, merged, seed=seed, model_class=model_class, extra=extra)

    return Architecture(name, about, build)
