"""The installation: Python, distributions and their versions, the entry point, the start-up line."""

from __future__ import annotations

import re
import site
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import afd_patch
from afd_patch.config import PLUGIN_NAME
from afd_patch.doctor.findings import Section
from afd_patch.doctor.source import SourceTree

_GROUP = "vllm.general_plugins"
#: What the package itself needs, as in pyproject.toml.
_NEEDED = {"wrapt": "2.5", "xxhash": "3.5"}
_PYTHON = (3, 11)
_DISTRIBUTION = "afd-patch"
_REINSTALL = "install afd_patch again (pip install afd-patch, or pip install -e . in its folder)"


def check_installation(tree: SourceTree | None) -> Section:
    """Findings about this Python environment; ``tree`` is the installed vLLM, if there is one."""
    section = Section("Installation")
    checks: tuple[Callable[[Section], None], ...] = (_python, _needed, _torchvision, _entry_point, _start_up_line)
    for check in checks:
        check(section)
    _vllm(section, tree)
    return section


def _python(section: Section) -> None:
    running = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _PYTHON:
        section.problem("Python", f"{running} is older than 3.11", "use Python 3.11 or newer")
    else:
        section.ok("Python", running)


def _vllm(section: Section, tree: SourceTree | None) -> None:
    if tree is None:
        section.problem("vLLM", "not installed in this environment", "install it beside afd_patch, or use its Python")
        return
    version, distribution = tree.version(), tree.distribution()
    named = f"{distribution or 'unknown distribution'} {version or 'of unknown version'}"
    ranges = supported_ranges()
    supported = ranges.get(distribution or "")
    if supported is None or version is None:
        section.note("vLLM", f"{named}; tested are: {', '.join(f'{n}{r}' for n, r in ranges.items()) or 'unknown'}")
    elif not within(version, supported):
        section.note("vLLM", f"{named} is outside of what was tested ({supported}); the patch points below decide")
    else:
        section.ok("vLLM", f"{named}, within {supported}")
    if distribution not in (None, "vllm") and _version("vllm") is None:
        section.note(
            "vLLM",
            f"the console script vllm looks for a distribution called vllm, and this one is called {distribution}",
            "start python -m vllm.entrypoints.openai.api_server, or python -m afd_patch.serve",
        )


def supported_ranges() -> dict[str, str]:
    """Per distribution of vLLM, the versions that our own metadata name."""
    try:
        requires = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    parsed = (re.match(r"(vllm[\w-]*)\s*\(?([<>=!~][^;)]*)", text) for text in requires)
    return {match[1]: match[2].strip() for match in parsed if match}


def within(version: str, ranges: str) -> bool:
    """Whether ``version`` fulfils ``ranges``, written like ``>=0.32,<0.34``."""
    mine = numbers(version)
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*(>=|<|<=|>|==)\s*(\S+)\s*", part)
        if match is None:
            continue
        other = numbers(match[2])
        size = max(len(mine), len(other))
        a, b = (n + (0,) * (size - len(n)) for n in (mine, other))
        if not {">=": a >= b, "<": a < b, "<=": a <= b, ">": a > b, "==": a == b}[match[1]]:
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """The release part of a version."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _needed(section: Section) -> None:
    for name, least in _NEEDED.items():
        version = _version(name)
        if version is None or numbers(version) < numbers(least):
            text = f"{version or 'not installed'}; {least} or newer is needed"
            section.problem(name, text, f"pip install '{name}>={least}'")
        else:
            section.ok(name, version)


def _torchvision(section: Section) -> None:
    torch, vision = _version("torch"), _version("torchvision")
    if torch is None:
        section.problem("torch", "not installed", "install vLLM's own requirements")
    elif "+cpu" in torch and vision is not None and "+cpu" not in vision:
        section.problem(
            "torchvision",
            f"{vision} was built for CUDA and torch is {torch}: every import of transformers fails "
            "(operator torchvision::nms does not exist)",
            "pip uninstall torchvision torchaudio torchcodec, or install their CPU builds",
        )
    else:
        section.ok("torch", torch + (f", torchvision {vision}" if vision else ""))


def _entry_point(section: Section) -> None:
    points = [point for point in metadata.entry_points(group=_GROUP) if point.name == PLUGIN_NAME]
    if not points:
        section.problem("entry point", f"no {PLUGIN_NAME} in {_GROUP}: vLLM's processes would run natively", _REINSTALL)
    elif points[0].value != "afd_patch.plugin:register":
        section.problem("entry point", f"{PLUGIN_NAME} in {_GROUP} is {points[0].value}", _REINSTALL)
    else:
        section.ok("entry point", f"{PLUGIN_NAME} in {_GROUP}")
    installed = _version(_DISTRIBUTION)
    if installed is not None and installed != afd_patch.__version__:
        section.problem(
            "afd_patch", f"{installed} is installed, and {afd_patch.__version__} in {_home()} is running", _REINSTALL
        )
    others = sorted(
        f"{p.name} ({p.dist.name if p.dist else p.value})"
        for p in metadata.entry_points(group=_GROUP)
        if p.name != PLUGIN_NAME and not p.value.startswith("vllm.")
    )
    if others:
        section.note("other plugins", f"{', '.join(others)} are loaded into the same processes")


def _start_up_line(section: Section) -> None:
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    if any("afd_patch.plugin" in _text(Path(folder) / "afd_patch.pth") for folder in folders):
        section.ok("start-up line", "afd_patch.pth is in site-packages")
    elif "sitecustomize" in sys.modules and "afd_patch" in _text(Path(sys.modules["sitecustomize"].__file__ or "")):
        section.ok("start-up line", f"in {sys.modules['sitecustomize'].__file__}")
    else:
        section.note(
            "start-up line",
            "no afd_patch.pth in site-packages; the role depends on the entry point alone, which VLLM_PLUGINS can "
            "filter out",
            _REINSTALL,
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace") if path.is_file() else ""
    except OSError:
        return ""


def _home() -> Path:
    return Path(afd_patch.__file__).parent


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
