"""The boundary tables against a source tree: does each decoder layer still assign what its table says?"""

from __future__ import annotations

import ast

from afd_patch import boundaries
from afd_patch.boundaries import Boundary
from afd_patch.doctor import registry
from afd_patch.doctor.findings import Section
from afd_patch.doctor.layers import find_layers, read_layer
from afd_patch.doctor.names import Definition, Names


def check_boundaries(names: Names, chosen: Boundary | None) -> Section:
    """One finding and more for each table (or for ``chosen`` only)."""
    section = Section("Boundary tables")
    known = registry.architectures(names.tree)
    for table in boundaries.TABLES if chosen is None else (chosen,):
        _check(names, table, section)
        for architecture in table.architectures if known else ():
            _check_way(names, table, architecture, known, section)
    section.summary = f"{section.count('ok')} boundary tables say what the decoder layers do"
    return section


def _check(names: Names, table: Boundary, section: Section) -> None:
    decoder = definition(names, table.decoder)
    if decoder is None:
        section.note(table.family, f"{table.decoder} is not there, so its FFN cannot be looked at")
        return
    layer = read_layer(names, decoder)
    wanted = (table.ffn_attribute, *table.ffn_summands)
    fix = f"adapt the table in afd_patch/boundaries (family {table.family}; docs/adding-a-model.md)"
    lacking = [name for name in wanted if name not in layer.attributes]
    if lacking:
        others = ", ".join(layer.ffn) or "none that looks like an FFN"
        section.problem(table.family, f"{decoder} does not assign {', '.join(lacking)} (but: {others})", fix)
        return
    assigned = [item for name in wanted for item in layer.attributes[name]]
    known = {str(d) for d in (definition(names, name) for name in table.ffn) if d is not None}
    unknown = [str(item) for item in assigned if str(item) not in known]
    if unknown:
        section.problem(
            table.family, f"{decoder} assigns {', '.join(unknown)} to {'/'.join(wanted)}, not in the table", fix
        )
        return
    attention = {str(d) for d in (definition(names, name) for name in table.attention) if d is not None}
    missing = [str(item) for found in layer.attention.values() for item in found if str(item) not in attention]
    if missing:
        section.problem(table.family, f"{decoder} builds {', '.join(missing)}, which no row of the table covers", fix)
        return
    section.ok(table.family, f"{decoder.name}.{'/'.join(wanted)} is {' or '.join(item.name for item in assigned)}")


def _check_way(
    names: Names, table: Boundary, architecture: str, known: dict[str, tuple[str, str]], section: Section
) -> None:
    """Whether the model class of ``architecture`` still leads to the table's decoder layer, on every platform."""
    if architecture not in known:
        section.note(architecture, "this vLLM does not know this architecture, or not any more")
        return
    models = [item for item in names.lookup(*known[architecture]) if isinstance(item, Definition)]
    nearest: dict[str, list[str]] = {}
    for model in models:
        layers = find_layers(names, model, known)
        layers.sort(key=lambda layer: layer.cls.module != model.module)
        nearest[str(model)] = [str(layer.cls) for layer in layers]
    if not any(table.decoder in layers for layers in nearest.values()):
        others = next((layers[0] for layers in nearest.values() if layers), "none that could be found")
        section.problem(
            architecture,
            f"{':'.join(known[architecture])} does not lead to {table.decoder} (but to {others})",
            "adapt the table (docs/adding-a-model.md)",
        )
        return
    covered = {other.decoder for other in boundaries.TABLES}
    for reached in nearest.values():
        if len(nearest) > 1 and reached and reached[0] not in covered:
            text = f"on another platform it has {reached[0]}, which no table covers: no split there"
            section.note(architecture, text)


def definition(names: Names, target: str) -> Definition | None:
    """The class that ``module:Class`` stands for."""
    module, _, name = target.partition(":")
    for item in names.lookup(module, name):
        if isinstance(item, Definition) and isinstance(item.node, ast.ClassDef):
            return item
    return None
