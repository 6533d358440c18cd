"""The vocabulary on CPUs: the attention role keeps its embeddings and its output head once.

vLLM for CPUs copies what a linear layer multiplies with into the layout of a kernel and then drops the original. It
treats embeddings and the output head alike, for they may be one: both get the copy, and both keep the original. But
embeddings are looked up in the original, and only models that use them as their head ever multiply with them; and a
head of its own (``ParallelLMHead``, whose ``forward`` raises) is only multiplied with. So embeddings are copied when
they are multiplied with for the first time, and a head drops its original like any other linear layer, unless an
option of the engine has it read. The kernels and what they read are vLLM's own.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from afd_patch.patch_manager import Patch, host
from afd_patch.patches.construction import CURRENT_BUILD

if TYPE_CHECKING:
    from afd_patch.config import AFDConfig


def patches(config: AFDConfig) -> list[Patch]:
    if config.role == "ffn":
        return []
    return [
        Patch(
            name="vocabulary.pack",
            target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
            make=host(_pack),
            params=("layer", "remove_weight"),
            why="embeddings get no copy that nobody multiplies with, and a head keeps no original that nobody reads",
            upstream="vllm/model_executor/layers/vocab_parallel_embedding.py UnquantizedEmbeddingMethod",
            removal="a vLLM that packs embeddings when they are multiplied with, and keeps a head once",
        )
    ]


def _pack(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    build = CURRENT_BUILD.get()
    given = inspect.signature(wrapped).bind(*args, **kwargs)
    layer = given.arguments["layer"]
    if isinstance(layer, VocabParallelEmbedding) and build is not None:
        if not isinstance(layer, ParallelLMHead):
            _pack_at_first_use(layer, wrapped, given)
            return
        given.arguments["remove_weight"] |= not _head_is_read(build.vllm_config)
    wrapped(*given.args, **given.kwargs)


def _head_is_read(vllm_config: Any) -> bool:
    """Whether something else than the kernel reads the weight of the head.

    A head in another dtype multiplies with the weight itself (``LogitsProcessor._apply_head``), and a draft model
    compares its own head with it (``SpecDecodeBaseProposer._maybe_share_lm_head``).
    """
    model = vllm_config.model_config
    return vllm_config.speculative_config is not None or model.head_dtype != model.dtype


def _pack_at_first_use(layer: Any, native: Any, given: inspect.BoundArguments) -> None:
    def multiply(x: Any, weight: Any, bias: Any) -> Any:
        native(*given.args, **given.kwargs)  # puts the kernel in the place of this function
        return layer.cpu_linear(x, weight, bias)

    layer.cpu_linear = multiply
