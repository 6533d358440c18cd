"""A script, run by test_real_vllm in a fresh interpreter: the promises on the real vLLM.

Everything that needs vLLM is in this one process, because importing it costs many seconds.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from afd_patch.patch_manager import Patch, PatchManager, PatchState, host

CALLS: list[str] = []
CONTEXT = "vllm.forward_context"
LOADER = "vllm.model_executor.model_loader.default_loader"
LAYERS = "vllm.model_executor.models.qwen3_moe"
UBATCH = "vllm.v1.worker.gpu_ubatch_wrapper"  # has "from vllm.forward_context import create_forward_context"
LATE = "vllm.v1.worker.gpu.ubatch_utils"  # has it too


def counting(name: str) -> Callable[..., Any]:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        CALLS.append(name)
        return wrapped(*args, **kwargs)

    return host(wrapper)


def make_manager() -> PatchManager:
    manager = PatchManager()
    context = counting("context")
    manager.register(
        Patch("context", f"{CONTEXT}:create_forward_context", context, why="test", params=("additional_kwargs",)),
        Patch("weights", f"{LOADER}:DefaultModelLoader.get_all_weights", counting("weights"), why="test"),
        Patch("inherited", f"{LOADER}:DefaultModelLoader.load_model", counting("load"), why="test"),
        Patch("layer", f"{LAYERS}:Qwen3MoeDecoderLayer.__init__", counting("layer"), why="test"),
        Patch("mlp", f"{LAYERS}:Qwen3MoeMLP.forward", lambda forward: lambda *a: forward(*a), why="test"),
    )
    return manager


def look() -> dict[str, list[tuple[str, int]]]:
    """Every module and class dictionary under vllm: keys in order, values by identity."""
    seen: dict[str, list[tuple[str, int]]] = {}
    class_dict = vars(type)["__dict__"]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "vllm" or not issubclass(type(module), type(sys)):
            continue
        space = object.__getattribute__(module, "__dict__")
        seen[name] = [(key, id(value)) for key, value in space.items()]
        todo = [value for value in space.values() if issubclass(type(value), type)]
        while todo:
            cls = todo.pop()
            space = class_dict.__get__(cls)
            key = f"{space.get('__module__')}:{type.__dict__['__qualname__'].__get__(cls)}:{id(cls)}"
            if key not in seen:
                seen[key] = [(key, id(value)) for key, value in space.items()]
                todo += [value for value in space.values() if issubclass(type(value), type)]
    return seen


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if before[name] != after.get(name)]


def check_native(*names: str) -> None:
    original = sys.modules[CONTEXT].create_forward_context
    assert type(original) is type(check_native), original
    for name in names:
        assert sys.modules[name].create_forward_context is original, name


def main() -> None:
    assert not any(name.partition(".")[0] in ("vllm", "torch") for name in sys.modules)
    meta_path = list(sys.meta_path)
    manager = make_manager()
    manager.apply()
    assert {status.state for status in manager.status()} == {PatchState.PENDING}
    print("apply imports nothing:", not any(n.partition(".")[0] in ("vllm", "torch") for n in sys.modules))

    for name in (UBATCH, LOADER, LAYERS):
        importlib.import_module(name)
    manager.require_applied()
    context, ubatch, loader, layers = (sys.modules[name] for name in (CONTEXT, UBATCH, LOADER, LAYERS))
    assert ubatch.create_forward_context is context.create_forward_context
    for module in (context, loader, layers):
        assert type(module.__loader__) is type(module.__spec__.loader) is type(ubatch.__loader__)
        assert inspect.getsource(module)
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config), context.set_forward_context(None, config, num_tokens=1):
        assert context.get_forward_context().no_compile_layers == {}
    ubatch.create_forward_context(None, config)
    assert CALLS == ["context", "context"], CALLS
    manager.restore()
    check_native(UBATCH)
    assert "load_model" not in vars(loader.DefaultModelLoader)
    left = [f for f in sys.meta_path if type(f).__module__.startswith("afd_patch")]
    assert not left and all(finder in sys.meta_path for finder in meta_path)
    print("patched at import and restored: True")

    look()  # some pydantic classes are rebuilt when they are first looked at
    before = look()
    assert look() == before
    for _ in range(2):
        manager.apply()
        manager.require_applied()
        touched = differing(before, look())
        for name in (CONTEXT, UBATCH):
            assert name in touched, touched
        assert any(":DefaultModelLoader:" in name for name in touched)
        manager.restore()
        assert look() == before, differing(before, look())
    print("patched when imported and restored:", len(before), "dictionaries identical")

    with manager.applied():
        assert LATE not in sys.modules
        late = importlib.import_module(LATE)
        late.create_forward_context(None, config)
        assert CALLS == ["context"] * 3, CALLS
    check_native(UBATCH, LATE)
    late.create_forward_context(None, config)
    assert CALLS == ["context"] * 3, CALLS
    # The import added submodules to packages; apart from that, nothing may have changed.
    after = {name: items[: len(before[name])] for name, items in look().items() if name in before}
    assert after == before, differing(before, after)
    print("copies taken while on were given back: True")


if __name__ == "__main__":
    main()
