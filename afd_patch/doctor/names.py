"""What a name in a source tree stands for: follows imports, re-exports, aliases and base classes, all by syntax.

Where a module binds a name in several ways (a switch between platforms), all of them count. What leaves vLLM, such as
``torch.nn.Module``, is an ``External``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from afd_patch.doctor.source import SourceTree

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_ROOT = "vllm"


@dataclass(frozen=True)
class Definition:
    """A class or function, where it is defined."""

    module: str
    node: ast.ClassDef | FunctionNode

    @property
    def name(self) -> str:
        return self.node.name

    def __str__(self) -> str:
        return f"{self.module}:{self.node.name}"


@dataclass(frozen=True)
class ModuleName:
    """A module of the tree, bound to a name by an import."""

    module: str


@dataclass(frozen=True)
class External:
    """Something that vLLM imports from elsewhere, or an expression that syntax alone does not resolve."""

    name: str


Found = Definition | ModuleName | External


@dataclass
class _Namespace:
    bindings: dict[str, list[ast.AST | tuple[str, str | None]]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    lazy: bool = False


class Names:
    """Looks names up in ``tree``."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self._namespaces: dict[str, _Namespace] = {}

    def lookup(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> list[Found]:
        """What ``name``, at the top level of ``module``, may stand for; empty when it is not bound there."""
        if (module, name) in seen:
            return []
        seen |= {(module, name)}
        namespace = self._namespace(module)
        found: list[Found] = []
        for binding in namespace.bindings.get(name, ()):
            if isinstance(binding, tuple):
                found += self._imported(*binding, seen)
            elif isinstance(binding, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append(Definition(module, binding))
            elif isinstance(binding, ast.expr):
                found += self.expression(module, binding, seen)
        if not found:
            for star in namespace.stars:
                found += self.lookup(star, name, seen)
        return list(dict.fromkeys(found))

    def expression(self, module: str, node: ast.expr, seen: frozenset[tuple[str, str]] = frozenset()) -> list[Found]:
        """What an expression at the top level of ``module`` (a base class, an alias) may stand for."""
        if isinstance(node, ast.Subscript):
            return self.expression(module, node.value, seen)
        if isinstance(node, ast.Name):
            return self.lookup(module, node.id, seen) or [External(node.id)]
        if isinstance(node, ast.Attribute):
            found: list[Found] = []
            for owner in self.expression(module, node.value, seen):
                if isinstance(owner, ModuleName):
                    found += self._imported(owner.module, node.attr, seen)
                elif isinstance(owner, External):
                    found.append(External(f"{owner.name}.{node.attr}"))
            return found or [External(ast.unparse(node))]
        return [External(ast.unparse(node)[:60])]

    def _imported(self, module: str, name: str | None, seen: frozenset[tuple[str, str]]) -> list[Found]:
        if module.partition(".")[0] != _ROOT:
            return [External(module if name is None else f"{module}.{name}")]
        if name is None:
            return [ModuleName(module)] if self.tree.file_of(module) else []
        found = self.lookup(module, name, seen)
        if not found and self.tree.file_of(f"{module}.{name}"):
            return [ModuleName(f"{module}.{name}")]
        return found

    def is_lazy(self, module: str) -> bool:
        """Whether ``module`` serves names through ``__getattr__``."""
        return self._namespace(module).lazy

    def names(self, module: str) -> list[str]:
        """Every name that ``module`` binds itself."""
        return list(self._namespace(module).bindings)

    def _namespace(self, module: str) -> _Namespace:
        if module not in self._namespaces:
            self._namespaces[module] = namespace = _Namespace()
            parsed = self.tree.parse(module)
            package = module if self.tree.is_package(module) else module.rpartition(".")[0]
            for node in statements(parsed.body if parsed else ()):
                _bind(namespace, node, package)
            namespace.lazy = "__getattr__" in namespace.bindings
        return self._namespaces[module]

    # -- classes -------------------------------------------------------------------------------------------------

    def attribute(self, cls: Definition, name: str) -> Attribute | None:
        """Where a look-up of ``name`` on the class finds it: in its own body or that of a base."""
        outside: list[str] = []
        for owner in self.ancestry(cls, outside):
            for node in statements(owner.node.body):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                    return Attribute(owner, node)
                if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _targets(node) and node.value is not None:
                    found = self.expression(owner.module, node.value)
                    function = next((f.node for f in found if isinstance(f, Definition)), None)
                    return Attribute(owner, None if isinstance(function, ast.ClassDef) else function)
        return Attribute(None, None, tuple(outside)) if outside else None

    def ancestry(self, cls: Definition, outside: list[str] | None = None) -> Iterator[Definition]:
        """The class and its bases inside of the tree, nearest first; names of the others go to ``outside``."""
        todo, seen = [cls], set()
        while todo:
            current = todo.pop(0)
            if current in seen or not isinstance(current.node, ast.ClassDef):
                continue
            seen.add(current)
            yield current
            bases: list[Definition] = []
            for base in current.node.bases:
                for found in self.expression(current.module, base):
                    if isinstance(found, Definition):
                        bases.append(found)
                    elif outside is not None and isinstance(found, External):
                        outside.append(found.name)
            todo = bases + todo


@dataclass(frozen=True)
class Attribute:
    """An attribute of a class: ``owner`` defines it; without one, it can only come from the bases ``outside``."""

    owner: Definition | None
    function: FunctionNode | None
    outside: tuple[str, ...] = ()


def parameters(function: FunctionNode) -> list[str]:
    """The names that ``inspect.signature`` gives."""
    a = function.args
    starred = [arg for arg in (a.vararg, a.kwarg) if arg is not None]
    return [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, *starred)]


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module or class body runs: branches too, but not what only type checkers read."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from statements(node.body)
            yield from statements(node.orelse)
        elif isinstance(node, (ast.Try, ast.With, ast.For, ast.While)):
            parts = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            parts += [handler.body for handler in getattr(node, "handlers", [])]
            for part in parts:
                yield from statements(part)


def _bind(namespace: _Namespace, node: ast.stmt, package: str) -> None:
    bindings = namespace.bindings
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        bindings.setdefault(node.name, []).append(node)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            bound = alias.name if alias.asname else alias.name.partition(".")[0]
            bindings.setdefault(alias.asname or bound, []).append((bound, None))
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level:
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1]
            module = ".".join([*base, *([module] if module else [])])
        for alias in node.names:
            if alias.name == "*":
                namespace.stars.append(module)
            else:
                bindings.setdefault(alias.asname or alias.name, []).append((module, alias.name))
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        for name in _targets(node):
            bindings.setdefault(name, []).append(node.value)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]
