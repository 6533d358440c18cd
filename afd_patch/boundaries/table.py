"""What a boundary table consists of. Data and name rules only: no vLLM, no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from afd_patch.errors import WeightError

#: Who reads a checkpoint tensor. ``none``: belongs to no layer that is built (a next-token-prediction layer).
OwnedBy = Literal["attention", "ffn", "none"]

_LAYER = re.compile(r"^(?P<root>(?:[A-Za-z_]\w*\.)*)layers\.(?P<index>\d+)\.(?P<child>[A-Za-z_]\w*)(?:\.|$)")


@dataclass(frozen=True)
class WeightRules:
    """Ownership by the module that owns a tensor, decided on checkpoint names.

    ``ffn_children`` and ``attention_children`` are the names right under ``layers.N.``; ``attention_modules`` are
    the modules outside of the layers, right under one of ``roots``. A name that none of them covers is an error.
    """

    ffn_children: tuple[str, ...] = ("mlp",)
    attention_children: tuple[str, ...] = ("self_attn", "input_layernorm", "post_attention_layernorm")
    attention_modules: tuple[str, ...] = ("embed_tokens", "norm", "lm_head")
    roots: tuple[str, ...] = ("model.", "")

    def owner(self, name: str, num_layers: int) -> OwnedBy:
        """Who owns the checkpoint tensor ``name`` of a model with ``num_layers`` decoder layers.

        Raises ``WeightError``, quoting the name, when no rule covers it.
        """
        match = _LAYER.match(name)
        if match and match["root"] in self.roots:
            if int(match["index"]) >= num_layers:
                return "none"  # next-token-prediction layers follow the decoder layers; native loaders skip them
            if match["child"] in self.ffn_children:
                return "ffn"
            if match["child"] in self.attention_children:
                return "attention"
            raise WeightError(
                f"checkpoint tensor {name!r}: no rule says whether {match['child']!r} belongs to the attention or to "
                f"the FFN role (FFN: {', '.join(self.ffn_children)}; attention: {', '.join(self.attention_children)}); "
                "fix the name in the checkpoint, or add it to the model's boundary table"
            )
        for root in self.roots:
            module = name.removeprefix(root).partition(".")[0] if name.startswith(root) else ""
            if module in self.attention_modules:
                return "attention"
        raise WeightError(
            f"checkpoint tensor {name!r}: no rule knows it (outside of the layers: "
            f"{', '.join(self.attention_modules)}); fix the name in the checkpoint, or add it to the model's boundary "
            "table"
        )


@dataclass(frozen=True)
class Boundary:
    """One model family.

    Classes are written ``module:Class``, where they are defined. ``decoder`` lists the decoder layer class,
    ``ffn_attribute`` the attribute that it assigns its FFN to. ``dense`` and ``moe`` are the FFN classes that it may
    assign, ``attention`` the classes whose construction the FFN role leaves out. ``crosses`` describes the tensors
    of one hand-off for the reader. ``ends_in_sum``: the FFN's last operation is an addition (of shared and routed
    experts), which a compiler fuses with the residual addition that follows it, without rounding in between; results
    of compiled FFNs of such a family cross as float32, so that the attention side rounds where stock vLLM does.
    """

    family: str
    architectures: tuple[str, ...]
    decoder: str
    ffn_attribute: str
    attention: tuple[str, ...]
    dense: tuple[str, ...] = ()
    moe: tuple[str, ...] = ()
    crosses: str = "rows [tokens, hidden] in the model's dtype, both ways"
    weights: WeightRules = field(default_factory=WeightRules)
    ends_in_sum: bool = False

    @property
    def ffn(self) -> tuple[str, ...]:
        """Every FFN class, dense and mixture of experts."""
        return self.dense + self.moe
