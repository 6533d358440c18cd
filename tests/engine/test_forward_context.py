"""``additional_kwargs["afd_metadata"]``: there in every forward of an active role, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.engine.children import Child
from tests.engine.engines import ask, build

Serving = Callable[..., AbstractContextManager[Child]]
PROMPT = [{"prompt_token_ids": [3, 4, 5, 6]}]


def config_of(model: str) -> Any:
    """A ``VllmConfig`` without the checks of a role."""
    from vllm.engine.arg_utils import EngineArgs

    from tests.engine.engines import ENGINE

    return EngineArgs(model=model, **ENGINE).create_engine_config()


def contexts(model: str) -> dict[str, Any]:
    """What the wrapped ``create_forward_context`` does, looked at from inside and outside of contexts."""
    import torch
    from vllm import forward_context
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context, set_forward_context
    from vllm.v1.worker.ubatch_utils import UBatchSlice

    import afd_patch
    from afd_patch.errors import ForwardContextError
    from afd_patch.metadata import AFD_METADATA, get_afd_metadata_from_forward_context

    config = config_of(model)
    seen: dict[str, Any] = {}
    with afd_patch.activated(role="attention", ffn="unix:/nowhere/at/all.sock"):
        with set_forward_context(None, config, num_tokens=4):
            outer = get_afd_metadata_from_forward_context()
            seen["role"], seen["stage"], seen["stages"] = outer.role, outer.stage, outer.stage_count
            seen["no connector without a model"] = outer.connector is None
            with set_forward_context(None, config, num_tokens=2):
                seen["nested is another"] = get_afd_metadata_from_forward_context().transaction > outer.transaction
            seen["outer is back"] = get_afd_metadata_from_forward_context() is outer
        try:
            with set_forward_context(None, config, num_tokens=4):
                raise KeyError("inside")
        except KeyError:
            pass
        try:
            get_afd_metadata_from_forward_context()
        except ForwardContextError as error:
            seen["outside"] = str(error)
        theirs = {"platform": 1}
        held = forward_context.create_forward_context
        context = held(
            None,
            config,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            additional_kwargs=theirs,
            ubatch_slices=[UBatchSlice(slice(0, 1), slice(0, 3)), UBatchSlice(slice(1, 2), slice(3, 5))],
        )
        seen["others kept"] = context.additional_kwargs["platform"] == 1 and AFD_METADATA in context.additional_kwargs
        seen["their dict untouched"] = theirs == {"platform": 1}
        metadata = context.additional_kwargs[AFD_METADATA]
        seen["slices"] = (metadata.stage_count, metadata.request_slices, metadata.token_slices)
    with set_forward_context(None, config, num_tokens=4):
        seen["after"] = AFD_METADATA in get_forward_context().additional_kwargs
        seen["a held reference"] = AFD_METADATA in held(None, config).additional_kwargs
        try:
            torch.ops.afd_patch.remote_ffn(torch.zeros(1, 4), torch.zeros(1, 4), 0)
        except ForwardContextError as error:
            seen["op"] = str(error)
    return seen


def test_contract(checkpoint: Callable[..., str]) -> None:
    seen = Child(contexts_with_op, checkpoint("qwen3_moe")).result()
    assert seen["role"] == "attention"
    assert (seen["stage"], seen["stages"]) == (0, 1)
    assert seen["no connector without a model"]
    assert seen["nested is another"]
    assert seen["outer is back"]
    assert "no forward context" in seen["outside"]
    assert seen["others kept"]
    assert seen["their dict untouched"]
    assert seen["slices"] == (2, (slice(0, 1), slice(1, 2)), (slice(0, 3), slice(3, 5)))
    assert seen["after"] is False
    assert seen["a held reference"] is False
    assert "not active any more" in seen["op"]


def contexts_with_op(model: str) -> dict[str, Any]:
    import afd_patch.attention.op  # noqa: F401

    return contexts(model)


def every_forward(model: str, **engine: Any) -> dict[str, Any]:
    """Which forwards the remote op saw: profile and warm-up runs before the first request, and its own."""
    from afd_patch.attention import op
    from afd_patch.connectors import retry
    from afd_patch.metadata import get_afd_metadata_from_forward_context

    seen: list[tuple[int, int, bool]] = []
    native = retry.RetryingConnector.call

    def call(self: Any, layer: int, rows: Any, out: Any, **fields: Any) -> None:
        metadata = get_afd_metadata_from_forward_context()
        seen.append((layer, fields["transaction"], metadata.connector is self))
        native(self, layer, rows, out, **fields)

    retry.RetryingConnector.call = call  # type: ignore[method-assign]
    llm = build(model, **engine)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    before = len(seen)
    worker.execute_dummy_batch()
    dummy = len(seen) - before
    worker.model_runner.profile_run()
    profile = len(seen) - before - dummy
    ask(llm, PROMPT, {"max_tokens": 3})
    assert op.OP_NAME
    return {"dummy": dummy, "profile": profile, "seen": seen}


def test_dummy_profile_and_real_forwards(
    checkpoint: Callable[..., str], serving: Serving, attention: dict[str, str]
) -> None:
    model = checkpoint("qwen3_moe")
    with serving(model):
        result = Child(every_forward, model, env=attention).result()
    assert result["dummy"] == 4
    assert result["profile"] == 4
    seen = result["seen"]
    assert all(own for _, _, own in seen)
    assert [layer for layer, _, _ in seen] == [0, 1, 2, 3] * (len(seen) // 4)
    transactions = [transaction for _, transaction, _ in seen]
    assert all(len(set(transactions[i : i + 4])) == 1 for i in range(0, len(seen), 4)), "one per forward"
    assert len(set(transactions)) == len(seen) // 4


def run_after_deactivation(model: str) -> str:
    import afd_patch

    with afd_patch.activated(role="attention", ffn=__import__("os").environ["FFN"]):
        llm = build(model)
        ask(llm, PROMPT)
    ask(llm, PROMPT)
    return "it answered"


def test_a_model_that_outlives_its_role_says_so(
    checkpoint: Callable[..., str], serving: Serving, endpoint: str
) -> None:
    model = checkpoint("qwen3_moe")
    with serving(model):
        kind, message = Child(run_after_deactivation, model, env={"FFN": endpoint}).outcome()
    assert kind == "error"
    assert "not active any more" in message
