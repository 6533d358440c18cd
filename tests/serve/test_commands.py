"""The commands' answers to bad input, and ``verify`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serve.deployment import ENGINE_FLAGS, run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/no/such/model"], "the model folder /no/such/model does not exist"),
        (["MODEL", "--role", "ffn"], "--role ffn needs --listen"),
        (["MODEL", "--listen", "unix:/tmp/x.sock"], "--listen belongs to --role ffn"),
        (["MODEL", "--ffn", "unix:/tmp/x.sock"], "--ffn belongs to --role attention"),
        (["MODEL", "--ffn-servers", "0"], "must be at least 1"),
        (
            ["MODEL", "--role", "ffn", "--listen", "unix:/no/such/folder/x.sock"],
            "/no/such/folder is not a folder that exists",
        ),
        (["MODEL", "--role", "ffn", "--listen", "unix:" + "/x" * 80], "choose a shorter folder"),
        (["MODEL", "--role", "ffn", "--listen", "tcp://127.0.0.1"], "is not tcp://HOST:PORT"),
        (["MODEL", "--call-timeout", "0"], "must be a positive number of seconds"),
        (["EMPTY"], "it has no config.json"),
        (["UNKNOWN"], "OlmoForCausalLM has no boundary table"),
    ],
)
def test_one_sentence(arguments: list[str], expected: str, model: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text(json.dumps({"architectures": ["OlmoForCausalLM"]}))
    names = {"MODEL": model, "EMPTY": str(tmp_path / "empty"), "UNKNOWN": str(tmp_path / "unknown")}
    done = run("afd_patch.serve", *(names.get(word, word) for word in arguments))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("afd_patch: ")
    assert expected in done.stderr


@pytest.mark.parametrize(("gate", "layers"), [("ffn", 4), ("attention", 3)])
def test_verify(gate: str, layers: int, model: str) -> None:
    done = run("afd_patch.verify", model, "--json", "--gate", gate, *ENGINE_FLAGS, "--max-num-batched-tokens", "128")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["exact"] is True
    assert report["mismatching_tokens"] == 0
    assert report["largest_logprob_error"] == 0.0
    assert report["layers"] == layers, "those that hand over rows"
    assert report["remote_calls"] % layers == 0
    assert report["tokens"] > 400


def test_verify_says_why_a_side_cannot_run(model: str) -> None:
    done = run("afd_patch.verify", model, "--max-model-len", "100000000")
    assert done.returncode == 2
    assert done.stderr.startswith("afd_patch: stock vLLM ended with status")
    assert "max_model_len" in done.stderr


def test_verify_notices_differences() -> None:
    from afd_patch.verify.__main__ import compare

    def answers(tokens: list[int], logprob: float) -> list[dict[str, object]]:
        return [{"round": "r", "outputs": [{"tokens": tokens, "logprobs": [{"7": logprob}]}]}]

    assert compare(answers([1, 2], -0.5), answers([1, 2], -0.5)) == (2, 0, 0.0)
    assert compare(answers([1, 2], -0.5), answers([1, 3], -0.75)) == (2, 1, 0.25)
    assert compare(answers([1, 2], -0.5), answers([1], -0.5)) == (2, 1, 0.0)
    other = [{"round": "r", "outputs": [{"tokens": [1, 2], "logprobs": [{"8": -0.5}]}]}]
    assert compare(answers([1, 2], -0.5), other)[2] == float("inf")
