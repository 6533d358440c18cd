"""The doctor on source trees: the installed vLLM, and copies of it in which one thing was changed."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from afd_patch import boundaries
from afd_patch.doctor.__main__ import main
from afd_patch.doctor.boundary_points import check_boundaries
from afd_patch.doctor.findings import Finding, Section
from afd_patch.doctor.names import Names
from afd_patch.doctor.patch_points import all_patches, check_imports, check_patch_points
from afd_patch.doctor.source import SourceTree, installed

MODELS = "vllm/model_executor/models"
LOADERS = "vllm/model_executor/model_loader"
CONTEXT = "vllm/forward_context.py"

_tree = installed()
assert _tree is not None
INSTALLED = Path(_tree.where).parent


def changed(changes: dict[str, Callable[[str], str] | str | None]) -> Names:
    """The installed vLLM, with files changed, added (text) or taken away (``None``)."""
    contents: dict[str, bytes | None] = {}
    for name, change in changes.items():
        if callable(change):
            before = (INSTALLED / name).read_text()
            change = change(before)
            assert change != before, f"nothing to change in {name}"
        contents[name] = None if change is None else change.encode()

    def read(name: str) -> bytes | None:
        if name in contents:
            return contents[name]
        path = INSTALLED / name
        return path.read_bytes() if path.is_file() else None

    def names() -> Iterator[str]:  # only these files are searched for what moved
        yield from (name for name, content in contents.items() if content is not None)

    return Names(SourceTree("changed", read, names, list))


def problems(section: Section) -> dict[str, str]:
    """Sentences by what they are about; of patches, the last part of the name."""
    return {
        f.subject.removeprefix("construction.").rpartition(".")[2]: str(f)
        for f in section.findings
        if f.level == "problem"
    }


def finding(section: Section, subject: str) -> Finding:
    return next(f for f in section.findings if f.subject.endswith(subject))


def replacing(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


# -- the installed vLLM --------------------------------------------------------------------------------------------


def test_the_installed_vllm_is_sound_and_never_imported() -> None:
    code = (
        "import sys; from afd_patch.doctor.__main__ import main\n"
        "status = main(['--vllm-tree', sys.argv[1], '--json'])\n"
        "assert {'vllm', 'torch'}.isdisjoint(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, INSTALLED], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    targets = [f for f in report["findings"] if f["section"] == "Patch points"]
    assert [f["subject"] for f in targets] == [patch.name for patch in all_patches()]
    assert report["sound"] is True
    assert report["counts"]["problem"] == 0
    print(f"checked in {report['seconds']:.1f} s")  # reported, not judged: a busy machine says nothing about the code


def test_version_and_distribution_of_the_installed_vllm() -> None:
    tree = installed()
    assert tree is not None
    name = tree.distribution()
    assert name is not None
    assert tree.version() == metadata.version(name)


def test_every_name_that_is_used_is_looked_at() -> None:
    subjects = [f.subject for f in check_imports(changed({})).findings]
    assert "vllm.forward_context.set_forward_context" in subjects
    assert "vllm.model_executor.models.utils._model_to_pp_missing_layer_names" in subjects


# -- one thing is different ----------------------------------------------------------------------------------------


def test_a_parameter_is_gone() -> None:
    names = changed({CONTEXT: replacing("additional_kwargs", "extra_kwargs")})
    found = problems(check_patch_points(names, None))
    assert list(found) == ["create"]
    assert "has no parameter additional_kwargs (it has: " in found["create"]
    assert "extra_kwargs" in found["create"]


def test_a_class_was_renamed() -> None:
    names = changed({f"{MODELS}/qwen3_moe.py": replacing("Qwen3MoeMLP", "Qwen3MoeMlp")})
    found = problems(check_patch_points(names, None))
    assert list(found) == ["Qwen3MoeMLP"]
    sentence = found["Qwen3MoeMLP"]
    assert "qwen3_moe defines no Qwen3MoeMLP (needed for Qwen3MoeForCausalLM)" in sentence
    assert "the nearest name there is Qwen3MoeMlp" in sentence


def test_a_module_was_moved() -> None:
    moved = (INSTALLED / MODELS / "mixtral.py").read_text()
    names = changed({f"{MODELS}/mixtral.py": None, "vllm/models/mixtral/model.py": moved})
    found = problems(check_patch_points(names, None))
    assert set(found) == {f"Mixtral{name}" for name in ("DecoderLayer", "MoE", "Attention")}
    assert "there is no module vllm.model_executor.models.mixtral" in found["MixtralMoE"]
    assert "MixtralMoE is defined in vllm.models.mixtral.model" in found["MixtralMoE"]


def test_a_problem_of_another_family_is_a_note() -> None:
    names = changed({f"{MODELS}/mixtral.py": None})
    section = check_patch_points(names, boundaries.find("Qwen3MoeForCausalLM"))
    assert problems(section) == {}
    assert finding(section, "MixtralMoE").level == "note"


def test_a_function_that_is_imported_from_elsewhere_is_found() -> None:
    here, there = f"{LOADERS}/ep_weight_filter.py", f"{LOADERS}/filters.py"
    names = changed({here: "from .filters import *\n", there: (INSTALLED / here).read_text()})
    found = finding(check_patch_points(names, None), "weights.should_skip_weight")
    assert found.level == "ok"
    assert "defined in vllm.model_executor.model_loader.filters" in found.text


def test_what_only_type_checkers_import_is_not_there() -> None:
    here, there = f"{LOADERS}/ep_weight_filter.py", f"{LOADERS}/filters.py"
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .filters import should_skip_weight\n"
    names = changed({here: guarded, there: (INSTALLED / here).read_text()})
    assert "should_skip_weight" in problems(check_patch_points(names, None))


def test_a_name_that_the_module_serves_on_demand_does_not_count() -> None:
    names = changed({CONTEXT: "def __getattr__(name): ...\n"})
    sentence = problems(check_patch_points(names, None))["create"]
    assert "a name that a module serves through __getattr__ does not count" in sentence


def test_a_method_that_moved_to_a_base_class_is_found() -> None:
    names = changed({f"{LOADERS}/dummy_loader.py": replacing("def load_weights", "def fill_weights")})
    found = finding(check_patch_points(names, None), "weights.DummyModelLoader.load_weights")
    assert found.level == "ok"
    assert "inherited from vllm.model_executor.model_loader.base_loader:BaseModelLoader" in found.text


def test_a_method_that_is_gone() -> None:
    names = changed({f"{LOADERS}/default_loader.py": replacing("def get_all_weights", "def all_weights")})
    found = problems(check_patch_points(names, None))
    assert "DefaultModelLoader has no get_all_weights" in found["get_all_weights"]


def test_a_platform_switch_counts_in_all_its_branches() -> None:
    names = changed({CONTEXT: lambda text: text + "\nif 1:\n    def create_forward_context(vllm_config): ...\n"})
    assert "create" in problems(check_patch_points(names, None))


def test_a_layer_that_is_built_differently() -> None:
    one = changed({f"{MODELS}/mixtral.py": replacing("self.block_sparse_moe", "self.moe")})
    assert (
        "does not assign block_sparse_moe (but: moe)"
        in problems(check_boundaries(one, boundaries.find("MixtralForCausalLM")))["mixtral"]
    )
    other = changed({f"{MODELS}/qwen3_moe.py": replacing("self.mlp = Qwen3MoeMLP(", "self.mlp = Qwen3MoeAttention(")})
    assert "assigns vllm.model_executor.models.qwen3_moe:Qwen3MoeAttention to mlp" in str(
        problems(check_boundaries(other, boundaries.find("Qwen3MoeForCausalLM")))["qwen3_moe"]
    )


def test_an_architecture_that_is_built_by_another_class() -> None:
    names = changed(
        {f"{MODELS}/registry.py": replacing('("mixtral", "MixtralForCausalLM")', '("jamba", "JambaForCausalLM")')}
    )
    section = check_boundaries(names, boundaries.find("MixtralForCausalLM"))
    assert (
        "does not lead to vllm.model_executor.models.mixtral:MixtralDecoderLayer"
        in problems(section)["MixtralForCausalLM"]
    )


def test_a_platform_with_another_decoder_layer_is_a_note() -> None:
    section = check_boundaries(changed({}), boundaries.find("DeepseekV3ForCausalLM"))
    assert problems(section) == {}
    assert (
        "vllm.models.deepseek_v32.nvidia.model:DeepseekV32DecoderLayer"
        in finding(section, "DeepseekV32ForCausalLM").text
    )


def test_a_helper_of_ours_that_is_gone() -> None:
    names = changed({f"{MODELS}/utils.py": replacing("_model_to_pp_missing_layer_names", "_missing_layers")})
    found = problems(check_imports(names))
    assert list(found) == ["_model_to_pp_missing_layer_names"]


# -- trees on disk, and the command ----------------------------------------------------------------------------------


def test_a_broken_tree_ends_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    for path in (INSTALLED / "vllm").iterdir():
        if path.name not in ("forward_context.py", "_version.py"):
            (package / path.name).symlink_to(path)
    text = (INSTALLED / CONTEXT).read_text()
    (package / "forward_context.py").write_text(text.replace("def create_forward_context", "def new_forward_context"))
    assert main(["--vllm-tree", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert output.startswith("vLLM of unknown version: ")
    assert "problem  forward_context.create: " in output
    assert output.splitlines()[-1].startswith("2 problems found") or "1 problem found" in output.splitlines()[-1]


def test_a_wheel_and_the_package_folder_itself(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-9.9.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(INSTALLED / CONTEXT, CONTEXT)
        archive.writestr("vllm/_version.py", "__version__ = version = '9.9'\n")
    tree = SourceTree.open(wheel)
    assert tree.version() == "9.9"
    assert finding(check_patch_points(Names(tree), None), "forward_context.create").level == "ok"
    assert SourceTree.open(INSTALLED / "vllm").version() == installed().version()  # type: ignore[union-attr]


def damaged_wheel(folder: Path, file: str) -> Path:
    """A wheel of vLLM in which a byte of ``file`` is another than its checksum says."""
    wheel = folder / "vllm-9.9.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in {CONTEXT, "vllm/_version.py", file}:
            archive.writestr(name, f"# {name}\n__version__ = '9.9'\n")
    wheel.write_bytes(wheel.read_bytes().replace(f"# {file}".encode(), f"# {file[:-1]}_".encode()))
    return wheel


def test_a_damaged_wheel_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--vllm-tree", str(damaged_wheel(tmp_path, "vllm/_version.py"))]) == 2
    error = capsys.readouterr().err
    assert "vllm-9.9.whl is a damaged wheel (Bad CRC-32 for file 'vllm/_version.py'); fetch it again" in error


def test_a_wheel_with_a_damaged_module_is_reported_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--vllm-tree", str(damaged_wheel(tmp_path, CONTEXT))]) == 1
    output = capsys.readouterr().out
    assert "problem  Patch points: cannot be looked at: " in output
    assert "please report" not in output
    assert "Boundary tables\n" in output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--vllm-tree", "/nonexistent"],
        ["no/such/model/folder", "--limit", "0"],
        ["~nobody-of-this-name/model", "--limit", "0"],
        ["/" + "x" * 5000, "--limit", "0"],
        ["--explain"],
        ["--ffn", "http://localhost:1", "--limit", "0"],
        ["--limit", "-1"],
    ],
)
def test_wrong_usage_ends_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: Any = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    output = capsys.readouterr()
    assert output.err.strip()
    assert "Traceback" not in output.err
