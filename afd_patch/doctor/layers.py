"""Decoder layers as their constructors say: which attribute gets which native class. By syntax only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from afd_patch.doctor.names import Definition, FunctionNode, Names

#: Attributes and class names that mean attention (whatever has a state per token), and those that mean FFN.
_ATTENTION_ATTRIBUTE = re.compile(r"(^|_)(attn|attention|mixer|mamba|linear_attn|conv)$")
_ATTENTION_CLASS = re.compile(r"Attention|Attn|DeltaNet|Mamba|Mixer|MLA")
_FFN_ATTRIBUTE = re.compile(r"(^|_)(mlp|ffn|feed_forward|moe|block_sparse_moe|experts?)$")
_FFN_CLASS = re.compile(r"MLP|Mlp|MoE|Moe|FeedForward|FFN|Experts")
_NO_MODULE = re.compile(r"norm|scale|rotary|embed", re.IGNORECASE)
#: Layers of something else than the text decoder.
_OTHER_TOWER = re.compile(r"Vision|Visual|ViT|Audio|Speech|Resampler|Projector|Encoder(?!Decoder)|MTP|Draft|Eagle")
_MODELS = ("vllm.model_executor.models.", "vllm.models.")


@dataclass(frozen=True)
class Layer:
    """A class with attention and FFN; ``attributes`` maps every attribute that gets a module to its classes."""

    cls: Definition
    attributes: dict[str, tuple[Definition, ...]]

    @property
    def ffn(self) -> dict[str, tuple[Definition, ...]]:
        return {name: found for name, found in self.attributes.items() if _is_ffn(name, found)}

    @property
    def attention(self) -> dict[str, tuple[Definition, ...]]:
        return {name: found for name, found in self.attributes.items() if _is_attention(name, found)}


def _is_attention(name: str, found: tuple[Definition, ...]) -> bool:
    if _NO_MODULE.search(name) or not found:
        return False
    return bool(_ATTENTION_ATTRIBUTE.search(name)) or any(_ATTENTION_CLASS.search(c.name) for c in found)


def _is_ffn(name: str, found: tuple[Definition, ...]) -> bool:
    if _NO_MODULE.search(name) or not found or _is_attention(name, found):
        return False
    return bool(_FFN_ATTRIBUTE.search(name)) or any(_FFN_CLASS.search(c.name) for c in found)


def read_layer(names: Names, cls: Definition) -> Layer:
    """What the constructor of ``cls`` assigns; where it calls its parent's, that counts too."""
    attributes: dict[str, list[Definition]] = {}
    for owner in names.ancestry(cls):
        init = _constructor(owner)
        if init is None:
            continue
        for name, found in _assigned(names, cls, owner, init):
            known = attributes.setdefault(name, [])
            known += [item for item in found if item not in known]
        if not _calls_parent(init):
            break
    return Layer(cls, {name: tuple(found) for name, found in attributes.items()})


def _constructor(cls: Definition) -> FunctionNode | None:
    body = cls.node.body
    return next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)


def _calls_parent(init: FunctionNode) -> bool:
    """``super(Parent, self)`` goes past the parent, and then what the parent assigns does not count."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args
        for node in ast.walk(init)
    )


def _assigned(
    names: Names, cls: Definition, owner: Definition, init: FunctionNode
) -> Iterator[tuple[str, list[Definition]]]:
    local = _local_values(init)
    for node in ast.walk(init):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            attribute = _of_self(target)
            if attribute is not None and any(isinstance(part, ast.Call) for part in _choices(node.value)):
                calls = [part for part in _choices(node.value) if isinstance(part, ast.Call)]
                found = [item for call in calls for item in _classes(names, cls, owner, call.func, local, frozenset())]
                # What a function returns (``extract_layer_index``) is no module; classes are written in capitals.
                if found or any(ast.unparse(call.func).rpartition(".")[2][:1].isupper() for call in calls):
                    yield attribute, found


def _local_values(init: FunctionNode) -> dict[str, list[ast.expr]]:
    """What local names, parameters (by default) and attributes (as ``self.x``) may hold."""
    values: dict[str, list[ast.expr]] = {}
    a = init.args
    positional = [*a.posonlyargs, *a.args]
    defaults = zip(positional[len(positional) - len(a.defaults) :], a.defaults, strict=True)
    for argument, default in [*defaults, *zip(a.kwonlyargs, a.kw_defaults, strict=True)]:
        if default is not None:
            values.setdefault(argument.arg, []).append(default)
    for node in ast.walk(init):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                attribute = _of_self(target)
                name = target.id if isinstance(target, ast.Name) else f"self.{attribute}" if attribute else None
                if name is not None:
                    values.setdefault(name, []).append(node.value)
    return values


def _classes(
    names: Names, cls: Definition, owner: Definition, callee: ast.expr, local: dict[str, list[ast.expr]],
    seen: frozenset[str],
) -> list[Definition]:  # fmt: skip
    """The classes that ``callee``, called in a constructor of ``owner``, may be; ``cls`` is whose constructor runs."""
    attribute = _of_self(callee)
    key = f"self.{attribute}" if attribute else callee.id if isinstance(callee, ast.Name) else None
    if key is not None and key not in seen and key in local:
        return [
            found
            for value in local[key]
            for part in _choices(value)
            for found in _classes(names, cls, owner, part, local, seen | {key})
        ]
    if attribute is not None:
        for ancestor in names.ancestry(cls):
            for node in ancestor.node.body:
                if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if any(isinstance(t, ast.Name) and t.id == attribute for t in targets):
                        return _only_classes(names, ancestor.module, node.value)
        return []
    return _only_classes(names, owner.module, callee)


def _only_classes(names: Names, module: str, node: ast.expr) -> list[Definition]:
    found = names.expression(module, node)
    return [item for item in found if isinstance(item, Definition) and isinstance(item.node, ast.ClassDef)]


def _choices(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.IfExp):
        yield from _choices(node.body)
        yield from _choices(node.orelse)
    else:
        yield node


def _of_self(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None


def find_layers(names: Names, model: Definition, places: dict[str, tuple[str, str]]) -> list[Layer]:
    """The decoder layers that the model class reaches by reference, nearest first.

    ``places`` is the registry: multimodal models name their language model by its architecture.
    """
    todo, seen, layers = [model], {model}, []
    while todo:
        current = todo.pop(0)
        layer = read_layer(names, current)
        if layer.ffn and layer.attention:
            layers.append(layer)
            continue
        for found in _references(names, current, places):
            if found not in seen and found.module.startswith(_MODELS) and not _OTHER_TOWER.search(found.name):
                seen.add(found)
                todo.append(found)
    return layers


def _references(names: Names, cls: Definition, places: dict[str, tuple[str, str]]) -> Iterator[Definition]:
    for owner in names.ancestry(cls):
        if owner != cls and not owner.module.startswith(_MODELS):
            continue
        if owner != cls:
            yield owner
        for node in ast.walk(owner.node):
            found = []
            if isinstance(node, ast.Name) and not node.id.islower():  # classes are written in capitals
                found = names.lookup(owner.module, node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in places:
                found = names.lookup(*places[node.value])
            yield from (f for f in found if isinstance(f, Definition) and isinstance(f.node, ast.ClassDef))
