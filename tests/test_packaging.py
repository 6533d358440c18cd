"""What the distribution installs: wheel and editable installation, entry point, start-up line, and the CPU lock."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import afd_patch

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements" / "cpu.lock"
LINE = (ROOT / "afd_patch.pth").read_text()


def build(kind: str, folder: Path) -> zipfile.ZipFile:
    """The wheel that ``pip install .`` ("wheel") or ``pip install -e .`` ("editable") would install."""
    code = f"import hatchling.build as b; print(b.build_{kind}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(folder / done.stdout.split()[-1])


@pytest.fixture(scope="module", params=["wheel", "editable"])
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build(request.param, tmp_path_factory.mktemp(request.param))


def test_start_up_line_is_next_to_the_package(archive: zipfile.ZipFile) -> None:
    assert archive.read("afd_patch.pth").decode() == LINE


def test_start_up_line_is_one_import_line() -> None:
    assert len(LINE.splitlines()) == 1
    assert LINE.startswith("import "), "Python executes lines of .pth files that start with import, and only these"


def test_entry_point(archive: zipfile.ZipFile) -> None:
    [name] = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
    assert archive.read(name).decode().split("\n")[:2] == [
        "[vllm.general_plugins]",
        "afd_patch = afd_patch.plugin:register",
    ]


def test_metadata(archive: zipfile.ZipFile) -> None:
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = archive.read(name).decode()
    assert f"\nVersion: {afd_patch.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    expected = ["Requires-Dist: wrapt>=2.5", "Requires-Dist: xxhash>=3.5"]
    assert needed == expected, "vLLM comes with the image or with an extra"
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    wheel = build("wheel", tmp_path)
    assert {name.split("/")[0] for name in wheel.namelist()} == {
        "afd_patch",
        "afd_patch.pth",
        f"afd_patch-{afd_patch.__version__}.dist-info",
    }
    sources = {str(file.relative_to(ROOT)) for file in (ROOT / "afd_patch").rglob("*.py")}
    assert sources <= set(wheel.namelist())


def test_lock_pins_what_the_extras_ask_for() -> None:
    pins = dict(line.split("==") for line in LOCK.read_text().splitlines() if line and not line.startswith("#"))
    locked = {canonical(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["cpu"], *extras["test"], *extras["plot"]]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(locked[canonical(wanted.name)]), text
    assert not {"torchvision", "torchaudio", "torchcodec"} & locked.keys(), "their PyPI builds break a CPU torch"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
