"""The kernel fetches what a role reads, and not what lies around it."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from afd_patch.bench import pages
from afd_patch.errors import WeightError
from afd_patch.patches import readahead

OWN, FOREIGN, PAIRS = 96 << 10, 1 << 20, 24


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Small tensors of one role between large ones of the other."""
    path = tmp_path / "model.safetensors"
    tensors = {}
    for index in range(PAIRS):
        tensors[f"{index:02d}.foreign"] = torch.zeros(FOREIGN, dtype=torch.uint8)
        tensors[f"{index:02d}.own"] = torch.full((OWN,), index, dtype=torch.uint8)
    save_file(tensors, path)
    pages.evict([path])
    if pages.cached([path]):
        pytest.skip("the file system of the temporary folder keeps all its pages in memory")
    return path


def test_tensors_are_read_without_their_surroundings(file: Path) -> None:
    files = readahead.TensorFiles([str(file)])
    with safe_open(file, framework="pt") as opened:
        for name in sorted(opened.keys()):
            if name.endswith("own"):
                files.fetch(name)
                assert opened.get_tensor(name).tolist() == [int(name[:2])] * OWN
    pages_at_both_ends = 2 * PAIRS * mmap.PAGESIZE
    header = 4 * mmap.PAGESIZE
    assert pages.cached([file]) <= PAIRS * OWN + pages_at_both_ends + header


def test_a_name_that_is_in_no_file(file: Path) -> None:
    readahead.TensorFiles([str(file)]).fetch("elsewhere")


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"\xff" * 9)
    with pytest.raises(WeightError, match="no complete safetensors file"):
        readahead.TensorFiles([str(tmp_path / "short")])
