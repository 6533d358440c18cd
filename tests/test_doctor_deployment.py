"""The doctor on a deployment: environment, model files, and (once) a running vLLM with another plugin."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afd_patch import boundaries, tiny
from afd_patch.doctor import examine, installation, model, probe
from afd_patch.doctor.__main__ import main
from afd_patch.doctor.checkpoint import INDEX, read_checkpoint
from afd_patch.doctor.environment import check_environment
from afd_patch.doctor.findings import Section
from afd_patch.doctor.model import check_model, find_model, identity_of


def texts(section: Section, level: str) -> list[str]:
    return [str(f) for f in section.findings if f.level == level]


# -- environment -----------------------------------------------------------------------------------------------------


def test_variables_of_kubernetes_are_harmless() -> None:
    injected = {
        "AFD_FFN_SERVICE_HOST": "10.0.0.7",
        "AFD_FFN_PORT": "tcp://10.0.0.7:7000",
        "AFD_FFN_PORT_7000_TCP_ADDR": "10.0.0.7",
    }
    section = check_environment({**injected, "AFD_ROLE": "attention", "AFD_FFN": "unix:/x.sock"})
    assert texts(section, "problem") == []
    notes = texts(section, "note")
    assert [note.partition(":")[0] for note in notes] == sorted(injected)
    assert all("comes from Kubernetes" in note for note in notes)


def test_an_unknown_name_gets_the_nearest_right_one() -> None:
    (sentence,) = texts(check_environment({"AFD_CALL_TIMEOT": "3"}), "problem")
    assert "AFD_CALL_TIMEOT" in sentence
    assert "did you mean 'AFD_CALL_TIMEOUT'?" in sentence


def test_settings_are_checked_as_a_role_would() -> None:
    assert "needs to know where the FFN is" in texts(check_environment({"AFD_ROLE": "attention"}), "problem")[0]
    assert "without AFD_ROLE" in texts(check_environment({"AFD_FFN": "unix:/x"}), "note")[0]
    assert texts(check_environment({}), "problem") == texts(check_environment({}), "note") == []


@pytest.mark.parametrize(
    ("role", "level"), [({"AFD_ROLE": "attention", "AFD_FFN": "unix:/x"}, "problem"), ({}, "note")]
)
def test_a_filter_of_plugins_that_keeps_ours_out(role: dict[str, str], level: str) -> None:
    (sentence,) = texts(check_environment({**role, "VLLM_PLUGINS": "other"}), level)
    assert "set VLLM_PLUGINS=other,afd_patch" in sentence
    assert not texts(check_environment({**role, "VLLM_PLUGINS": "other,afd_patch"}), level)


def test_versions_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: dict[str, str | None] = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "wrapt": "1.17.3"}
    monkeypatch.setattr(installation, "_version", versions.get)
    sentences = texts(installation.check_installation(None), "problem")
    assert any("torchvision::nms does not exist" in s and "pip uninstall torchvision" in s for s in sentences)
    assert any(s.startswith("wrapt: 1.17.3; 2.5 or newer") for s in sentences)
    assert any(s == "xxhash: not installed; 3.5 or newer is needed; pip install 'xxhash>=3.5'" for s in sentences)
    assert any(s.startswith("vLLM: not installed") for s in sentences)


def test_version_ranges() -> None:
    assert installation.within("0.32.0", "<0.34,>=0.32")
    assert installation.within("0.33.0rc1+cpu", ">=0.32,<0.34")
    assert not installation.within("0.31.2", ">=0.32,<0.33")
    assert not installation.within("0.34", ">=0.32,<0.34")


# -- model files -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("qwen3_moe", tmp_path_factory.mktemp("model") / "qwen3_moe", shards=3)


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def rename_tensor(folder: Path, old: str, new: str) -> None:
    """In its file's header and in the index; names are of equal length, so the file keeps its layout."""
    assert len(old) == len(new)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    path = folder / weight_map[old]
    for file in (path, index):
        content = file.read_bytes()
        assert content.count(f'"{old}"'.encode()) == 1
        file.write_bytes(content.replace(f'"{old}"'.encode(), f'"{new}"'.encode()))


class Outcome:
    """What the command prints for a model, without importing vLLM."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        self.status = main([*arguments, "--json", "--limit", "0"])
        self.report = json.loads(capsys.readouterr().out)

    def problems(self, section: str = "Model") -> list[str]:
        return [
            f"{f['subject']}: {f['text']}; {f['fix']}"
            for f in self.report["findings"]
            if f["level"] == "problem" and f["section"] == section
        ]


def test_a_sound_model(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome(capsys, str(checkpoint))
    assert outcome.problems() == []
    assert any("for attention" in f["text"] and "for FFN" in f["text"] for f in outcome.report["findings"])
    assert set(outcome.report) == {
        "version", "sound", "verdict", "vllm", "counts", "findings", "explanation", "seconds",
    }  # fmt: skip
    assert all(set(f) == {"section", "level", "subject", "text", "fix"} for f in outcome.report["findings"])


def test_the_router_in_the_attention_role(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors change sides, and so do those of a dense layer, which the FFN role does not miss."""
    path = str(tiny.make("qwen3_moe", tmp_path / "qwen3_moe"))

    def counts() -> str:
        outcome = Outcome(capsys, path)
        assert outcome.problems() == []
        (text,) = [f["text"] for f in outcome.report["findings"] if "for attention" in f["text"]]
        return str(text)

    before = counts()
    monkeypatch.setenv("AFD_GATE", "attention")
    after = counts()
    (old_attention, old_ffn), (attention, ffn) = (
        [int(n) for n in re.findall(r"(\d+) for (?:attention|FFN)", text)] for text in (before, after)
    )
    assert (attention - old_attention, ffn - old_ffn) == (6, -6), "three tensors of a dense layer, three gates"


def test_a_router_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFD_GATE", "attention")
    (sentence,) = Outcome(capsys, str(tiny.make("llama", tmp_path / "llama"))).problems()
    assert sentence == "AFD_GATE: it has no router, so with AFD_GATE=attention nothing would cross; use AFD_GATE=ffn"


def test_a_name_that_no_rule_knows(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = "model.layers.0.self_attn.o_proj.weight"
    rename_tensor(copy, old, old.replace("self_attn", "slef_attn"))
    outcome = Outcome(capsys, str(copy))
    assert outcome.status == 1
    (sentence,) = outcome.problems()
    assert "'model.layers.0.slef_attn.o_proj.weight'" in sentence
    assert "no rule says whether 'slef_attn' belongs" in sentence


def test_a_missing_expert_tensor(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = "model.layers.0.mlp.experts.3.up_proj.weight"
    rename_tensor(copy, old, old.replace("up_proj", "up_porj"))
    assert any(f"that others have: {old}" in sentence for sentence in Outcome(capsys, str(copy)).problems())


def test_files_that_are_missing_or_cut_off(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = sorted(copy.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-100])
    third.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    found = "\n".join(Outcome(capsys, str(copy)).problems())
    assert f"names {first.name}, which is not there" in found
    assert f"{second.name}: cut off" in found
    assert f"{third.name}: no safetensors header" in found


def test_a_damaged_file_does_not_keep_servers_from_being_asked(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = next(copy.glob("*.safetensors"))
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    outcome = Outcome(capsys, str(copy), "--ffn", f"unix:{copy}/s")
    assert outcome.status == 1
    assert any(f"{file.name}: no safetensors header" in sentence for sentence in outcome.problems())
    (sentence,) = outcome.problems("FFN servers")
    assert "there is no such socket" in sentence


def test_files_that_are_damaged_after_they_were_looked_at(copy: Path) -> None:
    examined = find_model(str(copy), {})
    check_model(examined, None, {})
    assert "weights" in identity_of(examined, None, "ffn")
    next(copy.glob("*.safetensors")).write_text("gone")
    assert "weights" not in identity_of(examined, None, "ffn")


SOUND_ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def write_header(file: Path, header: str) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(64))


@pytest.mark.parametrize(
    "header",
    [
        *(json.dumps({"a.weight": {**SOUND_ENTRY, "data_offsets": span}}) for span in ([], [4], [4, 0], ["0", "4"], 4)),
        *(json.dumps({"a.weight": {k: v for k, v in SOUND_ENTRY.items() if k != key}}) for key in SOUND_ENTRY),
        json.dumps({"a.weight": []}),
        json.dumps([]),
        "[" * 100_000,
    ],
    ids=lambda header: header[:70],
)
def test_headers_that_say_nothing_a_loader_could_use(header: str, tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", header)
    (sentence,) = read_checkpoint(tmp_path).damage
    assert sentence == "model.safetensors: its safetensors header is damaged; fetch it again"


def test_a_sound_header_is_no_damage(tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", json.dumps({"a.weight": SOUND_ENTRY, "__metadata__": {}}))
    found = read_checkpoint(tmp_path)
    assert found.damage == []
    assert found.tensors == {"a.weight": 4}


@pytest.mark.parametrize("content", ['{"weight_map": 1}', '{"weight_map": {"a.weight": []}}', "[" * 100_000])
def test_a_damaged_index(content: str, tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", json.dumps({"a.weight": SOUND_ENTRY}))
    (tmp_path / INDEX).write_text(content)
    assert read_checkpoint(tmp_path).damage


@pytest.mark.parametrize(
    ("file", "level", "sentence"),
    [
        ("model.gguf", "problem", "no weights but model.gguf, which no --load-format of a role reads (auto, hf, "),
        ("consolidated.00.pth", "problem", "no weights but consolidated.00.pth, which no --load-format of a role"),
        ("training_args.bin", "problem", "no weight files in the folder; fetch them"),
        ("pytorch_model.bin", "note", "no safetensors files, but pytorch_model.bin: names cannot be checked here"),
    ],
)
def test_weights_in_other_formats(checkpoint: Path, tmp_path: Path, file: str, level: str, sentence: str) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    (tmp_path / file).write_bytes(bytes(8))
    section = check_model(find_model(str(tmp_path), {}), None, {})
    (found,) = texts(section, level)
    assert sentence in found


def test_files_without_a_tensor(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    write_header(tmp_path / "model.safetensors", "{}")
    (found,) = texts(check_model(find_model(str(tmp_path), {}), None, {}), "problem")
    assert "have no tensors" in found


def test_a_defect_in_one_section_leaves_the_others(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: object) -> None:
        raise IndexError("a defect")

    monkeypatch.setattr(model, "read_checkpoint", defect)
    outcome = Outcome(capsys, str(checkpoint))
    assert outcome.problems() == ["Model: cannot be looked at: IndexError: a defect; please report this"]
    assert {"Patch points", "Boundary tables"} <= {f["section"] for f in outcome.report["findings"]}


def test_fewer_layers_or_experts_than_config_json_says(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy / "config.json"
    config = json.loads(path.read_text())
    layers, experts = config["num_hidden_layers"], config["num_local_experts"]
    path.write_text(json.dumps({**config, "num_hidden_layers": layers + 1, "num_local_experts": experts + 1}))
    found = "\n".join(Outcome(capsys, str(copy)).problems())
    assert f"no attention tensors for layers {layers} of {layers + 1}" in found
    assert f"has {experts} experts and config.json says {experts + 1}" in found


def test_an_architecture_that_cannot_be_split(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen3MoeForCausalLLM"]}))
    sentences = Outcome(capsys, str(copy)).problems()
    assert "the nearest one is Qwen3MoeForCausalLM" in sentences[0]
    assert "does not know this architecture" in sentences[1]


# -- a running vLLM --------------------------------------------------------------------------------------------------

_PLUGIN = """\
import functools
import vllm.forward_context as f

def register():
    native = f.create_forward_context

    @functools.wraps(native)
    def create(*args, **kwargs):
        return native(*args, **kwargs)

    f.create_forward_context = create
"""


def test_wrappers_of_another_plugin_are_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "rival.py").write_text(_PLUGIN)
    info = tmp_path / "rival-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nrival = rival:register\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "AFD_ROLE": "attention", "AFD_FFN": "unix:/nowhere", "AFD_X": ""}
    command = [sys.executable, "-m", "afd_patch.doctor", str(checkpoint), "--json", "--limit", "100"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    found = {level: [] for level in ("ok", "note", "problem")}  # type: dict[str, list[str]]
    for item in report["findings"]:
        found[item["level"]].append(f"{item['section']}: {item['subject']}: {item['text']}")
    assert [line for line in found["note"] if "rival.register.<locals>.create wraps" in line and "above ours" in line]
    assert "Installation: other plugins: rival (rival) are loaded into the same processes" in found["note"]
    assert [line for line in found["ok"] if line.startswith("In a running vLLM: activation: ")]
    assert [line for line in found["ok"] if line.startswith("Model: configuration: vLLM and both roles accept it")]
    wrong = {line.partition(": ")[0] for line in found["problem"]}
    assert wrong == {"Environment", "FFN servers"}, found["problem"]


def test_who_is_above_and_who_is_below() -> None:
    import functools
    import types

    import wrapt

    def made_in(module: str, inner: Any) -> Any:
        space: dict[str, Any] = {"__name__": module, "inner": inner, "functools": functools}
        exec("@functools.wraps(inner)\ndef wrapper(*args, **kwargs):\n    return inner(*args, **kwargs)", space)
        return space["wrapper"]

    native = types.FunctionType((lambda: None).__code__, {"__name__": "vllm.forward_context"})
    ours = types.FunctionType((lambda *a: None).__code__, {"__name__": "afd_patch.patches.forward_context"})
    patched = wrapt.FunctionWrapper(made_in("low.plugin", native), ours)
    assert list(probe.owners(native)) == []
    assert list(probe.owners(wrapt.FunctionWrapper(native, ours))) == []
    assert list(probe.owners(made_in("high.plugin", patched))) == [
        ("above", "high.plugin.wrapper"),
        ("below", "low.plugin.wrapper"),
    ]


def test_a_vllm_that_takes_too_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("AFD_ROLE", raising=False)
    main(["--limit", "0.05", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert any("was not imported within 0.05 s" in finding["text"] for finding in report["findings"])


def test_a_model_of_the_hub_is_looked_at_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, vLLM would fetch what is not there yet."""
    given: list[Any] = []
    monkeypatch.setattr(examine.live, "LiveProbe", lambda *arguments: given.extend(arguments))
    named = model.Model("MixtralForCausalLM", tmp_path, {}, boundary=boundaries.find("MixtralForCausalLM"))
    examine._start_probe(examine.Request(model="org/name"), named)
    assert str(tmp_path) in given
    assert "org/name" not in given
