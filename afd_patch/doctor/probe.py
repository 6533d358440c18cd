"""The part of the doctor that imports vLLM: run as a subprocess by ``live.py``, which sets its environment.

It lets the role activate by itself, as in a deployment, imports every module with a patch point, and then looks at
what is in the slots. With a model it also makes vLLM's configuration, which both roles then judge. Each result is one
line of JSON after a mark, so that what came before a time limit is known.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

MARK = "afd_patch.doctor:"
#: Packages that stock vLLM itself uses to wrap functions.
_NATIVE = {"vllm", "torch", "wrapt"}


def main(arguments: list[str]) -> None:
    """``arguments``: lists of modules to import in order (JSON), a model or nothing, engine arguments (JSON)."""
    modules, model, engine = json.loads(arguments[0]), arguments[1], json.loads(arguments[2])
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from afd_patch import activation, plugin

    activated = activation.current() is not None
    plugin.register()
    failed: dict[str, str] = {}
    for part in modules:
        for name in part:
            try:
                importlib.import_module(name)
            except Exception as error:  # a broken module of vLLM is a finding, whatever it raises
                failed[name] = f"{type(error).__name__}: {error}"
        say("patches", {"activated": activated, "complete": part is modules[-1], "failed": failed, **state()})
    if model:
        say("configuration", configuration(model, engine))


def state() -> dict[str, Any]:
    """Where every patch stands, and who else is there."""
    from afd_patch import activation

    active = activation.current()
    assert active is not None
    states = [{"name": s.name, "state": s.state.name, "detail": s.detail} for s in active.manager.status()]
    return {"states": states, "foreign": list(foreign_wrappers())}


def say(kind: str, content: Any) -> None:
    print(f"\n{MARK}{json.dumps({kind: content})}", flush=True)


# -- foreign wrappers --------------------------------------------------------------------------------------------------


def foreign_wrappers() -> Iterator[dict[str, str]]:
    """Who else is on our targets: above (called before us) or below, and what replaced a native object altogether."""
    from afd_patch.doctor.patch_points import all_patches
    from afd_patch.patch_manager.slots import MISSING, resolve

    for patch in all_patches():
        module = sys.modules.get(patch.module)
        if module is None:
            continue
        try:
            slot = resolve(patch, module)
        except Exception:  # the state of the patch says why it has no target
            continue
        if len(patch.path) > 1 and not _is_native(slot.owner.__module__):
            owner = f"{slot.owner.__module__}.{slot.owner.__qualname__}"
            yield {"name": patch.name, "target": patch.target, "where": "instead of the native class", "owner": owner}
        value = slot.read()
        for where, owner in owners(slot.inherited() if value is MISSING else value):
            yield {"name": patch.name, "target": patch.target, "where": where, "owner": owner}


def owners(value: Any) -> Iterator[tuple[str, str]]:
    """Everything foreign that a call of ``value`` goes through, outermost first."""
    from afd_patch.patch_manager.slots import describe

    where, seen, todo = "above", set[int](), [value]
    while todo:
        item = todo.pop(0)
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        owner = describe(item)
        if owner.startswith("afd_patch.patches."):
            where = "below"
        elif not _is_native(owner):
            yield where, owner
        todo = [*_beneath(item), *todo]


def _beneath(item: Any) -> list[Any]:
    """What ``item`` calls, as far as can be seen: its ``__wrapped__``, or the functions that its closure holds."""
    import wrapt

    if issubclass(type(item), wrapt.BaseObjectProxy):
        return [item.__wrapped__]
    function = getattr(item, "__func__", None) or getattr(item, "func", None)
    if function is not None:
        return [function]
    wrapped = getattr(item, "__wrapped__", None)
    if wrapped is not None:
        return [wrapped]
    cells = getattr(item, "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells if _is_filled(cell)]
    return [value for value in held if callable(value) and not isinstance(value, type)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_native(owner: str) -> bool:
    package = owner.removeprefix("an object of class ").partition(".")[0]
    return package in _NATIVE or package in sys.stdlib_module_names or owner.startswith("afd_patch.")


# -- configuration -----------------------------------------------------------------------------------------------------


def configuration(model: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Whether vLLM and both roles accept ``model``, and the identity that a handshake would compare."""
    from vllm.engine.arg_utils import EngineArgs

    from afd_patch import activation, boundaries
    from afd_patch.config import AFDConfig
    from afd_patch.errors import AFDError
    from afd_patch.ffn.runner import configure
    from afd_patch.identity import identify
    from afd_patch.patches.engine_config import check_supported

    active = activation.current()
    assert active is not None
    try:
        vllm_config = configure(EngineArgs(model=model, **engine))
        boundary = boundaries.find(vllm_config.model_config.hf_config.architectures[0])
        attention = AFDConfig.build(role="attention", ffn="unix:/ffn.sock", gate=active.config.gate)
        check_supported(attention, vllm_config, boundary)
        return {"identity": identify(vllm_config, boundary, attention).to_json()}
    except (AFDError, SystemExit) as error:
        return {"refused": str(error).removeprefix("afd_patch: ")}
    except Exception as error:  # vLLM's own refusal, which may be anything
        return {"native": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(sys.argv[1:])
