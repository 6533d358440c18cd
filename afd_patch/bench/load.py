"""What each role reads from disk and keeps in memory while it loads, against the bytes that it owns.

Read: pages of the weight files in the page cache after ``load_model``, which began without any; so read-ahead counts,
and so does the sample for the handshake. Kept: growth of the anonymous resident memory of the process over
``load_model``, with the model's code imported before. Owned: the checkpoint tensors that the boundary table gives to
the role. Unknown flags go to all engines.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from afd_patch.bench.models import checkpoint, parameters, tensors, weight_files
from afd_patch.bench.processes import Group, environment
from afd_patch.bench.report import median, table
from afd_patch.errors import ConfigError
from afd_patch.serve.launcher import READY

TAKES_VLLM_FLAGS = True
ROLES = ("stock", "attention", "ffn")
READ_BAR, RESIDENT_BAR = 1.05, 1.15
_FLAGS = ("--max-model-len", "512", "--kv-cache-memory-bytes", "64M")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a folder (default: a new qwen3_moe_789m)")
    parser.add_argument("--rounds", type=int, default=3, help="loads of every role (%(default)s)")


def run(options: argparse.Namespace, vllm_flags: Sequence[str]) -> dict[str, Any]:
    """Measure; returns bytes by role."""
    if options.rounds < 1:
        raise ConfigError("--rounds must be at least 1")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="afd-bench-")))
        source = checkpoint(options.model, folder, "qwen3_moe_789m")
        # A copy of our own: nobody else reads it meanwhile, and its pages are ours to drop.
        model = folder / "model"
        shutil.copytree(source, model)
        if not weight_files(model):
            raise ConfigError(f"{source} has no safetensors files; only those can be measured")
        owned = _owned(model)
        flags = ["--model", str(model), *_FLAGS, *vllm_flags]
        endpoint = f"unix:{folder}/ffn.sock"
        command = ["afd_patch.serve", str(model), "--role", "ffn", "--listen", endpoint, *flags[2:]]
        server = Group("the FFN server", command, environment(), folder / "server.log")
        stack.callback(server.kill)
        server.wait_for(READY)
        measured: dict[str, list[dict[str, Any]]] = {role: [] for role in ROLES}
        for _ in range(options.rounds):
            for role in ROLES:
                measured[role].append(_load(role, flags, endpoint, folder))
        count = parameters(model)
    return {
        "model": options.model or "qwen3_moe_789m",
        "parameters": count,
        "engine_flags": [*_FLAGS, *vllm_flags],
        "rounds": options.rounds,
        "bars": {"read": READ_BAR, "resident": RESIDENT_BAR},
        "results": [_summary(role, owned[role], measured[role]) for role in ROLES],
    }


def _owned(model: Path) -> dict[str, int]:
    """Bytes of checkpoint tensors by role."""
    from afd_patch import boundaries

    config = json.loads((model / "config.json").read_text())
    boundary = boundaries.find(config["architectures"][0])
    layers = config.get("text_config", config)["num_hidden_layers"]
    owned = dict.fromkeys(ROLES, 0)
    for name, entry in tensors(model).items():
        begin, end = entry["data_offsets"]
        owned["stock"] += end - begin
        owner = boundary.weights.owner(name, layers)
        if owner in owned:
            owned[owner] += end - begin
    return owned


def _load(role: str, flags: Sequence[str], endpoint: str, folder: Path) -> dict[str, Any]:
    out = folder / f"{role}.json"
    out.unlink(missing_ok=True)
    command = ["afd_patch.bench.load_child", role, str(out), f"{endpoint}2" if role == "ffn" else endpoint, *flags]
    child = Group(f"the load of the role {role}", command, environment(), folder / f"{role}.log")
    try:
        child.wait(600.0)
        if not out.exists():
            child.require_running()
    finally:
        child.kill()
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def _summary(role: str, owned: int, measured: list[dict[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": role, "owned": owned}
    entry |= {name: median([one[name] for one in measured]) for name in measured[0]}
    # On a file system in memory nothing can be dropped from the cache, so nothing can be seen coming in.
    entry["read_is_known"] = entry["cached_before"] < owned // 100
    entry["read_to_owned"] = round(entry["read"] / owned, 3)
    entry["resident_to_owned"] = round(entry["resident_growth"] / owned, 3)
    entry["read_bar_met"] = entry["read_to_owned"] <= READ_BAR if entry["read_is_known"] else None
    entry["resident_bar_met"] = entry["resident_to_owned"] <= RESIDENT_BAR
    return entry


def print_report(results: dict[str, Any]) -> None:
    columns = {
        "owned": "owned", "asked": "asked for", "read": "read", "resident_growth": "resident",
        "resident_growth_after_trim": "after trim", "held": "in tensors", "peak_growth": "peak",
    }  # fmt: skip
    rows = [
        [
            entry["role"], *(f"{entry[name] / 1e6:.1f}" for name in columns),
            f"{entry['read_to_owned']:.3f}" if entry["read_is_known"] else "unknown",
            f"{entry['resident_to_owned']:.3f}", f"{entry['seconds']:.2f}",
        ]
        for entry in results["results"]
    ]  # fmt: skip
    head = ["", *columns.values(), "read/owned", "resident/owned", "s"]
    print(f"load of {results['parameters'] / 1e6:.0f} M parameters; MB, medians of {results['rounds']} loads")
    print(table(head, rows))
    print(f"bars: read/owned <= {READ_BAR}, resident/owned <= {RESIDENT_BAR}")
