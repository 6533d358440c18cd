"""What the boundary table of an architecture would look like, from vLLM's source of the model."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from afd_patch import boundaries
from afd_patch.boundaries import WeightRules
from afd_patch.doctor.layers import Layer, find_layers
from afd_patch.doctor.model import Model
from afd_patch.doctor.names import Definition, Names, parameters

_EXPERTS = re.compile(r"FusedMoE|FusedMoEFactory|num_experts|n_routed_experts")
_LAYER = re.compile(r"^(?P<root>(?:[A-Za-z_]\w*\.)*)layers\.\d+\.(?P<child>[A-Za-z_]\w*)")


def explain(names: Names, model: Model, known: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """The explanation as data, with its ``text`` as lines."""
    found: dict[str, Any] = {"architecture": model.architecture, "has_table": model.boundary is not None}
    if model.architecture not in known:
        return {**found, "text": [f"{model.architecture}: this vLLM does not know it, so nothing can be derived."]}
    module, cls = known[model.architecture]
    layers: list[Layer] = []
    for item in names.lookup(module, cls):
        if isinstance(item, Definition):
            layers += [layer for layer in find_layers(names, item, known) if layer not in layers]
    if not layers:
        sentence = f"{model.architecture} ({module}): no class in reach of {cls} builds both an attention and an FFN."
        return {**found, "module": module, "text": [sentence, "Read the model's module; it may build them in a loop."]}
    layers.sort(key=lambda layer: layer.cls.module != module)  # stable: those of the model's own module come first
    layer, others = layers[0], [str(layer.cls) for layer in layers[1:]]
    facts = _facts(names, model, layer, module)
    title = "it has a table; this is what its source says" if model.boundary else "a table to begin with"
    text = [
        f"{model.architecture}: {title}",
        *_draft(names, model, layer, module),
        "",
        "Read in the source (docs/adding-a-model.md says what to check):",
        *(f"  {line}" for line in facts["lines"]),
        *(f"  another decoder layer in reach: {other}" for other in others[:4]),
    ]
    found |= {
        "module": module,
        "decoder": str(layer.cls),
        "other_decoders": others,
        "ffn": {name: [str(c) for c in classes] for name, classes in layer.ffn.items()},
        "attention": {name: [str(c) for c in classes] for name, classes in layer.attention.items()},
        "parameters": facts["parameters"],
        "isinstance": facts["isinstance"],
        "read_from_ffn": facts["read"],
        "table": "\n".join(_draft(names, model, layer, module)),
    }
    return {**found, "text": text}


# -- the draft -----------------------------------------------------------------------------------------------------


def _draft(names: Names, model: Model, layer: Layer, module: str) -> list[str]:
    family = re.sub(r"\W", "_", module.rpartition(".")[2])
    attributes = list(layer.ffn)
    every = list(dict.fromkeys(c for classes in layer.ffn.values() for c in classes))
    moe = [c for c in every if _has_experts(names, c)]
    dense = [c for c in every if c not in moe]
    attention = list(dict.fromkeys(c for classes in layer.attention.values() for c in classes))
    lines = [
        f"{family.upper()} = Boundary(",
        f'    family="{family}",',
        f'    architectures=("{model.architecture}",),',
        f'    decoder="{layer.cls}",',
        f'    ffn_attribute="{attributes[0]}",',
    ]
    if len(attributes) > 1:
        lines.append(f"    # More than one: {', '.join(attributes)}. If a layer adds them up, they are ffn_summands.")
    for key, classes in (("dense", dense), ("moe", moe), ("attention", attention)):
        if classes:
            lines += _tuple(key, classes, "    ")
    lines += _weights(model, layer)
    if moe:
        shared = "always_shared=True" if any(_has_shared_experts(names, c) for c in moe) else ""
        lines.append(f"    router=Router({shared}),  # a guess; docs/adding-a-model.md, questions 6 and 7")
    return [*lines, ")"]


def _weights(model: Model, layer: Layer) -> list[str]:
    """The weight rules, from the checkpoint's names if there are any, else from what the layer's constructor builds."""
    default = WeightRules()
    ffn, children, outside, roots = list(layer.ffn), list(layer.attributes), list(default.attention_modules), [""]
    tensors = model.checkpoint.tensors if model.checkpoint else {}
    matches = [match for match in map(_LAYER.match, tensors) if match]
    if matches:
        children = list(dict.fromkeys(match["child"] for match in matches))
        roots = [root for root, _ in Counter(match["root"] for match in matches).most_common()]
        outside = sorted({_outside(name, roots) for name in tensors if not _LAYER.match(name)})
    ffn = [name for name in children if name in ffn] or ffn
    rules = [
        ("ffn_children", tuple(ffn), default.ffn_children),
        ("attention_children", tuple(c for c in children if c not in ffn), default.attention_children),
        ("attention_modules", tuple(outside), default.attention_modules),
        ("roots", tuple(dict.fromkeys([*roots, ""])), default.roots),
    ]
    if not matches:
        rules = rules[:2]
    changed = [(key, values) for key, values, usual in rules if set(values) - set(usual)]
    if not changed:
        return []
    source = "the checkpoint" if matches else "the constructor; compare with the names in a checkpoint"
    lines = [line for key, values in changed for line in _tuple(key, values, "        ")]
    return [f"    weights=WeightRules(  # from {source}", *lines, "    ),"]


def _outside(name: str, roots: list[str]) -> str:
    root = max((root for root in roots if name.startswith(root)), key=len, default="")
    return name.removeprefix(root).partition(".")[0]


def _tuple(key: str, values: Iterable[object], indent: str) -> list[str]:
    """A keyword argument, in one line if it fits."""
    quoted = [f'"{value}"' for value in values]
    line = f"{indent}{key}=({', '.join(quoted)}{',' if len(quoted) == 1 else ''}),"
    return [line] if len(line) <= 120 else [f"{indent}{key}=(", *(f"{indent}    {q}," for q in quoted), f"{indent}),"]


def _has_experts(names: Names, cls: Definition) -> bool:
    return any(_EXPERTS.search(ast.unparse(owner.node)) for owner in names.ancestry(cls))


def _has_shared_experts(names: Names, cls: Definition) -> bool:
    return any("self.shared_expert" in ast.unparse(owner.node) for owner in names.ancestry(cls))


# -- the facts -----------------------------------------------------------------------------------------------------


def _facts(names: Names, model: Model, layer: Layer, module: str) -> dict[str, Any]:
    classes = [
        layer.cls,
        *dict.fromkeys(c for group in (layer.ffn, layer.attention) for cs in group.values() for c in cs),
    ]
    taken = {name: table.family for table in boundaries.TABLES if table is not model.boundary for name in table.classes}
    lines, signatures = [], {}
    for cls in classes:
        init = names.attribute(cls, "__init__")
        if init is not None and init.function is not None:
            signatures[str(cls)] = parameters(init.function)[1:]
            lines.append(f"{cls.name}({', '.join(signatures[str(cls)])})")
        if str(cls) in taken:
            lines.append(f"  {cls.name} is in the table of {taken[str(cls)]} too")
    checks: list[str] = []
    read: set[str] = set()
    for name in dict.fromkeys([module, layer.cls.module, *(owner.module for owner in names.ancestry(layer.cls))]):
        for attribute in layer.ffn:
            found, attributes = _uses(names, name, attribute)
            checks += [check for check in found if check not in checks]
            read |= attributes
    lines += [f"isinstance on the FFN: {check}" for check in checks] or ["no isinstance on the FFN in these modules"]
    if read:
        lines.append(f"read from the FFN: {', '.join(sorted(read))} (a stand-in has plain public attributes)")
    return {"lines": lines, "parameters": signatures, "isinstance": checks, "read": sorted(read)}


def _uses(names: Names, module: str, attribute: str) -> tuple[list[str], set[str]]:
    """Where ``module`` tests the class of ``.attribute``, and which attributes it reads from it."""
    checks, read = [], set()
    parsed = names.tree.parse(module)
    for node in ast.walk(parsed) if parsed else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and len(node.args) == 2:
            subject = ast.unparse(node.args[0])
            if subject.endswith(f".{attribute}") or f".{attribute}." in subject:
                checks.append(f"{ast.unparse(node)} ({module}, line {node.lineno})")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == attribute:
            read.add(node.attr)
    return checks, read
