"""The fingerprint of weights: of content alone, wherever it lies, and of every kind of tensor."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from afd_patch.errors import WeightError
from afd_patch.identity import _sampled, weights_fingerprint
from tests.engine.children import Child

#: Two layers of a model with 400 experts: more tensors than are sampled, and kinds of them at equal distances.
NAMES = [
    f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"
    for layer in range(2)
    for expert in range(400)
    for kind in ("gate_proj", "up_proj", "down_proj")
] + [f"model.layers.{layer}.{kind}.weight" for layer in range(2) for kind in ("norm", "o_proj")]
KINDS = sorted({re.sub(r"\d+", "#", name) for name in NAMES})


def write(path: Path, tensors: dict[str, bytes]) -> None:
    header, place = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [place, place + len(data)]}
        place += len(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_another_value_in_every_tensor_of_a_kind_is_noticed(kind: str, tmp_path: Path) -> None:
    tensors = {name: name.encode() for name in NAMES}
    write(tmp_path / "one" / "model.safetensors", tensors)
    other = {name: data[::-1] if re.sub(r"\d+", "#", name) == kind else data for name, data in tensors.items()}
    write(tmp_path / "other" / "model.safetensors", other)
    assert weights_fingerprint(tmp_path / "one") != weights_fingerprint(tmp_path / "other")


def test_files_are_no_content(tmp_path: Path) -> None:
    tensors = {name: name.encode() for name in NAMES[:50]}
    write(tmp_path / "whole" / "any.safetensors", tensors)
    halves = dict(list(tensors.items())[20:]), dict(list(tensors.items())[:20])
    files = [f"model-{number}-of-2.safetensors" for number in (1, 2)]
    for file, half in zip(files, halves, strict=True):
        write(tmp_path / "halves" / file, half)
    index = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    (tmp_path / "halves" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    write(tmp_path / "halves" / "duplicate.safetensors", {"tok_embeddings.weight": b"again"})  # nobody loads it
    assert weights_fingerprint(tmp_path / "whole") == weights_fingerprint(tmp_path / "halves")


def test_files_of_the_format_of_mistral_are_what_vllm_loads(tmp_path: Path) -> None:
    for folder, value in (("one", b"1"), ("same", b"1"), ("other", b"2")):
        write(tmp_path / folder / "consolidated.safetensors", {"tok_embeddings.weight": value})
    write(tmp_path / "same" / "model.safetensors", {"model.embed_tokens.weight": b"1"})
    assert weights_fingerprint(tmp_path / "one") == weights_fingerprint(tmp_path / "same")
    assert weights_fingerprint(tmp_path / "one") != weights_fingerprint(tmp_path / "other")


def test_one_tensor_of_each_kind_is_sampled() -> None:
    names = [f"layers.{layer}.experts.{expert}.w" for layer in range(60) for expert in range(256)]
    alone = [
        f"model.{kind}.weight" for kind in ("embed_tokens", "norm", "lm_head", *(f"q{'x' * n}" for n in range(20)))
    ]
    sampled = _sampled([*names, *alone])
    assert len(sampled) == 1024
    assert sampled >= set(alone)
    assert _sampled(names[:1000]) == set(names[:1000])


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("README.md", "", "holds no weights"),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1", "no complete safetensors file"),
        ("model.safetensors.index.json", "[]", "no index of safetensors files"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "a.safetensors"}}', r"not there \(a.safetensors\)"),
    ],
)
def test_what_is_no_checkpoint(file: str, content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(WeightError, match=says):
        weights_fingerprint(tmp_path)


def put_into_cache(cache: Path, name: str, commit: str, source: Path) -> None:
    """Where the hub's client keeps what it fetched (https://huggingface.co/docs/huggingface_hub/guides/manage-cache)."""
    from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    shutil.copytree(source, folder / "snapshots" / commit)
    # What an online client notes down of a repository: also files that nobody asked for, and so are not here.
    write_tree_cache(str(folder), commit, {"README.md": TreeCacheEntry(size=1, blob_id="0" * 40)})


def fingerprints_of_the_hub(cache: str, names: list[str]) -> list[str]:
    """Of models of which the hub's client has a copy, without a network."""
    import huggingface_hub.constants
    from vllm.config.load import LoadConfig

    from afd_patch.identity import _weights

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    load = LoadConfig(download_dir=cache)

    def weights(name: str) -> str:
        model: Any = SimpleNamespace(model=name, revision=None)
        return _weights(SimpleNamespace(model_config=model, load_config=load))

    return [weights(name) for name in names]


def test_a_model_of_the_hub_is_known_by_its_content(tmp_path: Path) -> None:
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    write(base / "model.safetensors", {"model.norm.weight": b"1234"})
    write(tuned / "model.safetensors", {"model.norm.weight": b"1235"})
    for name, number, source in (("org/base", "1", base), ("org/tuned", "2", tuned), ("org/again", "3", base)):
        put_into_cache(tmp_path / "cache", name, number * 40, source)
    names = ["org/base", "org/tuned", "org/again"]
    assert Child(fingerprints_of_the_hub, str(tmp_path / "cache"), names).result() == [
        weights_fingerprint(base),
        weights_fingerprint(tuned),
        weights_fingerprint(base),
    ]


def kept_elsewhere(cache: str) -> list[str]:
    """A loader that fetches from another hub keeps the files where the client of this one does not look."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    DefaultModelLoader.download_model = lambda self, model_config: None  # type: ignore[method-assign]
    return fingerprints_of_the_hub(cache, ["org/none"])


def test_a_model_that_was_fetched_to_another_place(tmp_path: Path) -> None:
    kind, message = Child(kept_elsewhere, str(tmp_path)).outcome()
    assert kind == "error"
    assert message.startswith("WeightError: the weights of org/none are not where the hub keeps what was fetched")
