"""What vLLM's model code does with a decoder layer's FFN, read from its source, works with a stand-in too.

The uses are found by syntax: class tests, and attributes that are read, also through a local name or a model's list of
its expert layers. Whether a stand-in satisfies them, the built attention role of each architecture says, compared with
the native model. No FFN server and no weights are needed for that.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from afd_patch import boundaries
from afd_patch.boundaries import TABLES, Boundary
from afd_patch.doctor import registry
from afd_patch.doctor.layers import find_layers
from afd_patch.doctor.names import Definition, Names
from afd_patch.doctor.source import installed
from tests.engine.children import Child
from tests.engine.cpu_help import ARGUMENTS, HELP
from tests.engine.engines import ENGINE

_tree = installed()
assert _tree is not None
NAMES = Names(_tree)
KNOWN = registry.architectures(_tree)

#: Functions that run in the constructor of a model, while its native FFN modules are there.
CONSTRUCTING = {"__init__", "set_moe_parameters"}
#: Functions that need more than a stand-in has, and why they never run, or may.
EXCEPTIONS = {
    "update_physical_experts_metadata": "moves experts between ranks: --enable-eplb and elastic scaling are refused",
    "_get_moe_weight_dtype": "gpt-oss in quark's format, which the table refuses",
    "_load_weights_quark": "gpt-oss in quark's format, which the table refuses",
    "load_moe_expert_weights": "Llama 4, for an expert's tensor, which the attention role does not read",
}
#: A checkpoint of each family: all its architectures share the native classes.
CHECKPOINTS = {
    "deepseek_v2": "deepseek_v3",
    "llama": "llama",
    "qwen3": "qwen3",
    "step3_text": "step3_text",
    "qwen3_5": "qwen3_5_moe_text",
}


def modules_of(table: Boundary) -> list[str]:
    """The modules whose code sees the FFN of this family: those of its classes and of its models, with their bases."""
    models = [d for name in table.architectures for d in NAMES.lookup(*KNOWN[name]) if isinstance(d, Definition)]
    bases = {base.module for model in models for base in NAMES.ancestry(model)}
    return sorted(bases | {cls.partition(":")[0] for cls in table.classes})


def functions(table: Boundary) -> Iterator[tuple[str, ast.FunctionDef]]:
    for module in modules_of(table):
        parsed = NAMES.tree.parse(module)
        assert parsed is not None, module
        yield from ((module, node) for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef))


def uses(table: Boundary, function: ast.FunctionDef) -> tuple[set[str], set[str]]:
    """Attributes that ``function`` reads from an FFN, and the classes that it tests it for."""
    ffn = {table.ffn_attribute, *table.ffn_summands}
    local: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr in ffn:
            local |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.For) and ast.unparse(node.iter).endswith(".moe_mlp_layers"):
            local |= {node.target.id} if isinstance(node.target, ast.Name) else set()

    def is_ffn(node: ast.expr) -> bool:
        return (isinstance(node, ast.Attribute) and node.attr in ffn) or (
            isinstance(node, ast.Name) and node.id in local
        )

    read, tested = set(), set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and is_ffn(node.value):
            read.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and is_ffn(node.args[0]):
            tested.add(ast.unparse(node.args[1]))
    return read, tested


def build(checkpoints: dict[str, str], rendezvous: str) -> dict[str, Any]:
    """For each family: attributes that native FFNs have and stand-ins lack, and tests whose result differs."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models import registry as native_registry

    import afd_patch
    from afd_patch.config import AFDConfig
    from afd_patch.identity import identify
    from afd_patch.patches.construction import CURRENT_BUILD
    from afd_patch.patches.model_build import ModelBuild

    native_registry._run_in_subprocess = lambda inspect: inspect()
    found: dict[str, Any] = {}
    for architecture, path in checkpoints.items():
        HELP.get(architecture, lambda: None)()
        configs = [
            EngineArgs(path, **{**ENGINE, **ARGUMENTS.get(architecture, {})}).create_engine_config() for _ in "12"
        ]
        table = boundaries.find(configs[0].model_config.hf_config.architectures[0])
        with set_current_vllm_config(configs[0]):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
                initialize_model_parallel()
            native = utils.initialize_model(vllm_config=configs[0])
        config = AFDConfig.build(role="attention", ffn="unix:/nowhere/ffn.sock")
        afd_patch.activate(role="attention", ffn="unix:/nowhere/ffn.sock")
        build = ModelBuild("attention", table, configs[1], identify(configs[1], table, config))
        token = CURRENT_BUILD.set(build)
        try:
            with set_current_vllm_config(configs[1]):
                utils.initialize_model(vllm_config=configs[1])
        finally:
            CURRENT_BUILD.reset(token)
            afd_patch.deactivate()
        assert len(build.layers) == build.num_layers, "the stand-ins are in place"
        found[table.family] = compare(table, native, build)
    return found


def compare(table: Boundary, native: Any, build: Any) -> dict[str, Any]:
    layers = native.model.layers
    lacking: dict[str, set[str]] = {}
    differing: list[str] = []
    satisfied = tests = 0
    for module, function in functions(table):
        read, tested = uses(table, function)
        for number, stand_in in build.layers.items():
            parts = [getattr(layers[number], a, None) for a in (*table.ffn_summands, table.ffn_attribute)]
            ffn = next(part for part in parts if part is not None)
            for attribute in read:
                if hasattr(ffn, attribute) and not hasattr(stand_in, attribute):
                    lacking.setdefault(function.name, set()).add(attribute)
                satisfied += hasattr(ffn, attribute) and hasattr(stand_in, attribute)
            for name in tested:
                cls = getattr(importlib.import_module(module), name, None)
                if cls is None:
                    continue
                tests += 1
                if isinstance(ffn, cls) != isinstance(stand_in, cls):
                    differing.append(f"{module}.{function.name}: isinstance(..., {name})")
    return {"lacking": lacking, "differing": differing, "satisfied": satisfied, "tests": tests}


@pytest.fixture(scope="module")
def found(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    names = [CHECKPOINTS.get(table.family, table.family) for table in TABLES]
    rendezvous = tmp_path_factory.mktemp("audit") / "rendezvous"
    return Child(build, {name: checkpoint(name) for name in names}, str(rendezvous)).result()


def test_every_family_was_built(found: Any) -> None:
    assert found.keys() == {table.family for table in TABLES}


def test_class_tests_say_the_same_about_a_stand_in(found: Any) -> None:
    assert not [sentence for result in found.values() for sentence in result["differing"]]
    assert sum(result["tests"] for result in found.values()) > 20


def test_attributes_that_are_read_are_there(found: Any) -> None:
    """Outside of constructors, and of functions that do not run with split roles."""
    lacking: dict[str, set[str]] = {}
    for result in found.values():
        for function, attributes in result["lacking"].items():
            lacking.setdefault(function, set()).update(attributes)
    assert lacking.keys() - CONSTRUCTING == EXCEPTIONS.keys()
    assert all(attributes <= {"experts"} for attributes in lacking.values()), lacking
    assert sum(result["satisfied"] for result in found.values()) > 20


def test_exceptions_are_needed() -> None:
    """A function that vLLM no longer has, or that no longer looks into an FFN, is taken off the list."""
    looking = {function.name for table in TABLES for _, function in functions(table) if uses(table, function)[0]}
    assert looking >= EXCEPTIONS.keys()


def test_coverage_of_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    """Which decoder models of the installed vLLM have a table, and which have a layer that a table could describe."""
    covered, could, unlike = [], [], []
    for architecture, (module, cls) in KNOWN.items():
        if architecture in boundaries.architectures():
            covered.append(architecture)
            continue
        if not architecture.endswith("ForCausalLM"):
            continue
        models = [d for d in NAMES.lookup(module, cls) if isinstance(d, Definition)]
        (could if any(find_layers(NAMES, model, KNOWN) for model in models) else unlike).append(architecture)
    with capsys.disabled():
        print(
            f"\nof {len(covered) + len(could) + len(unlike)} decoder models, {len(covered)} have a boundary table, "
            f"{len(could)} have a layer with one attention and one FFN, {len(unlike)} have none that syntax finds"
        )
    assert sorted(covered) == list(boundaries.architectures())
    assert len(could) > len(unlike), "the derivation finds layers in most models"
