"""Every patch as a page: ``python -m afd_patch.patches.catalogue > docs/patch-points.md``.

The page is made of what the patches say about themselves, so it cannot say anything else than the code. It is made
without vLLM and torch: a patch is data, and its target is looked at when it is applied.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from itertools import groupby

from afd_patch.config import GATES, ROLES, AFDConfig
from afd_patch.patch_manager import Patch
from afd_patch.patches import patch_set

_HEAD = """\
# Patch points

<!-- Generated from the patches themselves: python -m afd_patch.patches.catalogue > docs/patch-points.md -->

Everything that afd_patch changes in vLLM: {total} patches, in {seams} files of `afd_patch/patches/`. A process without
`AFD_ROLE` has none of them. {shares}

* **Target** is `module:attribute` or `module:Class.attribute`. Where the module is not imported yet, the patch waits
  for its import. Patches of other model families than the one that is served may wait for ever.
* **Parameters** are the ones that the patch relies on. They are looked up in the signature of the installed vLLM when
  the patch is applied; if one is missing, the process stops. Everything else is passed on as it came.
* **Removal** says what would make the patches under it unnecessary.

Before a role builds its model, a barrier asks for every patch of that model to be in effect
([architecture](architecture.md#the-life-of-a-process)).
"""

_COLUMNS = ("Patch", "Target", "Parameters", "Why", "Upstream")


def render() -> str:
    """The page, in Markdown."""
    roles = _roles_of_patches()
    seams = [(seam, list(patches)) for seam, patches in groupby(_patches().values(), _seam)]
    parts = [_HEAD.format(total=len(roles), seams=len(seams), shares=_shares(roles))]
    for seam, patches in seams:
        parts.append(f"## {seam}.py\n\n{_described(seam)}\n")
        for removal, group in groupby(patches, lambda patch: patch.removal):
            parts.append(f"**Removal:** {_plain(removal)}\n\n{_table(list(group), roles)}\n")
    return "\n".join(parts)


def _configurations() -> list[AFDConfig]:
    """One configuration for each role and place of the router; the endpoints are never used."""
    return [
        config
        for gate in reversed(GATES)
        for config in (
            AFDConfig.build(role="attention", ffn="unix:/ffn.sock", gate=gate),
            AFDConfig.build(role="ffn", listen="unix:/ffn.sock", gate=gate),
        )
    ]


def _patches() -> dict[str, Patch]:
    """The patches of all roles by name, in the order of application."""
    return {patch.name: patch for config in _configurations() for patch in patch_set(config)}


def _roles_of_patches() -> dict[str, tuple[str, ...]]:
    found = {(config.role, patch.name) for config in _configurations() for patch in patch_set(config)}
    return {name: tuple(role for role in ROLES if (role, name) in found) for name in _patches()}


def _with_every_gate() -> set[str]:
    """Names of the patches that do not depend on where the router runs."""
    return {patch.name for config in _configurations() if config.gate == GATES[0] for patch in patch_set(config)}


def _seam(patch: Patch) -> str:
    """The file that a patch is in, which is also the first part of its name."""
    return patch.name.partition(".")[0]


def _described(seam: str) -> str:
    """What the file says about itself."""
    module = importlib.import_module(f"afd_patch.patches.{seam}")
    return (module.__doc__ or "").strip().replace("``", "`")


def _shares(roles: dict[str, tuple[str, ...]]) -> str:
    if all(len(names) == len(ROLES) for names in roles.values()):
        return "Both roles apply all of them; what a patch does may depend on the role."
    alone = [f"`{name}` ({names[0]})" for name, names in roles.items() if len(names) == 1]
    return f"Both roles apply all of them,\nexcept {', '.join(alone)}."


def _table(patches: Iterable[Patch], roles: dict[str, tuple[str, ...]]) -> str:
    lines = [_row(_COLUMNS), _row("---" for _ in _COLUMNS)]
    always = _with_every_gate()
    for patch in patches:
        limits = [f"{roles[patch.name][0]} role only"] if len(roles[patch.name]) < len(ROLES) else []
        limits += [] if patch.name in always else [f"with `AFD_GATE={GATES[1]}`"]
        only = f" ({', '.join(limits)})" if limits else ""
        parameters = ", ".join(f"`{name}`" for name in patch.params) or "any"
        prose = [_plain(patch.why), _plain(patch.upstream)]
        lines.append(_row((f"`{patch.name}`{only}", f"`{patch.target}`", parameters, *prose)))
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Markdown takes the underscores of ``__init__`` for emphasis."""
    return text.replace("__", "\\_\\_")


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(render(), end="")
