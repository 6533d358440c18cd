"""FFNRunner: vLLM's native executor with nothing but FFN modules in its model.

The native worker initialises the device, the process groups, the model and the weights, so quantisation and device
set-up are the native ones. No scheduler, no KV cache, no HTTP server is involved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from afd_patch.errors import ConnectorError
from afd_patch.ffn.compiled import EXAMPLE_ROWS, compile_layer
from afd_patch.identity import traced_as_a_whole

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.afd_patch")


def configure(engine: EngineArgs) -> Any:
    """The ``VllmConfig`` of an FFN worker; the ffn role must be active."""
    from afd_patch.patches.engine_config import FOR_FFN_RUNNER

    token = FOR_FFN_RUNNER.set(True)
    try:
        return engine.create_engine_config()
    finally:
        FOR_FFN_RUNNER.reset(token)


class FFNRunner:
    """Loads the FFN of every decoder layer of ``vllm_config``'s model in this process."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        from afd_patch.patches.model_load import take_loaded

        self.vllm_config = vllm_config
        self._device = torch.device(vllm_config.device_config.device)
        self._executor = UniProcExecutor(vllm_config)
        build = take_loaded(vllm_config)
        self._layers: dict[int, Callable[[torch.Tensor], torch.Tensor]] = dict(build.layers)
        if traced_as_a_whole(vllm_config):
            self._compile(build.layers, build.reply_dtype)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(self._layers))

    @torch.inference_mode()
    def compute_ffn_output(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """The native FFN of decoder layer ``layer`` applied to ``rows``.

        ``rows`` is ``[tokens, hidden]`` in the model's dtype, on any device; native code may write to it. The result
        has the same shape; its dtype is the ``reply_dtype`` of the identity.
        """
        from vllm.forward_context import set_forward_context

        module = self._layers.get(layer)
        if module is None:
            raise ConnectorError(f"layer {layer} is not served here (layers: {self.layers})")
        with set_forward_context(None, self.vllm_config, num_tokens=rows.shape[0]):
            return module(rows.to(self._device))

    def _compile(self, modules: dict[int, nn.Module], reply_dtype: torch.dtype) -> None:
        """Compile every layer now: a first call that takes seconds would look like a dead server."""
        model = self.vllm_config.model_config
        for layer, module in modules.items():
            self._layers[layer] = compile_layer(module, layer, self.vllm_config, reply_dtype)
            rows = torch.zeros(
                EXAMPLE_ROWS,
                model.hf_text_config.hidden_size,
                dtype=model.dtype,
                device=self._device,
            )
            torch._dynamo.mark_dynamic(rows, 0)
            self.compute_ffn_output(layer, rows)
        logger.info("AFD ffn: compiled %d layers", len(self._layers))

    def shutdown(self) -> None:
        """End the native worker, and remove the file with which its process group found itself."""
        rendezvous = self._executor.driver_worker.worker.distributed_init_method
        self._executor.shutdown()
        if rendezvous.startswith("file://"):
            Path(rendezvous.removeprefix("file://")).unlink(missing_ok=True)
