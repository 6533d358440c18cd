"""FFNRunner: vLLM's native executor with nothing but FFN modules in its model.

The native worker initialises the device, the process groups, the model and the weights, so quantisation and device
set-up are the native ones. No scheduler, no KV cache, no HTTP server is involved.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from afd_patch.boundaries.table import graph_of
from afd_patch.connectors.columns import split
from afd_patch.errors import ConnectorError
from afd_patch.ffn.compiled import EXAMPLE_ROWS, compile_layer
from afd_patch.patches.experts import Experts

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

    from afd_patch.patches.model_build import ModelBuild

logger = logging.getLogger("vllm.afd_patch")


#: Settings of the attention role that mean nothing to an FFN worker, with the value that turns them off: drafts,
#: adapters and the KV cache are not here, and none of them changes what an FFN computes.
_NOT_FOR_FFN = {
    "speculative_config": None,
    "enable_lora": False,
    "kv_transfer_config": None,
    "max_num_seqs": 1,
    "kv_cache_memory_bytes": 1 << 20,
    "skip_tokenizer_init": True,
}


def configure(engine: EngineArgs) -> Any:
    """The ``VllmConfig`` of an FFN worker of ``engine``; the ffn role must be active."""
    from afd_patch.patches.engine_config import FOR_FFN_RUNNER

    token = FOR_FFN_RUNNER.set(True)
    try:
        return dataclasses.replace(engine, **_NOT_FOR_FFN).create_engine_config()
    finally:
        FOR_FFN_RUNNER.reset(token)


class FFNRunner:
    """Loads the FFN of every decoder layer of ``vllm_config``'s model in this process.

    With tensor parallelism it is that of ``rank``, and all ranks meet at the file ``rendezvous`` (``file://PATH``).
    """

    def __init__(self, vllm_config: Any, rank: int = 0, rendezvous: str | None = None) -> None:
        from afd_patch.patches.model_load import take_loaded

        self.vllm_config = vllm_config
        self._device = torch.device(vllm_config.device_config.device)
        self._executor = _executor(vllm_config, rank, rendezvous)
        self._received: torch.Tensor | None = None
        build = take_loaded(vllm_config)
        self._hidden: int = vllm_config.model_config.hf_text_config.hidden_size
        self._request_columns = build.request_columns
        self._gate = build.gate
        self._input_ids = build.boundary.input_ids
        self._modules = build.layers
        self._layers: dict[int, Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]] = dict(build.layers)
        if graph_of(vllm_config) == "traced":
            self._compile(build)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(self._layers))

    @torch.inference_mode()
    def compute_ffn_output(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """The native FFN of decoder layer ``layer`` applied to ``rows``.

        ``rows`` is ``[tokens, request_columns]`` of the identity, in the model's dtype, on any device; native code may
        write to it. The result is ``[tokens, reply_columns]`` of that dtype.
        """
        inputs = self._inputs(rows.to(self._device))
        module = self._modules.get(layer)
        if isinstance(module, Experts):
            module.check(inputs[1])
        return self._compute(layer, *inputs)

    def _inputs(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._input_ids:
            own, ids = split(rows, self._hidden, torch.int32)
            return own, ids.view(-1)
        return (rows,) if self._gate == "ffn" else split(rows, self._hidden, torch.int32)

    def _compute(self, layer: int, *inputs: torch.Tensor) -> torch.Tensor:
        from vllm.forward_context import set_forward_context

        module = self._layers.get(layer)
        if module is None:
            dense = "" if self._gate == "ffn" else "; dense layers run in the attention role (AFD_GATE=attention)"
            raise ConnectorError(f"layer {layer} is not served here (layers: {self.layers}{dense})")
        with set_forward_context(None, self.vllm_config, num_tokens=inputs[0].shape[0]):
            result = module(*inputs)
        if isinstance(result, torch.Tensor):
            return result
        return result[0] if len(result) == 1 else torch.cat(result, dim=1)

    def give_rows(self, rows: torch.Tensor) -> None:
        """On rank 0: let the other ranks, which ``take_rows``, have the rows of the next computation."""
        from vllm.distributed.parallel_state import get_tp_group

        get_tp_group().broadcast(rows.to(self._device), src=0)

    @torch.inference_mode()
    def take_rows(self, count: int) -> torch.Tensor:
        """On another rank: the ``count`` rows that rank 0 gives; valid until the next ones."""
        from vllm.distributed.parallel_state import get_tp_group

        if self._received is None:
            self._received = self._zeros(self.vllm_config.scheduler_config.max_num_batched_tokens)
        rows: torch.Tensor = get_tp_group().broadcast(self._received[:count], src=0)
        return rows

    def _zeros(self, rows: int) -> torch.Tensor:
        dtype = self.vllm_config.model_config.dtype
        return torch.zeros(rows, self._request_columns, dtype=dtype, device=self._device)

    def _compile(self, build: ModelBuild) -> None:
        """Compile every layer now: a first call that takes seconds would look like a dead server."""
        for layer, module in build.layers.items():
            self._layers[layer] = compile_layer(module, layer, self.vllm_config)
            inputs = self._inputs(self._zeros(EXAMPLE_ROWS))
            for part in inputs:
                torch._dynamo.mark_dynamic(part, 0)
            with torch.inference_mode():
                self._compute(layer, *inputs)
        logger.info("AFD ffn: compiled %d layers", len(self._layers))

    def shutdown(self) -> None:
        """End the native worker, and remove the file with which its process group found itself."""
        rendezvous = self._executor.driver_worker.worker.distributed_init_method
        self._executor.shutdown()
        if rendezvous.startswith("file://"):
            Path(rendezvous.removeprefix("file://")).unlink(missing_ok=True)


def _executor(vllm_config: Any, rank: int, rendezvous: str | None) -> Any:
    """The native executor of one worker in this process, as one rank of several where there is a ``rendezvous``."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class RankExecutor(UniProcExecutor):
        """vLLM's own ``ExecutorWithExternalLauncher`` does the same, but ranks of two servers may meet in its group."""

        def _distributed_args(self) -> tuple[str, int, int]:
            assert rendezvous is not None
            return rendezvous, rank, rank

    return UniProcExecutor(vllm_config) if rendezvous is None else RankExecutor(vllm_config)
