"""A model, or only an architecture, by its files: is there a table for it, and does every tensor belong to a role?"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afd_patch import boundaries
from afd_patch.boundaries import Boundary, OwnGate
from afd_patch.config import GATES
from afd_patch.doctor.checkpoint import Checkpoint, expert_count, megabytes, read_checkpoint, some
from afd_patch.doctor.findings import Section
from afd_patch.doctor.names import Names
from afd_patch.errors import ConfigError, UnsupportedError, WeightError
from afd_patch.identity import weights_fingerprint

#: A tensor of a layer: the layer, and the expert, if it is one.
_IN_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*?\bexperts\.(\d+)\.)?")


@dataclass
class Model:
    """``folder`` and ``config`` are empty when only an architecture was named."""

    architecture: str
    folder: Path | None = None
    config: dict[str, Any] | None = None
    boundary: Boundary | None = None
    checkpoint: Checkpoint | None = None

    @property
    def text_config(self) -> dict[str, Any]:
        config = self.config or {}
        inner = config.get("text_config")
        return inner if isinstance(inner, dict) else config

    @property
    def num_layers(self) -> int:
        value = self.text_config.get("num_hidden_layers")
        return value if isinstance(value, int) else 0


def find_model(text: str, known: dict[str, tuple[str, str]]) -> Model:
    """The model that ``text`` names: a folder, a model of the hub that was fetched, or an architecture in ``known``.

    Raises ``ConfigError`` when it is none of them.
    """
    folder = Path(os.path.expanduser(text))  # unlike Path.expanduser, it leaves unknown users alone
    if not os.path.isdir(folder):
        if text in known or text in boundaries.architectures():
            return Model(text)
        folder = _from_hub_cache(text)
    path = folder / "config.json"
    if not os.path.isfile(path):
        raise ConfigError(f"{text} is no model folder: it has no config.json; give the folder with config.json")
    try:
        config = json.loads(path.read_text())
        architecture = config["architectures"][0]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}); make it readable") from None
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ConfigError(f"{path} names no architecture ({type(error).__name__}: {error}); fetch it again") from None
    return Model(str(architecture), folder, config)


def _from_hub_cache(text: str) -> Path:
    missing = ConfigError(
        f"{text} is no folder, no architecture, and not in the Hugging Face cache of this machine; give a folder, or "
        f"fetch it first (hf download {text})"
    )
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ConfigError(f"the model folder {text} does not exist; give the folder with config.json")
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(text, "config.json")
    except (ImportError, ValueError):
        raise missing from None
    if not isinstance(path, str):
        raise missing
    return Path(path).parent


def check_model(model: Model, names: Names | None, known: dict[str, tuple[str, str]], gate: str = GATES[0]) -> Section:
    """Findings about ``model``; fills in its table and checkpoint.

    ``known`` is the registry of the vLLM at hand, ``gate`` the place of the router.
    """
    section = Section("Model")
    try:
        model.boundary = boundaries.find(model.architecture)
    except UnsupportedError as error:
        section.problem(model.architecture, str(error).removeprefix(f"{model.architecture} "))
    else:
        section.ok(model.architecture, f"has a boundary table (family {model.boundary.family})")
        if gate == "attention" and model.boundary.why_gate_stays:
            section.problem("AFD_GATE", model.boundary.why_gate_stays, "use AFD_GATE=ffn")
    if names is not None and known and model.architecture not in known:
        version = names.tree.version() or "of unknown version"
        section.problem(model.architecture, f"vLLM {version} does not know this architecture", "use another version")
    if model.config is not None and model.folder is not None:
        _check_config(model, section)
        model.checkpoint = read_checkpoint(model.folder)
        _check_files(model.checkpoint, section)
        if model.boundary is not None and model.checkpoint.tensors:
            own_gate = None
            if gate == "attention" and model.boundary.router is not None:
                own_gate = model.boundary.own_gate_in(model.checkpoint.tensors, model.num_layers)
            _check_tensors(model, model.boundary, model.checkpoint, own_gate, section)
    return section


def identity_of(model: Model, vllm: str | None, gate: str) -> dict[str, Any]:
    """The part of an ``Identity`` that files and settings tell without vLLM."""
    if model.folder is None or model.config is None:
        return {}
    dtype = model.text_config.get("dtype") or model.text_config.get("torch_dtype") or model.config.get("torch_dtype")
    known = {
        "vllm": vllm,
        "weights": _weights(model, model.folder),
        "architecture": model.architecture,
        "boundary": model.boundary.family if model.boundary else None,
        "gate": gate,
        "dtype": dtype if dtype in ("bfloat16", "float16") else None,
        "hidden_size": model.text_config.get("hidden_size"),
        "layers": model.num_layers or None,
    }
    return {key: value for key, value in known.items() if value is not None}


def _weights(model: Model, folder: Path) -> str | None:
    """What a role announces of its weights; ``None`` where the files are damaged, which is a finding of its own."""
    if model.checkpoint is None or model.checkpoint.damage:
        return None
    try:
        return weights_fingerprint(folder)
    except (OSError, WeightError):  # the files were sound when their headers were read, and are not any more
        return None


def _check_config(model: Model, section: Section) -> None:
    lacking = [key for key in ("num_hidden_layers", "hidden_size") if not isinstance(model.text_config.get(key), int)]
    if lacking:
        section.problem("config.json", f"has no {' and no '.join(lacking)}", "fetch it again")
    quantization = (model.config or {}).get("quantization_config") or model.text_config.get("quantization_config")
    if isinstance(quantization, dict):
        method = str(quantization.get("quant_method"))
        if model.boundary is not None and method in model.boundary.refused_quantization:
            section.problem("quantisation", f"{method} is refused for this family", "use another quantisation")
        else:
            section.note("quantisation", f"{method}: both roles use vLLM's own kernels and loaders for it")
    if model.boundary is not None and model.boundary.language_model_only:
        section.note("modalities", "only the language model can be split", "start with --language-model-only")


def _check_files(checkpoint: Checkpoint, section: Section) -> None:
    for sentence in checkpoint.damage:
        section.problem("weights", sentence)
    for sentence in checkpoint.remarks:
        section.note("weights", sentence)
    if checkpoint.other_formats:
        section.note(
            "weights",
            f"no safetensors files, but {some(list(checkpoint.other_formats))}: names cannot be checked here, and each "
            "role reads the bytes of both",
        )
    elif checkpoint.never_loaded:
        from afd_patch.patches.engine_config import LOAD_FORMATS

        section.problem(
            "weights",
            f"no weights but {some(list(checkpoint.never_loaded))}, which no --load-format of a role reads "
            f"({', '.join(LOAD_FORMATS)})",
            "fetch the model as safetensors, or convert it",
        )
    elif not checkpoint.files:
        section.problem("weights", "no weight files in the folder", "fetch them, or use --load-format dummy")
    elif not checkpoint.tensors and not checkpoint.damage:
        section.problem("weights", "the safetensors files have no tensors", "fetch them again")


def _check_tensors(
    model: Model, table: Boundary, checkpoint: Checkpoint, own_gate: OwnGate | None, section: Section
) -> None:
    from afd_patch.patches.coverage import missing_expert_tensors

    counts = {"attention": 0, "ffn": 0, "none": 0}
    sizes = dict(counts)
    unknown: list[str] = []
    for name, size in checkpoint.tensors.items():
        try:
            owner = table.weights.owner(name, model.num_layers, own_gate)
        except WeightError as error:
            unknown.append(str(error))
            continue
        counts[owner] += 1
        sizes[owner] += size
    for sentence in unknown[:3]:
        section.problem("weights", sentence)
    if len(unknown) > 3:
        section.problem("weights", f"{len(unknown) - 3} more tensors that no rule knows")
    missing = missing_expert_tensors(checkpoint.tensors)
    if missing:
        # A misspelt name makes all other experts lack it; what few experts lack is the likelier mistake.
        lacking = Counter(name.rpartition("experts.")[2].partition(".")[2] for name in missing)
        missing.sort(key=lambda name: lacking[name.rpartition("experts.")[2].partition(".")[2]])
        section.problem("weights", f"some experts lack a tensor that others have: {some(missing)}", "fetch them again")
    _check_layers(model, table, checkpoint, own_gate, section)
    section.ok(
        "weights",
        f"{len(checkpoint.tensors)} tensors in {checkpoint.files} file{'s' * (checkpoint.files != 1)}: "
        f"{counts['attention']} for attention ({megabytes(sizes['attention'])}), "
        f"{counts['ffn']} for FFN ({megabytes(sizes['ffn'])}), {counts['none']} for neither",
    )


def _check_layers(
    model: Model, table: Boundary, checkpoint: Checkpoint, own_gate: OwnGate | None, section: Section
) -> None:
    """Whether every layer has tensors of both roles, and as many experts as the configuration says."""
    owned: dict[str, set[int]] = {"attention": set(), "ffn": set()}
    experts: dict[int, int] = {}
    for name in checkpoint.tensors:
        match = _IN_LAYER.search(name)
        if match is None:
            continue
        try:
            owner = table.weights.owner(name, model.num_layers, own_gate)
        except WeightError:
            continue
        layer = int(match[1])
        if owner in owned:
            owned[owner].add(layer)
        if owner == "ffn" and match[2]:
            experts[layer] = max(experts.get(layer, -1), int(match[2]))
    if own_gate is not None:
        owned["ffn"] |= own_gate.dense_layers  # those that need none
    for role, layers in owned.items():
        lacking = sorted(set(range(model.num_layers)) - layers)
        if lacking:
            section.problem(
                "weights", f"no {role} tensors for layers {some([str(n) for n in lacking])} of {model.num_layers}",
                "fetch the missing files",
            )  # fmt: skip
    wanted = expert_count(model.text_config)
    if wanted is None:
        return
    for layer, last in sorted(experts.items()):
        if last + 1 != wanted:
            section.problem(
                "weights", f"layer {layer} has {last + 1} experts and config.json says {wanted}", "fetch them again"
            )
            return
