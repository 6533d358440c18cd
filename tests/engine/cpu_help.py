"""What some architectures lack on stock vLLM 0.32 for CPU, made up for in a test's child. Both sides get the same help.

Nothing of this is part of the product: it only makes stock vLLM run, so that there is something to compare with.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any


def torchvision() -> None:
    """The Qwen3.5 family imports torchvision for its images; a language-only model never calls it.

    Where it is not installed, empty modules stand in for it, also while vLLM inspects the model class, which it would
    do in a process without them.
    """
    from vllm.model_executor.models import registry

    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        _empty_module(f"torchvision{name}")
    registry._run_in_subprocess = lambda inspect: inspect()


def _empty_module(name: str) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    module.__path__ = []
    module.__getattr__ = _empty_class  # type: ignore[method-assign]
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _empty_class(name: str) -> type:
    """Whatever is imported from an empty module."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def minimax_m2_router() -> None:
    """vLLM's CPU router knows sigmoid scores with a correction bias only as grouped top-k: one group is the same."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    native = CPURouter._compute_routing

    def compute_routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk and self.custom_routing_function is None:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return native(self, *args, **kwargs)

    CPURouter._compute_routing = compute_routing


def dense_mla() -> None:
    """Sparse attention without its indexer is dense MLA: the same result while the context fits in ``index_topk``."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2Model

    MODELS_CONFIG_MAP.pop("DeepseekV32ForCausalLM", None)  # it asserts that there is an index_topk

    native = DeepseekV2Model.load_weights

    def load_weights(self: Any, weights: Any) -> Any:
        return native(self, ((name, tensor) for name, tensor in weights if ".indexer." not in name))

    DeepseekV2Model.load_weights = load_weights


def without_index_topk(config: Any) -> Any:
    """For ``hf_overrides``: vLLM takes a configuration without ``index_topk`` for one with dense attention."""

    class Dense(type(config)):  # type: ignore[misc]
        @property
        def index_topk(self) -> int:
            raise AttributeError("index_topk")

    Dense.__name__ = type(config).__name__
    config.__dict__.pop("index_topk", None)
    config.__class__ = Dense
    return config


def buildable_sparse_attention() -> None:
    """Sparse attention gets the dense kernels, so that a model can be built and loaded; it must not run."""
    from vllm.platforms.cpu import CpuPlatform

    native = CpuPlatform.get_attn_backend_cls.__func__  # type: ignore[attr-defined]

    def get_attn_backend_cls(cls: Any, *args: Any, attn_selector_config: Any, **kwargs: Any) -> Any:
        dense = attn_selector_config._replace(use_sparse=False)
        return native(cls, *args, attn_selector_config=dense, **kwargs)

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def deepseek_v4_kernels() -> None:
    """How DeepSeek V4 chooses experts, for processors without AMX: kernels that vLLM has in its build for AMX only."""
    import torch
    from torch.nn.functional import softplus

    def weigh(logits: torch.Tensor, chosen: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
        scores = softplus(logits.float()).sqrt().gather(1, chosen.long())
        return scores / scores.sum(1, keepdim=True) * scaling, chosen.to(torch.int32)

    def hash_topk_cpu(
        logits: torch.Tensor, tid2eid: torch.Tensor, topk: int, scoring: str, fused: int, experts: int, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return weigh(logits, tid2eid, scaling)

    def biased_topk_cpu(
        rows: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor, topk: int, renormalize: bool, scoring: str,
        fused: int, scaling: float | None, apply_scaling: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        chosen = (softplus(logits.float()).sqrt() + bias).topk(topk, dim=1).indices
        return weigh(logits, chosen, scaling or 1.0)

    _native_op(
        hash_topk_cpu,
        "(Tensor logits, Tensor tid2eid, int topk, str scoring, int fused, int experts, float scaling)"
        " -> (Tensor, Tensor)",
    )
    _native_op(
        biased_topk_cpu,
        "(Tensor rows, Tensor logits, Tensor bias, int topk, bool renormalize, str scoring, int fused,"
        " float? scaling, bool apply_scaling) -> (Tensor, Tensor)",
    )


def deepseek_v4() -> None:
    """The same, and attention can be loaded: a weight stays as it is where there is no kernel to pack it."""
    deepseek_v4_kernels()

    def convert_weight_packed(weight: Any) -> Any:
        return weight.clone()

    _native_op(convert_weight_packed, "(Tensor weight) -> Tensor")


def deepseek_v4_without_attention() -> None:
    """DeepSeek V4 runs, with something else in the places of what only the build for AMX has.

    Attention, and the sum of the residual streams at the end, are replaced by something that depends on their input;
    streams are mixed by vLLM's own reference code. vLLM 0.32.0 asks its CPU scheduler of tiles for keys that it lacks.
    """
    deepseek_v4()
    from vllm.model_executor.layers import mhc
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
    from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention

    def attention(self: Any, positions: Any, rows: Any, *args: Any) -> Any:
        return rows * (positions.unsqueeze(1) % 7).to(rows.dtype)

    DeepseekV4CPUAttention.forward = attention
    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, tokens: dict.fromkeys(
        ("swaonly", "c4a", "c128a", "c1a", "c2a")
    )
    mhc.MHCPreOp.forward_cpu = mhc.MHCPreOp.forward_native
    mhc.MHCPostOp.forward_cpu = mhc.MHCPostOp.forward_native
    mhc.HCHeadOp.forward_cpu = lambda self, streams, *args: streams.mean(1)


def _native_op(function: Callable[..., Any], schema: str) -> None:
    """``function`` as the op of its name among vLLM's own, unless there is one."""
    import torch
    import vllm._custom_ops  # noqa: F401  (it loads vLLM's own)

    if hasattr(torch.ops._C, function.__name__):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(f"{function.__name__}{schema}")
    library.impl(function.__name__, function, "CPU")
    _libraries.append(library)


#: An op goes when its library does.
_libraries: list[Any] = []

HELP: dict[str, Callable[[], None]] = {
    "qwen3_5_moe": torchvision,
    "qwen3_5_moe_text": torchvision,
    "minimax_m2": minimax_m2_router,
    "deepseek_v32": dense_mla,
    "glm_moe_dsa": dense_mla,
    "deepseek_v4": deepseek_v4,
    "deepseek_v4_without_attention": deepseek_v4_without_attention,
}

#: Engine arguments without which stock vLLM does not run an architecture.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": {"language_model_only": True},
    "deepseek_v32": {"hf_overrides": without_index_topk},
    "glm_moe_dsa": {"hf_overrides": without_index_topk},
}


def helped(architecture: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` after the help for ``architecture``, with its arguments."""
    HELP.get(architecture, lambda: None)()
    return function(*args, **{**ARGUMENTS.get(architecture, {}), **kwargs})
