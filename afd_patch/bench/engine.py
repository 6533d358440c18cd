"""One engine of ``bench serve``, in a process of its own: ``python -m afd_patch.bench.engine IN OUT [engine flags]``.

``IN`` and ``OUT`` are file descriptors; each line is a JSON object, a batch to generate and how long it took. What the
engine is, stock or attention role, and which cores it has, the environment decides.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

# At the top, as in most scripts: vLLM's own processes import this file too, and with it what is patched for them.
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(source: int, sink: int, flags: list[str]) -> None:
    """Answer until the other side closes ``source``."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="python -m afd_patch.bench serve"))
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(flags)))
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    with os.fdopen(source) as commands, os.fdopen(sink, "w", buffering=1) as answers:
        answers.write(json.dumps({"ready": True, "patches": _patches()}) + "\n")
        for line in commands:
            answers.write(json.dumps(_generate(llm, vocabulary, **json.loads(line))) + "\n")


def _generate(llm: Any, vocabulary: int, batch: int, prompt: int, new: int, seed: int) -> dict[str, Any]:
    """Generate ``new`` tokens for each of ``batch`` random prompts of ``prompt`` tokens."""
    rng = random.Random(seed)
    prompts: list[Any] = [
        {"prompt_token_ids": [rng.randrange(3, vocabulary) for _ in range(prompt)]} for _ in range(batch)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    requests = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "generated": sum(len(request.outputs[0].token_ids) for request in requests)}


def _patches() -> int:
    """How many patches this process has; a stock engine must have none."""
    import afd_patch

    return len(afd_patch.status()["patches"])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
