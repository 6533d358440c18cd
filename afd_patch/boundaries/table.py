"""What a boundary table consists of. Data and name rules only: no vLLM, no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from afd_patch.errors import WeightError

#: Who reads a checkpoint tensor. ``none``: belongs to nothing that is built (a next-token-prediction layer).
OwnedBy = Literal["attention", "ffn", "none"]

#: Compilation modes in which Dynamo traces the stock model in one graph, FFN and all.
_TRACED_AS_A_WHOLE = ("STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE")

_LAYER = re.compile(
    r"^(?P<root>(?:[A-Za-z_]\w*\.)*)layers\.(?P<index>\d+)\.(?P<child>[A-Za-z_]\w*)(?:\.(?P<part>\w+)|$)"
)


@dataclass(frozen=True)
class WeightRules:
    """Ownership by the module that owns a tensor, decided on checkpoint names.

    ``ffn_children`` and ``attention_children`` are the names right under ``layers.N.``; ``attention_modules`` are
    the modules outside of the layers, right under one of ``roots``, and ``unbuilt_modules`` those beside them that
    the native model does not build either (vision towers, next-token prediction), so nobody reads them. A name that
    none of them covers is an error.
    """

    ffn_children: tuple[str, ...] = ("mlp",)
    attention_children: tuple[str, ...] = ("self_attn", "input_layernorm", "post_attention_layernorm")
    attention_modules: tuple[str, ...] = ("embed_tokens", "norm", "lm_head")
    unbuilt_modules: tuple[str, ...] = ()
    roots: tuple[str, ...] = ("model.", "")

    def owner(self, name: str, num_layers: int, own_gate: OwnGate | None = None) -> OwnedBy:
        """Who owns the checkpoint tensor ``name`` of a model with ``num_layers`` decoder layers.

        ``own_gate`` is what the attention role has of the FFN when it runs the router. Raises ``WeightError``, quoting
        the name, when no rule covers it.
        """
        match = _LAYER.match(name)
        if match and match["root"] in self.roots:
            if int(match["index"]) >= num_layers:
                return "none"  # next-token-prediction layers follow the decoder layers; native loaders skip them
            if match["child"] in self.ffn_children:
                if own_gate is None:
                    return "ffn"
                dense = int(match["index"]) in own_gate.dense_layers
                return "attention" if dense or match["part"] in own_gate.names else "ffn"
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
            if module in self.unbuilt_modules:
                return "none"
        raise WeightError(
            f"checkpoint tensor {name!r}: no rule knows it (outside of the layers: "
            f"{', '.join(self.attention_modules)}); fix the name in the checkpoint, or add it to the model's boundary "
            "table"
        )


@dataclass(frozen=True)
class OwnGate:
    """What an attention role that runs the router has of the FFN: its ``names``, and whole ``dense_layers``."""

    names: tuple[str, ...]
    dense_layers: frozenset[int]


@dataclass(frozen=True)
class Router:
    """The router of a mixture of experts, for ``AFD_GATE=attention``.

    ``names`` are those right under the MoE module of everything that the router owns, as attributes and in
    checkpoints. ``top_k`` and ``shared`` are fields of the model's configuration: the experts per row, and what is
    true where there are shared experts that the native runner adds to the routed ones. ``always_shared``: there are,
    whatever the configuration says. ``gated_shared``: the shared experts end in a product with a gate of their own,
    which a compiler fuses with what follows it. ``in_runner``: the native runner has the router, so rows are all that
    it is given.
    """

    names: tuple[str, ...] = ("gate",)
    top_k: str = "num_experts_per_tok"
    shared: str = ""
    always_shared: bool = False
    gated_shared: bool = False
    in_runner: bool = False

    def experts_per_row(self, config: Any) -> int:
        return int(getattr(config, self.top_k, None) or 0)

    def has_shared(self, config: Any) -> bool:
        return self.always_shared or bool(self.shared and getattr(config, self.shared, None))


@dataclass(frozen=True)
class Boundary:
    """One model family.

    Classes are written ``module:Class``, where they are defined. ``decoder`` lists the decoder layer class,
    ``ffn_attribute`` the attribute that it assigns its FFN to. ``dense`` and ``moe`` are the FFN classes that it may
    assign, ``attention`` the classes whose construction the FFN role leaves out. ``crosses`` describes the tensors
    of one hand-off for the reader. ``ends_in_sum``: the FFN's last operation is an addition (of shared and routed
    experts), which a compiler fuses with the residual addition that follows it, without rounding in between; results
    of compiled FFNs of such a family cross as float32, so that the attention side rounds where stock vLLM does.

    ``gate_in_float32``: the router's gate converts the rows to float32 where a compiler sees it, and fuses the
    conversion with the norm before it, without rounding in between. Rows cross rounded, so a model of such a family
    that is traced as a whole is refused, unless its router runs in the attention role.

    ``router``: the router of its mixtures of experts; a family without one is refused with ``AFD_GATE=attention``.

    ``ffn_summands``: attributes of a layer that has its FFN in several modules and adds their results up itself, in
    this order. Such a layer has these instead of ``ffn_attribute``, and the FFN role adds, so one hand-off is enough.
    ``language_model_only``: the checkpoint may have other modalities, and their execution is refused.
    ``refused_quantization``: methods whose native loader asks the FFN modules of a layer for their format, which the
    attention role does not have.

    ``input_ids``: the layer calls its FFN with the rows and the token id of each row, which cross beside them; such a
    family was compared with stock vLLM in eager mode and with one rank only. ``devices``: the types of device for which
    vLLM builds the model from the classes of this table; empty where that is all of them. ``refused_moe_backends``:
    kernels that take the place of the native mixture of experts.
    """

    family: str
    architectures: tuple[str, ...]
    decoder: str
    ffn_attribute: str
    attention: tuple[str, ...]
    dense: tuple[str, ...] = ()
    moe: tuple[str, ...] = ()
    crosses: str = "rows [tokens, hidden] in the model's dtype, both ways"
    router: Router | None = None
    weights: WeightRules = field(default_factory=WeightRules)
    ends_in_sum: bool = False
    gate_in_float32: bool = False
    ffn_summands: tuple[str, ...] = ()
    language_model_only: bool = False
    refused_quantization: tuple[str, ...] = ()
    input_ids: bool = False
    devices: tuple[str, ...] = ()
    refused_moe_backends: tuple[str, ...] = ()

    @property
    def ffn(self) -> tuple[str, ...]:
        """Every FFN class, dense and mixture of experts."""
        return self.dense + self.moe

    @property
    def classes(self) -> tuple[str, ...]:
        """Every class whose construction is intercepted."""
        return (self.decoder, *self.ffn, *self.attention)

    @property
    def why_gate_stays(self) -> str | None:
        """Why the router cannot run in the attention role; ``None`` where it can."""
        if self.router is not None:
            return None
        if self.moe:
            return "its router cannot run in the attention role: the cut through these experts was not built"
        return "it has no router, so with AFD_GATE=attention nothing would cross"

    def summands_cross(self, config: Any, gate: str, compiled: bool) -> bool:
        """Whether routed and shared results cross apart although the router is in the FFN role.

        A compiler fuses their sum with what follows it, in a way that depends on how many buffers it reads.
        """
        router = self.router
        if gate != "ffn" or not compiled or not self.ends_in_sum or router is None:
            return False
        return router.in_runner and not router.gated_shared and router.has_shared(config)

    def columns(self, config: Any, gate: str, compiled: bool, itemsize: int) -> tuple[int, int]:
        """Elements of a row there and back; ``config`` is the model's, ``itemsize`` is of an element of the rows.

        With the router in the attention role, the weight (float32) and number (int32) of each chosen expert cross
        beside a row, and routed and shared results come back side by side, because the attention role adds them. A
        token id (int32) crosses beside the row where the FFN takes one.
        """
        hidden = int(config.hidden_size)
        if self.summands_cross(config, gate, compiled):
            return hidden, 2 * hidden
        if gate == "ffn" or self.router is None:
            return hidden + (4 // itemsize if self.input_ids else 0), hidden
        routing = 2 * self.router.experts_per_row(config) * 4 // itemsize
        return hidden + routing, hidden * (2 if self.router.has_shared(config) else 1)

    def reply_is_unrounded(self, config: Any, gate: str) -> bool:
        """Whether what a compiled FFN ends in is fused with what follows it, so that results cross as float32."""
        return gate == "ffn" and self.ends_in_sum and not self.summands_cross(config, gate, True)

    def own_gate(self, dense_layers: Iterable[int]) -> OwnGate:
        """What the attention role has of the FFN with ``AFD_GATE=attention``, when ``dense_layers`` are no MoE."""
        return OwnGate(self.router.names if self.router else (), frozenset(dense_layers))

    def own_gate_in(self, names: Iterable[str], num_layers: int) -> OwnGate:
        """The same for a checkpoint with the tensors ``names``: a layer without a tensor of a router is dense."""
        rules, routers = self.weights, self.own_gate(()).names
        sparse = {
            int(match["index"])
            for match in map(_LAYER.match, names)
            if match and match["root"] in rules.roots
            if match["child"] in rules.ffn_children and match["part"] in routers
        }
        return self.own_gate(set(range(num_layers)) - sparse)

    def refusals(self, vllm_config: Any, gate: str = "ffn") -> Iterator[str]:
        """One sentence for each setting that this family cannot run with, in either role.

        ``gate`` is where the router runs.
        """
        if gate == "attention" and self.why_gate_stays:
            yield f"{self.why_gate_stays}; use AFD_GATE=ffn"
        device = vllm_config.device_config.device_type if self.devices else ""
        if device and device not in self.devices:
            yield (
                f"on {device} vLLM builds it from other classes than those of {self.decoder.partition(':')[0]}, and no "
                f"table knows them; it can be split on: {', '.join(self.devices)}"
            )
        backend = vllm_config.kernel_config.moe_backend if self.refused_moe_backends else ""
        if backend in self.refused_moe_backends:
            yield f"--moe-backend {backend} takes the place of the experts that are cut out; use another one"
        multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
        if self.language_model_only and multimodal is not None and not multimodal.language_model_only:
            yield "only the language model can be split, not its other modalities; add --language-model-only"
        mode = vllm_config.compilation_config.mode
        if self.input_ids and getattr(mode, "name", "") not in ("", "NONE"):
            yield "compiled, it was not compared with stock vLLM; add --enforce-eager"
        if gate == "ffn" and self.gate_in_float32 and getattr(mode, "name", "") in _TRACED_AS_A_WHOLE:
            yield (
                "compiled, its router reads rows before they are rounded, and rows cross rounded; add --enforce-eager, "
                "or use AFD_GATE=attention"
            )
        if (
            gate == "attention"
            and getattr(mode, "name", "") in _TRACED_AS_A_WHOLE
            and self._ends_elsewhere(vllm_config)
        ):
            yield (
                "compiled, its shared experts end in an operation that is fused with the ones behind it, which the "
                "other role runs; add --enforce-eager, or use AFD_GATE=ffn"
            )
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            yield from self._refusals_of_ranks(vllm_config, gate, getattr(mode, "name", "") not in ("", "NONE"))
        quantization = vllm_config.model_config.quantization
        if quantization in self.refused_quantization:
            yield (
                f"the native loader of {quantization} weights asks every layer for the format of its experts, which "
                "only the FFN role has; use another quantization"
            )

    def _refusals_of_ranks(self, vllm_config: Any, gate: str, compiled: bool) -> Iterator[str]:
        """Where the attention role keeps the native runner of the experts, that sums over the ranks, too."""
        if self.input_ids:
            yield "its FFN takes token ids, which was not tried with several tensor-parallel ranks; use one rank"
        elif gate == "attention":
            yield "AFD_GATE=attention was not built for several tensor-parallel ranks; use AFD_GATE=ffn, or one rank"
        elif self.summands_cross(vllm_config.model_config.hf_text_config, gate, compiled):
            yield (
                "compiled, its routed and shared results cross apart, which was not built for several tensor-parallel "
                "ranks; add --enforce-eager, or use one rank"
            )

    def _ends_elsewhere(self, vllm_config: Any) -> bool:
        """Whether the FFN role of a model with ``AFD_GATE=attention`` ends in more than kernels of its own.

        A compiler sums up the squares for the norm behind it in an order that depends on what it has fused before.
        """
        router, config = self.router, vllm_config.model_config.hf_text_config
        gated = router is not None and router.gated_shared and router.has_shared(config)
        return gated or bool(self.ffn_summands)
