"""A checkpoint by its headers: which tensors are in which file, what is missing or cut off. No tensor is read."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
#: Larger headers than this are damage, not size.
_MAX_HEADER = 100 << 20
#: Other files with weights: those that vLLM's loader falls back to, and those that it never looks for.
_LOADED, _NEVER_LOADED = ("*.bin", "*.pt"), ("*.pth", "*.gguf")
#: What a training leaves beside the weights; the loader passes it over.
_OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")


@dataclass
class Checkpoint:
    """``tensors`` maps names to bytes; ``damage`` has one sentence for each thing that is wrong with the files.

    Without safetensors files, ``other_formats`` are files that a role loads instead, ``never_loaded`` those of formats
    that it does not load.
    """

    tensors: dict[str, int] = field(default_factory=dict)
    files: int = 0
    damage: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    other_formats: tuple[str, ...] = ()
    never_loaded: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(self.tensors.values())


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers of all safetensors files in ``folder``, and the index, if there is one."""
    found = Checkpoint()
    in_file: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.files += 1
        try:
            tensors = _header(path)
        except ValueError as error:
            found.damage.append(f"{path.name}: {error}")
            continue
        except OSError as error:
            found.damage.append(f"{path.name} cannot be read ({error.strerror or error})")
            continue
        in_file[path.name] = set(tensors)
        found.tensors.update(tensors)
    if not found.files:
        found.other_formats = _named(folder, _LOADED)
        found.never_loaded = _named(folder, _NEVER_LOADED)
    _check_index(folder, found, in_file)
    return found


def _named(folder: Path, patterns: tuple[str, ...]) -> tuple[str, ...]:
    files = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    return tuple(name for name in files if not name.endswith(_OF_TRAINING))


def _header(path: Path) -> dict[str, int]:
    """The tensors of one file with their bytes; raises ``ValueError`` with what is wrong with it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise ValueError(f"no safetensors header ({size} bytes; a pointer of git-lfs, or cut off); fetch it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            spans = {name: _span(entry) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError("its safetensors header is damaged; fetch it again") from None
    end = max((end for _, end in spans.values()), default=0)
    if 8 + length + end > size:
        raise ValueError(f"cut off: {size} bytes of {8 + length + end}; fetch it again")
    return {name: end - begin for name, (begin, end) in spans.items()}


def _span(entry: dict[str, Any]) -> tuple[int, int]:
    """Where the bytes of one tensor begin and end; an entry that says less than a loader needs is damaged."""
    begin, end = entry["data_offsets"]
    sizes = [begin, end, *entry["shape"]]
    if not isinstance(entry["dtype"], str) or not all(type(n) is int and n >= 0 for n in sizes) or begin > end:
        raise ValueError(f"not a tensor: {entry}")
    return begin, end


def _check_index(folder: Path, found: Checkpoint, in_file: dict[str, set[str]]) -> None:
    path = folder / INDEX
    if not path.is_file():
        if found.files > 1:
            found.remarks.append(f"{found.files} files without {INDEX}; vLLM reads them all")
        return
    try:
        weight_map = {name: str(file) for name, file in json.loads(path.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found.damage.append(f"{INDEX} is damaged; fetch it again")
        return
    except OSError as error:
        found.damage.append(f"{INDEX} cannot be read ({error.strerror or error})")
        return
    named = set(weight_map.values())
    present = {p.name for p in folder.glob("*.safetensors")}
    absent = sorted(named - present)
    if absent:
        found.damage.append(f"{INDEX} names {some(absent)}, which {'is' if len(absent) == 1 else 'are'} not there")
    wrong = sorted(name for name, file in weight_map.items() if file in in_file and name not in in_file[file])
    if wrong:
        found.damage.append(f"{INDEX} names tensors that their files do not have: {some(wrong)}")
    unnamed = sorted(present - named)
    if unnamed:
        found.remarks.append(f"{some(unnamed)} not in {INDEX}; vLLM does not read what the index leaves out")
        for file in unnamed:
            for name in in_file.get(file, ()):
                if name not in weight_map:
                    found.tensors.pop(name, None)


def some(items: list[str], most: int = 3) -> str:
    """The first ``most`` items, and how many more there are."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def expert_count(config: dict[str, Any]) -> int | None:
    """The number of routed experts that a model's configuration names, under any of the names in use."""
    for key in ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"):
        value = config.get(key)
        if isinstance(value, list):
            value = max(value, default=0)
        if isinstance(value, int) and value > 0:
            return value
    return None


def megabytes(size: int) -> str:
    """Bytes for a reader."""
    unit = min(3, int(math.log(max(size, 1), 1000)))
    return f"{size / 1000**unit:.{1 if unit else 0}f} {('B', 'kB', 'MB', 'GB')[unit]}"
