"""One side of the comparison, in a process of its own: ``python -m afd_patch.verify.run OUT.json [engine flags]``.

Which side it is, the environment decides (``AFD_ROLE``); everything else is equal. The engine runs in this process, so
the scheduler makes the same batches on both sides.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import afd_patch
from afd_patch.verify.prompts import rounds

MAX_TOKENS = 16


def main(out: str, flags: list[str]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from afd_patch.plugin import register

    register()
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="python -m afd_patch.verify"))
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(flags)))
    model_config = llm.llm_engine.vllm_config.model_config
    answers = []
    for part in rounds(model_config.get_vocab_size(), model_config.max_model_len, MAX_TOKENS):
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in part.prompts]
        requests = llm.generate(prompts, SamplingParams(**part.sampling), use_tqdm=False)
        answers.append(
            {
                "round": part.name,
                "outputs": [
                    {
                        "tokens": list(output.token_ids),
                        "logprobs": [{str(t): p.logprob for t, p in step.items()} for step in output.logprobs or []],
                    }
                    for request in requests
                    for output in request.outputs
                ],
            }
        )
    result = {
        "role": afd_patch.status()["role"],
        **_hand_offs(llm.collective_rpc(_of_rank)),
        "answers": answers,
    }
    Path(out).write_text(json.dumps(result))


def _hand_offs(ranks: list[tuple[int, int]]) -> dict[str, int]:
    """Calls to the FFN role by all ranks, and the layers that made them."""
    return {"remote_calls": sum(calls for calls, _ in ranks), "layers": max(layers for _, layers in ranks)}


def _of_rank(worker: Any) -> tuple[int, int]:
    """The calls of one rank and its layers that cross, in the process of its worker."""
    connections = sys.modules.get("afd_patch.attention.connections")
    if connections is None:
        return 0, 0
    return connections.total_calls(), connections.crossing_layers()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
