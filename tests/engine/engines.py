"""What engine tests run in their children: an FFN server, and generations with or without AFD."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from typing import Any

#: Engine settings of all tests; equal settings on both sides make equal batches.
ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "disable_log_stats": True,
    "trust_remote_code": True,
}

#: One-row, odd and mixed prompts.
PROMPTS: list[Any] = [
    {"prompt_token_ids": [(7 * n + 3 * i) % 500 + 3 for i in range(length)]}
    for n, length in enumerate((1, 2, 3, 7, 33, 120))
]

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "logprobs": 2, "ignore_eos": True}


def ffn_server(model: str, endpoint: str, gate: str = "ffn", **engine: Any) -> None:
    """The FFN role, in this process, until SIGTERM."""
    allow_compilation(engine)
    from vllm.engine.arg_utils import EngineArgs

    from afd_patch.config import AFDConfig
    from afd_patch.ffn.listener import Listener
    from afd_patch.ffn.main import serve

    config = AFDConfig.build(role="ffn", listen=endpoint, gate=gate)
    assert config.listen is not None
    with closing(Listener(config.listen)) as listener:
        serve(config, listener, EngineArgs(model=model, **{**ENGINE, **engine}))


def build(model: str, **engine: Any) -> Any:
    """An in-process ``LLM``; the environment says with which role."""
    allow_compilation(engine)
    from afd_patch import plugin

    plugin.register()
    from vllm import LLM

    return LLM(model, **{**ENGINE, **engine})


def generate(
    model: str, prompts: list[Any] | None = None, sampling: dict[str, Any] | None = None, **engine: Any
) -> dict[str, Any]:
    """Tokens and logprobs for each batch of ``prompts`` (one batch, or a list of batches)."""
    batches = prompts if prompts and isinstance(prompts[0], list) else [prompts or PROMPTS]
    llm = build(model, **engine)
    return {"outputs": [ask(llm, batch, sampling) for batch in batches], "calls": remote_calls()}


def ask(llm: Any, prompts: list[Any], sampling: dict[str, Any] | None = None) -> list[Any]:
    from vllm import SamplingParams

    outputs = llm.generate(prompts, SamplingParams(**{**GREEDY, **(sampling or {})}), use_tqdm=False)
    return [
        (list(o.token_ids), [{token: p.logprob for token, p in step.items()} for step in o.logprobs or []])
        for request in outputs
        for o in request.outputs
    ]


def modules_of_ours(model: str) -> list[str]:
    """Patching modules that the process of a stock engine has imported, with vLLM's plugins loaded."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert ask(build(model), PROMPTS)
    return [name for name in sys.modules if name.startswith(("afd_patch.patch_manager", "afd_patch.patches"))]


def remote_calls() -> int:
    from afd_patch.attention import connections

    return connections.total_calls()


def allow_compilation(engine: dict[str, Any]) -> None:
    """Compiled engines need Dynamo, which the fork server's import switched off."""
    if engine.get("enforce_eager", True):
        return
    import torch._dynamo

    os.environ.pop("TORCH_COMPILE_DISABLE", None)
    torch._dynamo.config.disable = False
