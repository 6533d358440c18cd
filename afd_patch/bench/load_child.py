"""One role of ``bench load``, in a process of its own: ``… load_child ROLE OUT ENDPOINT [engine flags]``.

Takes the measure of ``load_model`` of vLLM's own worker: of what it reads, and of what stays resident.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from afd_patch.bench import pages
from afd_patch.bench.models import weight_files
from afd_patch.hosting import give_back_memory


def main(role: str, out: Path, endpoint: str, flags: list[str]) -> None:
    """``role`` is ``stock``, ``attention`` (the FFN is at ``endpoint``) or ``ffn``; ends in ``load_model``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from afd_patch import activation
    from afd_patch.config import AFDConfig

    if role == "ffn":
        from afd_patch.serve.roles import run_ffn_role

        config = AFDConfig.build(role=role, listen=endpoint)
        activation.start(config, from_environment=False)
        _measure_load(out)
        run_ffn_role(config, flags[flags.index("--model") + 1], flags)
        return
    if role == "attention":
        activation.start(AFDConfig.build(role=role, ffn=endpoint), from_environment=False)
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _measure_load(out)
    LLM.from_engine_args(EngineArgs.from_cli_args(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)))


def _measure_load(out: Path) -> None:
    """Make the first ``load_model`` of this process write its measure to ``out``, and end the process."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    native = CPUWorker.load_model

    @wraps(native)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.model_executor.model_loader.utils import get_model_architecture

        get_model_architecture(self.model_config)  # imports the model's code, which is no weight
        asked = _count_tensors()
        files = weight_files(Path(self.model_config.model))
        pages.evict(files)
        gc.collect()
        give_back_memory()  # or what importing left would be given back as part of the load
        left, before, begin = pages.cached(files), _resident(), time.perf_counter()
        native(self, *args, **kwargs)
        seconds = time.perf_counter() - begin
        gc.collect()
        after, read = _resident(), pages.cached(files)
        give_back_memory()
        trimmed = _resident()
        model = self.model_runner.get_model()
        held = {p.data_ptr(): p.untyped_storage().nbytes() for p in [*model.parameters(), *model.buffers()]}
        measured = {
            "seconds": round(seconds, 2),
            "cached_before": left,
            "read": read,
            "asked": asked[0],
            "resident_growth": after["RssAnon"] - before["RssAnon"],
            "resident_growth_after_trim": trimmed["RssAnon"] - before["RssAnon"],
            "resident_growth_with_code": after["VmRSS"] - before["VmRSS"],
            "peak_growth": after["VmHWM"] - before["VmRSS"],
            "held": sum(held.values()),
        }
        out.write_text(json.dumps(measured))
        os._exit(0)  # what an engine does next takes seconds and says nothing here

    CPUWorker.load_model = load_model


def _count_tensors() -> list[int]:
    """From now on, the first element is the number of bytes that safetensors was asked for."""
    from vllm.model_executor.model_loader import weight_utils

    total = [0]
    iterate: Callable[..., Iterator[tuple[str, Any]]] = weight_utils.safetensors_weights_iterator

    def counting(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, tensor in iterate(*args, **kwargs):
            total[0] += tensor.nbytes
            yield name, tensor

    from vllm.model_executor.model_loader import default_loader

    default_loader.safetensors_weights_iterator = counting
    return total


def _resident() -> dict[str, int]:
    """Bytes by name, from the kernel: anonymous memory is what weights are in, files are mostly code."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line[0] in ("VmRSS:", "RssAnon:", "VmHWM:")}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
