"""Every patch point of both roles, and everything else that afd_patch imports from vLLM, against a source tree."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

import afd_patch
from afd_patch import boundaries
from afd_patch.boundaries import Boundary
from afd_patch.config import GATES, AFDConfig
from afd_patch.doctor.findings import Finding, Section
from afd_patch.doctor.names import Definition, External, Names, parameters
from afd_patch.patch_manager import Patch

#: Rooms of the house that run beside a deployment, not in it.
_NOT_DEPLOYED = ("doctor", "tiny", "bench", "verify", "demo.py")


def check_patch_points(names: Names, boundary: Boundary | None) -> Section:
    """One finding for each patch. With ``boundary``, patches of other families are worth a note only."""
    section = Section("Patch points")
    for patch in all_patches():
        finding = check(names, patch)
        families = [t for t in boundaries.TABLES if patch.target.removesuffix(".__init__") in t.classes]
        if finding.level == "problem" and families:
            architectures = ", ".join(a for t in families for a in t.architectures)
            text = f"{finding.text} (needed for {architectures})"
            needed = boundary is None or boundary in families
            finding = Finding("problem" if needed else "note", finding.subject, text, finding.fix)
        section.findings.append(finding)
    good = section.count("ok")
    section.summary = (
        f"{good} of {len(section.findings)} patch points are there, with the parameters that are relied on"
    )
    return section


def all_patches() -> list[Patch]:
    """The patches of both roles, wherever the router runs, each once."""
    from afd_patch.patches import patch_set

    configs = [
        config
        for gate in GATES
        for config in (
            AFDConfig.build(role="attention", ffn="unix:/ffn.sock", gate=gate),
            AFDConfig.build(role="ffn", listen="unix:/ffn.sock", gate=gate),
        )
    ]
    return list({patch.name: patch for config in configs for patch in patch_set(config)}.values())


def check(names: Names, patch: Patch) -> Finding:
    """Whether the target of ``patch`` is there and has the parameters that the patch relies on."""
    if names.tree.parse(patch.module) is None:
        return _lacking(patch, f"there is no module {patch.module}", _elsewhere(names, patch))
    found = names.lookup(patch.module, patch.path[0])
    if not found:
        near = difflib.get_close_matches(patch.path[0], names.names(patch.module), n=1, cutoff=0.7)
        hint = _elsewhere(names, patch) or (f"the nearest name there is {near[0]}" if near else "")
        served = " (a name that a module serves through __getattr__ does not count)" * names.is_lazy(patch.module)
        return _lacking(patch, f"{patch.module} defines no {patch.path[0]}{served}", hint)
    remarks: list[str] = []
    for item in found:
        if not isinstance(item, Definition):
            name = item.name if isinstance(item, External) else item.module
            return Finding("note", patch.name, f"{patch.target} comes from {name}, outside of what can be read here")
        if item.module != patch.module:
            remarks.append(f"defined in {item.module}")
        reason = _check_definition(names, patch, item, remarks)
        if reason is not None:
            return reason
    told = f" ({'; '.join(dict.fromkeys(remarks))})" if remarks else ""
    return Finding("ok", patch.name, f"{patch.target}({', '.join(patch.params) or 'any'}){told}")


def _check_definition(names: Names, patch: Patch, item: Definition, remarks: list[str]) -> Finding | None:
    """What is wrong with ``item`` as the first part of the target; adds to ``remarks``."""
    if len(patch.path) == 1:
        if isinstance(item.node, ast.ClassDef):
            return _lacking(patch, f"{item} is a class now, and the patch wraps a function", "")
        return _check_parameters(patch, item, item.node)
    if not isinstance(item.node, ast.ClassDef):
        return _lacking(patch, f"{item} is a function now, and the patch is for a class", "")
    attribute = names.attribute(item, patch.path[1])
    if attribute is None or attribute.owner is None:
        if patch.path[1] == "__init__":  # every class has one
            remarks.append("inherited from outside of vLLM")
            return None
        where = f", unless {attribute.outside[0]} does" if attribute else ""
        return _lacking(patch, f"{item} has no {patch.path[1]}{where}", "")
    if attribute.owner != item:
        remarks.append(f"inherited from {attribute.owner}")
    return None if attribute.function is None else _check_parameters(patch, attribute.owner, attribute.function)


def _check_parameters(
    patch: Patch, owner: Definition, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Finding | None:
    has = parameters(function)
    missing = [name for name in patch.params if name not in has]
    if not missing:
        return None
    text = f"{patch.target} has no parameter {', '.join(missing)} (it has: {', '.join(has) or 'none'})"
    return Finding("problem", patch.name, text, f"adapt the patch to {owner.module}, or use a vLLM that has it")


def _lacking(patch: Patch, text: str, hint: str) -> Finding:
    fix = "use a vLLM version that afd_patch supports, or adapt the target"
    return Finding("problem", patch.name, f"{patch.target}: {text}", f"{hint}; {fix}" if hint else fix)


def _elsewhere(names: Names, patch: Patch) -> str:
    others = [module for module in names.tree.defining(patch.path[0]) if module != patch.module]
    return f"{patch.path[0]} is defined in {', '.join(others[:3])}" if others else ""


# -- other uses of vLLM ------------------------------------------------------------------------------------------------


def check_imports(names: Names) -> Section:
    """What the deployed rooms of afd_patch import from vLLM, beside the patch points."""
    section = Section("Other names that are used")
    for file, module, name in _own_imports():
        subject = f"{module}.{name}"
        if names.tree.parse(module) is None:
            section.problem(subject, f"there is no module {module}, which {file} imports", "use a supported vLLM")
        elif not (names.lookup(module, name) or names.tree.file_of(f"{module}.{name}") or names.is_lazy(module)):
            others = [other for other in names.tree.defining(name) if other != module]
            hint = f"it is defined in {', '.join(others[:3])}; " if others else ""
            section.problem(subject, f"not there, and {file} imports it", f"{hint}use a supported vLLM")
        else:
            section.ok(subject, f"is there, for {file}")
    section.summary = f"{section.count('ok')} of {len(section.findings)} other names are there"
    return section


def _own_imports() -> Iterator[tuple[str, str, str]]:
    """(our file, module, name) of every ``from vllm... import name``, and of what is read from a module so imported."""
    root = Path(afd_patch.__file__).parent
    seen: set[tuple[str, str]] = set()
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root)
        if file.parts[0] in _NOT_DEPLOYED:
            continue
        parsed = ast.parse(path.read_bytes())
        for node in ast.walk(parsed):
            if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").partition(".")[0] != "vllm":
                continue
            for alias in node.names:
                uses = [(str(node.module), alias.name)]
                uses += [(f"{node.module}.{alias.name}", name) for name in _read_from(parsed, alias)]
                for use in uses:
                    if use not in seen:
                        seen.add(use)
                        yield f"afd_patch/{file.as_posix()}", *use


def _read_from(parsed: ast.Module, alias: ast.alias) -> set[str]:
    """Names read from an imported module; the field writes its modules in lower case and its classes not."""
    bound = alias.asname or alias.name
    if not bound.islower():
        return set()
    return {
        node.attr
        for node in ast.walk(parsed)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == bound
    }
