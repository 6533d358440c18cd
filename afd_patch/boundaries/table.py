"""What a boundary table consists of. Data and name rules only: no vLLM, no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from afd_patch.errors import WeightError

#: Who reads a checkpoint tensor. ``none``: belongs to nothing that is built (a next-token-prediction layer).
OwnedBy = Literal["attention", "ffn", "none"]

#: What a compiler of the stock model sees of a mixture of experts: there is no compiler, one op, every operation.
Graph = Literal["none", "opaque", "traced"]

_LAYER = re.compile(
    r"^(?P<root>(?:[A-Za-z_]\w*\.)*)layers\.(?P<index>\d+)\.(?P<child>[A-Za-z_]\w*)(?:\.(?P<part>\w+)|$)"
)


def graph_of(vllm_config: Any) -> Graph:
    """What the compiler of an engine with this configuration would see, if nothing were split off.

    It depends on the device (``MoERunner._select_forward`` in vllm/model_executor/layers/fused_moe/runner).
    """
    if getattr(vllm_config.compilation_config.mode, "name", "NONE") == "NONE":
        return "none"
    return "traced" if vllm_config.device_config.device_type == "cpu" else "opaque"


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
    """The router of a mixture of experts, and what its runner adds up: where the cut goes through the experts.

    ``names`` are those right under the MoE module of everything that the router owns, as attributes and in
    checkpoints, the gate first. ``top_k`` and ``shared`` are fields of the model's configuration: the experts per row,
    and what is true where there are shared experts that the native runner adds to the routed ones. ``always_shared``:
    there are, whatever the configuration says. ``shared_ending``: the shared experts end in a product of what these two
    of their modules return, the last projection and a gate.
    """

    names: tuple[str, ...] = ("gate",)
    top_k: str = "num_experts_per_tok"
    shared: str = ""
    always_shared: bool = False
    shared_ending: tuple[str, str] | None = None

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
    of one hand-off for the reader.

    ``gate_in_float32``: the router's gate converts the rows to float32 where a compiler sees it, and fuses the
    conversion with the norm before it, without rounding in between. Rows cross rounded, so a model of such a family
    that is traced as a whole is refused, unless its router runs in the attention role.

    ``router``: the router of its mixtures of experts; a family with such and without this is refused with
    ``AFD_GATE=attention``, and compiled.

    ``ffn_summands``: attributes of a layer that has its FFN in two modules and adds their results up itself, in this
    order, which is also that of their calls. Such a layer has these instead of ``ffn_attribute``, and one hand-off is
    enough for both.
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

    def has_shared(self, vllm_config: Any) -> bool:
        """Whether the native runner of the experts adds the result of shared experts."""
        return self.router is not None and self.router.has_shared(vllm_config.model_config.hf_text_config)

    def end_is_fused(self, vllm_config: Any) -> bool:
        """Whether a compiler fuses what the stock FFN ends in with what follows it, unless that is a kernel.

        With several tensor-parallel ranks the runner of the experts ends in a sum over them, which nothing is fused
        with; a layer that adds two modules up itself does so after that.
        """
        if graph_of(vllm_config) == "none":
            return False
        return bool(self.ffn_summands) or vllm_config.parallel_config.tensor_parallel_size == 1

    def cuts_results(self, vllm_config: Any, gate: str) -> bool:
        """Whether results cross before they are put together, which native code does in the attention role.

        That is so with the router in the attention role, where the native runner of the experts stays, and where a sum
        is fused with what follows it: how depends on how many buffers there are to read.
        """
        if gate == "attention":
            return self.has_shared(vllm_config)
        return self.end_is_fused(vllm_config) and (bool(self.ffn_summands) or self.has_shared(vllm_config))

    def ending(self, vllm_config: Any, gate: str) -> tuple[str, str] | None:
        """The two modules of the shared experts whose product the attention role makes: a compiler would fuse it."""
        if self.router is None or graph_of(vllm_config) != "traced" or not self.has_shared(vllm_config):
            return None
        return self.router.shared_ending if self.cuts_results(vllm_config, gate) else None

    def replies(self, vllm_config: Any, gate: str) -> tuple[int, ...]:
        """Columns of each result that a layer hands back."""
        hidden = int(vllm_config.model_config.hf_text_config.hidden_size)
        if not self.cuts_results(vllm_config, gate):
            return (hidden,)
        return (hidden, hidden, 1) if self.ending(vllm_config, gate) else (hidden, hidden)

    def columns(self, vllm_config: Any, gate: str) -> tuple[int, int]:
        """Elements of a row there and back, in the model's dtype.

        With the router in the attention role, the weight (float32) and number (int32) of each chosen expert cross
        beside a row; a token id (int32) does where the FFN takes one.
        """
        model = vllm_config.model_config
        side = int(self.input_ids)
        if gate == "attention" and self.router is not None:
            side = 2 * self.router.experts_per_row(model.hf_text_config)
        request = int(model.hf_text_config.hidden_size) + side * 4 // model.dtype.itemsize
        return request, sum(self.replies(vllm_config, gate))

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
        graph = graph_of(vllm_config)
        if graph != "none" and (self.input_ids or (self.moe and self.router is None)):
            yield "compiled, it was not compared with stock vLLM; add --enforce-eager"
        if gate == "ffn" and self.gate_in_float32 and graph != "none":
            yield (
                "compiled, its router reads rows before they are rounded, and rows cross rounded; add --enforce-eager, "
                "or use AFD_GATE=attention"
            )
        if gate == "attention" and self.ffn_summands and graph != "none":
            yield (
                "compiled, its layers add the result of their shared experts themselves, which would have to be here "
                "before the routing of the others is known; add --enforce-eager, or use AFD_GATE=ffn"
            )
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            if self.input_ids:
                yield "its FFN takes token ids, which was not tried with several tensor-parallel ranks; use one rank"
            elif gate == "attention":
                yield (
                    "AFD_GATE=attention was not built for several tensor-parallel ranks, over which the native runner "
                    "of the experts would sum up again; use AFD_GATE=ffn, or one rank"
                )
        quantization = vllm_config.model_config.quantization
        if quantization in self.refused_quantization:
            yield (
                f"the native loader of {quantization} weights asks every layer for the format of its experts, which "
                "only the FFN role has; use another quantization"
            )
