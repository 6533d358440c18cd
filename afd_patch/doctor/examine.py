"""One examination: which parts of the doctor look at what, in which order, and at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from afd_patch.boundaries import TABLES, Boundary
from afd_patch.config import GATES
from afd_patch.connectors.endpoint import Endpoint, parse_endpoint
from afd_patch.doctor import endpoints, live, registry
from afd_patch.doctor.boundary_points import check_boundaries
from afd_patch.doctor.environment import check_environment
from afd_patch.doctor.explain import explain
from afd_patch.doctor.findings import Report, Section
from afd_patch.doctor.installation import check_installation
from afd_patch.doctor.model import Model, check_model, find_model, identity_of
from afd_patch.doctor.names import Names
from afd_patch.doctor.source import SourceTree, installed
from afd_patch.errors import AFDError, ConfigError

#: Modules with patch points that no family owns.
_GENERAL = [
    "vllm.forward_context",
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.model_loader.dummy_loader",
]


@dataclass(frozen=True)
class Request:
    """What was asked for; ``environ`` is the environment that is examined, ``limit`` the seconds for importing vLLM."""

    model: str | None = None
    vllm_tree: Path | None = None
    explain: bool = False
    ffn: tuple[str, ...] = ()
    limit: float = 11.0
    trust_remote_code: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)


def examine(request: Request) -> Report:
    """Look at everything that ``request`` asks for. Raises ``ConfigError`` when the request itself is wrong."""
    other = request.vllm_tree is not None
    tree = SourceTree.open(request.vllm_tree) if request.vllm_tree is not None else installed()
    report = Report(tree.version() if tree else None, tree.where if tree else None)
    names = Names(tree) if tree else None
    known = registry.architectures(tree) if tree else {}
    asked = _endpoints(request)
    model = find_model(request.model, known) if request.model is not None else None
    gate = request.environ.get("AFD_GATE") or GATES[0]
    model_section = None
    if model is not None:
        model_section = _guarded("Model", partial(check_model, model, names, known, gate))
    probe = _start_probe(request, model) if tree is not None and not other and request.limit else None
    try:
        add = report.sections.append
        if not other:
            add(_guarded("Installation", lambda: check_installation(tree)))
            add(_guarded("Environment", lambda: check_environment(request.environ)))
        if names is not None:
            _check_source(names, model.boundary if model else None, report)
        answers = endpoints.ask_all(asked)
        said = probe.finish() if probe is not None else {}
    finally:
        if probe is not None:
            probe.stop()
    one_family = model is not None and model.boundary is not None
    if probe is not None:
        add(_guarded("In a running vLLM", lambda: live.describe_patches(said, one_family=one_family)))
    if model is not None and model_section is not None:
        if probe is not None and model.folder is not None:
            live.describe_configuration(said, model_section)
        add(model_section)
    if answers:
        whole = said.get("configuration", {}).get("identity")
        add(
            _guarded("FFN servers", lambda: endpoints.describe(answers, _identity(request, model, report, gate), whole))
        )
    if request.explain and model is not None and names is not None:
        report.explanation = explain(names, model, known)
    return report


def _endpoints(request: Request) -> tuple[Endpoint, ...]:
    """Those of ``--ffn``, where a mistake is wrong usage; else those of ``AFD_FFN``, where it is a finding."""
    if request.ffn:
        return tuple(parse_endpoint(text, "--ffn") for text in request.ffn)
    if request.vllm_tree is not None:
        return ()
    try:
        parts = [part for part in request.environ.get("AFD_FFN", "").split(",") if part.strip()]
        return tuple(parse_endpoint(text, "AFD_FFN") for text in parts)
    except ConfigError:
        return ()


def _check_source(names: Names, boundary: Boundary | None, report: Report) -> None:
    def patch_points() -> Section:
        # Only here: the patches import torch and wrapt, which may be what is missing.
        from afd_patch.doctor.patch_points import check_patch_points

        return check_patch_points(names, boundary)

    def imports() -> Section:
        from afd_patch.doctor.patch_points import check_imports

        return check_imports(names)

    report.sections.append(_guarded("Patch points", patch_points))
    report.sections.append(_guarded("Other names that are used", imports))
    report.sections.append(_guarded("Boundary tables", lambda: check_boundaries(names, boundary)))


def _start_probe(request: Request, model: Model | None) -> live.LiveProbe:
    chosen = (model.boundary,) if model is not None and model.boundary is not None else TABLES
    modules = {name.partition(":")[0] for table in chosen for name in table.classes}
    engine: dict[str, Any] = {"trust_remote_code": True} if request.trust_remote_code else {}
    if model is not None and model.boundary is not None and model.boundary.language_model_only:
        engine["language_model_only"] = True
    # The folder also of a model of the hub: nothing is to be fetched for a look at it.
    folder = (
        str(model.folder) if model is not None and model.folder is not None and model.boundary is not None else None
    )
    return live.LiveProbe(request.environ, [_GENERAL, sorted(modules)], folder, engine, request.limit)


def _identity(request: Request, model: Model | None, report: Report, gate: str) -> dict[str, Any]:
    if model is None:
        return {"vllm": report.vllm_version} if report.vllm_version and request.vllm_tree is None else {}
    return identity_of(model, report.vllm_version, gate)


def _guarded(title: str, look: Callable[[], Section]) -> Section:
    """The section that ``look`` makes, or one that says why there is none: the rest is still worth knowing."""
    try:
        return look()
    except ImportError as error:
        section = Section(title)
        section.problem(title, f"cannot be looked at: {error}", "install afd_patch and vLLM with their requirements")
    except AFDError as error:
        section = Section(title)
        section.problem(title, f"cannot be looked at: {error}")  # it says the way out itself
    except Exception as error:  # a defect here must not hide what the others found
        section = Section(title)
        section.problem(title, f"cannot be looked at: {type(error).__name__}: {error}", "please report this")
    return section
