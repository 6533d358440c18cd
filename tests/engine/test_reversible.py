"""After a role, vLLM is what it was, by ``is``: every module and class dictionary, in order.

The roles are the real ones, and a model was built and has answered while they were active.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import pytest

from tests.engine.children import Child
from tests.engine.engines import ask, build, modules_of_ours
from tests.patch_manager.on_real_vllm import differing, look

Serving = Callable[..., AbstractContextManager[Child]]
PROMPT = [{"prompt_token_ids": [3, 4, 5]}]


def import_everything() -> None:
    """All modules that a role patches."""
    from afd_patch.boundaries import TABLES

    for table in TABLES:
        for name in (table.decoder, *table.ffn, *table.attention):
            # Qwen3.5's module needs torchvision, which the CPU environment has not; its patches stay pending.
            if ".qwen3_5:" not in name:
                importlib.import_module(name.partition(":")[0])


def roles_come_and_go(endpoint: str) -> list[str]:
    """Activate and deactivate each role, twice; by-name copies are taken while it is active."""
    from vllm import forward_context

    import afd_patch

    import_everything()
    look()  # some pydantic classes are rebuilt when they are first looked at
    before = look()
    native = forward_context.create_forward_context
    wrong: list[str] = []
    roles = ({"role": "attention", "ffn": endpoint}, {"role": "ffn", "listen": endpoint})
    for settings in (*roles, *({**role, "gate": "attention"} for role in roles), *roles):
        with afd_patch.activated(**settings):
            status = afd_patch.status()
            states = {patch["state"] for patch in status["patches"] if ".qwen3_5." not in patch["name"]}
            if states != {"APPLIED"} or len(status["patches"]) < 20:
                wrong.append(f"not all applied: {status}")
            if len(differing(before, look())) < 10:
                wrong.append("nothing was patched")
            copy = ModuleType("copies_taken_while_active")
            sys.modules[copy.__name__] = copy
            exec("from vllm.forward_context import create_forward_context", vars(copy))
            if copy.create_forward_context is native:
                wrong.append("the copy is native while the role is active")
        wrong += [f"differs after {settings['role']}: {name}" for name in differing(before, look())]
        if copy.create_forward_context is not native:
            wrong.append("a by-name copy was not given back")
    return wrong


def test_activate_and_deactivate(endpoint: str) -> None:
    assert Child(roles_come_and_go, endpoint).result() == []


def model_comes_and_goes(model: str, endpoint: str) -> dict[str, Any]:
    """Stock, stock, AFD, stock in one process. What the second stock engine binds anew, AFD's may too."""
    import afd_patch

    import_everything()
    first = ask(build(model), PROMPT)
    look()
    start = look()
    ask(build(model), PROMPT)
    before = look()
    with afd_patch.activated(role="attention", ffn=endpoint):
        split = ask(build(model), PROMPT)
    changed = changed_slots(before, look()) - changed_slots(start, before)
    last = ask(build(model), PROMPT)
    return {"first": first, "split": split, "last": last, "changed": sorted(changed)}


def changed_slots(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Slots that are new, gone, or hold another object."""
    return {
        f"{name}.{key}" for name in differing(before, after) for key, _ in set(before[name]) ^ set(after.get(name, []))
    }


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v2"])
def test_a_model_was_built_meanwhile(
    architecture: str, checkpoint: Callable[..., str], serving: Serving, endpoint: str
) -> None:
    model = checkpoint(architecture)
    with serving(model):
        result = Child(model_comes_and_goes, model, endpoint).result()
    assert result["changed"] == []
    assert result["first"] == result["split"] == result["last"]


def failing_construction(model: str) -> list[str]:
    """A constructor raises in the middle of the build; nothing of the build stays on."""
    import torch
    from torch.nn.modules import module as torch_module
    from vllm.model_executor.models import qwen3_moe

    from afd_patch.patches.construction import CURRENT_BUILD

    native = qwen3_moe.Qwen3MoeAttention.__init__
    calls: list[int] = []

    def failing(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("in the third layer")
        native(self, *args, **kwargs)

    qwen3_moe.Qwen3MoeAttention.__init__ = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="in the third layer"):
        build(model)
    left = [str(hook) for hook in torch_module._global_parameter_registration_hooks.values()]
    if CURRENT_BUILD.get() is not None:
        left.append("the build")
    if torch.empty(1).is_meta:
        left.append("the meta device")
    return [*left, *([] if len(calls) == 3 else [f"{len(calls)} calls"])]


def test_an_exception_in_a_constructor_leaves_nothing_on(
    checkpoint: Callable[..., str], serving: Serving, attention: dict[str, str]
) -> None:
    model = checkpoint("qwen3_moe")
    with serving(model):
        assert Child(failing_construction, model, env=attention).result() == []


def test_without_the_variable_vllm_was_never_touched(checkpoint: Callable[..., str]) -> None:
    child = Child(modules_of_ours, checkpoint("llama"))
    assert child.result() == []
