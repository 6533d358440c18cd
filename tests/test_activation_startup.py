"""Activation from outside, in fresh interpreters with the built wheel installed: start-up line, entry point, example.

The environment of these tests has what this one has (vLLM), and afd_patch from its wheel in a site-packages of its
own, so that Python's start-up reads the start-up line exactly as it does after ``pip install``.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.test_packaging import ROOT, build

EXAMPLE = ROOT / "sitecustomize_example"
ATTENTION = {"AFD_ROLE": "attention", "AFD_FFN": "unix:/nonexistent/ffn.sock"}
REPORT = "; import json, sys; print(json.dumps([n for n in sys.modules if n.split('.')[0] in {0!r}]))"
OURS = REPORT.format(["afd_patch"])
OURS_AND_HEAVY = REPORT.format(["afd_patch", "vllm", "torch", "wrapt"])


@dataclass
class Interpreter:
    executable: Path

    def run(self, code: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {n: v for n, v in os.environ.items() if not n.startswith(("AFD_", "PYTHON", "VLLM_"))}
        return subprocess.run(
            [self.executable, *flags, "-c", code],
            env={**own, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.executable.parent,
        )

    def value(self, code: str, *flags: str, **environment: str) -> Any:
        """The JSON on the last line that ``code`` prints."""
        done = self.run(code, *flags, **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def sentence(self, code: str, **environment: str) -> str:
        """The last line of what ``code`` writes to stderr before it ends with an error."""
        done = self.run(code, **environment)
        assert done.returncode != 0, done.stdout
        assert "native" not in done.stdout
        return done.stderr.splitlines()[-1]


def interpreter(folder: Path) -> tuple[Interpreter, Path]:
    """A virtual environment that sees this one's packages (without their start-up lines), and its site-packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Interpreter(folder / "bin" / "python"), site


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    python, site = interpreter(tmp_path_factory.mktemp("installed"))
    build("wheel", tmp_path_factory.mktemp("wheel")).extractall(site)
    return python


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    """An interpreter in which afd_patch is not installed, for the example."""
    return interpreter(tmp_path_factory.mktemp("bare"))[0]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds afd_patch and nothing else."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "afd_patch", folder / "afd_patch", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


# ---------------------------------------------------------------- without AFD_ROLE


def test_nothing_of_ours_is_imported_at_start(installed: Interpreter) -> None:
    assert installed.value("pass" + OURS_AND_HEAVY) == []
    assert installed.value("pass" + OURS_AND_HEAVY, AFD_ROLE="") == []


def test_the_entry_point_is_registered(installed: Interpreter) -> None:
    code = (
        "import json; from importlib.metadata import entry_points\n"
        "print(json.dumps([e.value for e in entry_points(group='vllm.general_plugins', name='afd_patch')]))"
    )
    assert installed.value(code) == ["afd_patch.plugin:register"]


def test_native_vllm_gets_no_patch_and_no_patching_code(installed: Interpreter) -> None:
    loaded = "import vllm.plugins as p; p.load_general_plugins()"
    assert sorted(installed.value(loaded + OURS)) == ["afd_patch", "afd_patch.plugin"]


def test_start_up_cost(installed: Interpreter, bare: Interpreter, record_property: Any) -> None:
    """Reported, not judged: a busy machine says nothing about a line. What it may not do, import, is tested above."""
    times: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(9):
        for name, python in (("without", bare), ("with", installed)):
            began = time.perf_counter()
            python.run("pass")
            times[name].append((time.perf_counter() - began) * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    record_property("interpreter_start_ms", medians)
    print(f"interpreter start: {medians['without']:.1f} ms without, {medians['with']:.1f} ms with afd_patch installed")


# ---------------------------------------------------------------- with AFD_ROLE


def test_armed_but_not_active_before_vllm(installed: Interpreter) -> None:
    assert sorted(installed.value("pass" + OURS_AND_HEAVY, **ATTENTION)) == ["afd_patch", "afd_patch.plugin"]


def test_armed_once(installed: Interpreter) -> None:
    """Python reads the start-up files of a virtual environment twice."""
    code = "import sys; print(sum('VLLM' in type(f).__name__ for f in sys.meta_path))"
    assert installed.value(code, **ATTENTION) == 1


def test_the_import_of_vllm_activates(installed: Interpreter) -> None:
    """But torch is imported by vLLM, which prepares the environment for that, and not by us before."""
    code = (
        "import json, sys\n"
        "seen = []\n"
        "class Look:\n    def find_spec(self, name, path=None, target=None): seen.append(name)\n"
        "sys.meta_path.insert(0, Look())\n"
        "import vllm, afd_patch\n"
        "prepared = seen.index('vllm.env_override') < seen.index('torch')\n"
        "print(json.dumps([afd_patch.status()['role'], prepared]))"
    )
    assert installed.value(code, **ATTENTION) == ["attention", True]


@pytest.mark.parametrize("flags", [(), ("-I",), ("-E",)], ids=["plain", "isolated", "no PYTHON variables"])
def test_no_way_around_the_start_up_line(installed: Interpreter, flags: tuple[str, ...]) -> None:
    done = installed.run("import vllm; print('native')", *flags, AFD_ROLE="attenton")
    assert done.returncode != 0
    assert "native" not in done.stdout


def test_a_wrong_role_ends_the_process_with_one_sentence(installed: Interpreter) -> None:
    sentence = installed.sentence("import vllm; print('native')", AFD_ROLE="attenton")
    assert sentence.startswith("afd_patch: AFD_ROLE='attenton' is not a role (did you mean 'attention'?)")


def test_a_wrong_setting_ends_the_process_with_one_sentence(installed: Interpreter) -> None:
    sentence = installed.sentence("import vllm; print('native')", **ATTENTION, AFD_CALL_TIMEOUT="soon")
    assert sentence == "afd_patch: AFD_CALL_TIMEOUT='soon' is not a number"


def test_a_caught_end_is_repeated_by_the_next_import(installed: Interpreter) -> None:
    """A thread that ends, or code that survives ``SystemExit``, must not leave a process that runs vLLM natively."""
    code = (
        "import threading\n"
        "def work():\n    import vllm\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
        "import vllm; print('native')"
    )
    assert "did you mean 'attention'?" in installed.sentence(code, AFD_ROLE="attenton")


def test_a_plugin_list_without_us_ends_the_process(installed: Interpreter) -> None:
    """vLLM would filter our entry point out and run natively; the start-up line does not depend on the list."""
    sentence = installed.sentence("import vllm; print('native')", **ATTENTION, VLLM_PLUGINS="other")
    assert "VLLM_PLUGINS='other'" in sentence
    assert "VLLM_PLUGINS=other,afd_patch" in sentence


# ---------------------------------------------------------------- sitecustomize_example


def path(*folders: Path) -> str:
    return os.pathsep.join(map(str, folders))


def test_example_imports_nothing_without_a_role(bare: Interpreter, package: Path) -> None:
    assert bare.value("pass" + OURS_AND_HEAVY, PYTHONPATH=path(EXAMPLE, package)) == []


def test_example_arms(bare: Interpreter, package: Path) -> None:
    where = path(EXAMPLE, package)
    assert sorted(bare.value("pass" + OURS_AND_HEAVY, PYTHONPATH=where, **ATTENTION)) == [
        "afd_patch",
        "afd_patch.plugin",
    ]
    sentence = bare.sentence("import vllm; print('native')", PYTHONPATH=where, AFD_ROLE="attenton")
    assert "did you mean 'attention'?" in sentence


def test_example_and_start_up_line_together(installed: Interpreter) -> None:
    code = "import sys; print(sum('VLLM' in type(f).__name__ for f in sys.meta_path))"
    assert installed.value(code, PYTHONPATH=str(EXAMPLE), **ATTENTION) == 1


def test_example_runs_the_sitecustomize_that_it_hides(bare: Interpreter, package: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.second = __name__\n")
    where = path(EXAMPLE, package, tmp_path)
    code = "import json, sys, sitecustomize; print(json.dumps([sys.second, sitecustomize.__file__]))"
    for environment in ({}, ATTENTION):
        second, file = bare.value(code, PYTHONPATH=where, **environment)
        assert second == "sitecustomize"
        assert Path(file).parent == tmp_path, "as without the example"


def test_example_twice_on_the_path(bare: Interpreter, package: Path, tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "sitecustomize.py", tmp_path)
    last = tmp_path / "last"
    last.mkdir()
    (last / "sitecustomize.py").write_text("import sys; sys.second = 1\n")
    where = path(EXAMPLE, tmp_path, EXAMPLE, last, package)
    assert bare.value("import sys; print(sys.second)", PYTHONPATH=where) == 1


def test_example_arms_when_the_hidden_one_fails(bare: Interpreter, package: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    done = bare.run("import vllm; print('native')", PYTHONPATH=path(EXAMPLE, tmp_path, package), AFD_ROLE="attenton")
    assert "ValueError: theirs" in done.stderr, "as Python reports it without the example"
    assert "did you mean 'attention'?" in done.stderr.splitlines()[-1]


def test_example_without_the_package_ends_the_process(bare: Interpreter, tmp_path: Path) -> None:
    broken = tmp_path / "afd_patch"
    broken.mkdir()
    (broken / "__init__.py").touch()
    sentence = bare.sentence("print('native')", PYTHONPATH=path(EXAMPLE, tmp_path), **ATTENTION)
    assert sentence.startswith("afd_patch: AFD_ROLE is set, but afd_patch cannot be imported (No module named")
    assert sentence.endswith("or unset AFD_ROLE")
    assert bare.run("pass", PYTHONPATH=path(EXAMPLE, tmp_path)).returncode == 0


def test_the_start_up_file_and_a_call_activate_once(tmp_path: Path) -> None:
    """``register`` imports vLLM, which the armed start-up file notices: there is one manager, and one wrapper."""
    code = (
        "from afd_patch import plugin; plugin.arm(); plugin.register()\n"
        "from vllm.forward_context import create_forward_context as f\n"
        "assert type(f.__wrapped__).__name__ == 'function', type(f.__wrapped__)\n"
    )
    env = {**os.environ, "AFD_ROLE": "attention", "AFD_FFN": f"unix:{tmp_path}/ffn.sock"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
