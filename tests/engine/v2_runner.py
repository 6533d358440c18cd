"""A generation with the V2 model runner in a fresh interpreter; prints one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any


def pretend_triton_backend() -> None:
    """Register a Triton backend whose driver says "cpu"; the interpreter (``TRITON_INTERPRET``) runs the kernels."""
    import triton.backends

    class Driver:
        @classmethod
        def is_active(cls) -> bool:
            return False

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            import torch

            return torch.cpu

        def get_current_target(self) -> Any:
            from triton.backends.compiler import GPUTarget

            return GPUTarget("cpu", 0, 1)

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=Driver)


def main(model: str, prompts: list[Any], engine: dict[str, Any], sampling: dict[str, Any], needs: str = "") -> None:
    """``needs`` names what stock vLLM for CPU lacks for the model (``cpu_help.HELP``)."""
    pretend_triton_backend()
    from afd_patch import plugin

    plugin.register()
    from vllm import LLM

    from tests.engine.cpu_help import HELP
    from tests.engine.engines import ask, remote_calls

    HELP.get(needs, lambda: None)()

    llm = LLM(model, **engine)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    outputs = ask(llm, prompts, sampling)
    print(json.dumps({"outputs": outputs, "calls": remote_calls(), "runner": type(runner).__module__}), flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
    sys.stdout.flush()
