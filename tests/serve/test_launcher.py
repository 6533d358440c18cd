"""``python -m afd_patch.serve MODEL``: one command, an OpenAI API, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.deployment import ENGINE_FLAGS, Deployment, run, shared_memory_segments

Deploy = Callable[..., Deployment]
PROMPTS = ("import os", "def main(a, b):", "x")

#: Writes what every process of a deployment knows of its activation; runs in each of them, beside vLLM.
WITNESS = """
import json, os, sys, threading, time
def watch():
    while True:
        # While another thread imports the module, it is there without its functions.
        current = getattr(sys.modules.get("afd_patch.activation"), "current", lambda: None)()
        if current is not None:
            states = {s.name: s.state.name for s in current.manager.status()}
            path = os.path.join(os.environ["WITNESS"], f"{os.getpid()}.json")
            with open(path + ".new", "w") as file:
                json.dump({"role": current.config.role, "states": states, "line": sys.argv[:4]}, file)
            os.replace(path + ".new", path)
        time.sleep(0.5)
if os.environ.get("WITNESS"):
    threading.Thread(target=watch, daemon=True).start()
"""


def stock_answers(model: str, tmp_path: Path) -> list[str]:
    """What stock vLLM answers, one request at a time, in a process of its own."""
    program = tmp_path / "stock.py"
    program.write_text(
        "import json, sys\n"
        "from vllm import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=64 << 20, "
        "dtype='bfloat16')\n"
        "params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)\n"
        "print(json.dumps([llm.generate([p], params, use_tqdm=False)[0].outputs[0].text for p in sys.argv[2:]]))\n"
    )
    import subprocess
    import sys

    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, str(program), model, *PROMPTS], capture_output=True, text=True, env=env, check=True
    )
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_serves_and_is_taken_down_with_its_ffn(
    deploy: Deploy, model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    witness = tmp_path / "witness"
    witness.mkdir()
    (tmp_path / "sitecustomize.py").write_text(WITNESS)
    segments = shared_memory_segments()
    temporary = Path(tempfile.mkdtemp(prefix="t-"))  # not in tmp_path: names of sockets must be short
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    served = deploy(model, env={"WITNESS": str(witness), "PYTHONPATH": str(tmp_path), "TMPDIR": str(temporary)})
    served.wait_for("ready after")
    assert f"curl {served.url}/v1/completions" in served.text()

    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    settings = {"temperature": 0.0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    answers = [client.completions.create(model=model, prompt=p, **settings).choices[0].text for p in PROMPTS]
    assert answers == stock_answers(model, tmp_path)
    stream = client.completions.create(model=model, prompt=PROMPTS[0], stream=True, **settings)
    assert "".join(part.choices[0].text for part in stream) == answers[0]
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=5, temperature=0.0
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens > 0

    # Front end, engine core, worker and FFN server, each activated once, with every patch that it can need in effect.
    # The process in which vLLM inspects a model class it has not seen before is short-lived, and may not get that far.
    deadline = time.monotonic() + 20
    reports: list[dict[str, Any]] = []
    while len(reports) < 4 and time.monotonic() < deadline:
        time.sleep(0.5)
        reports = [json.loads(path.read_text()) for path in witness.glob("*.json")]
        reports = [report for report in reports if not report["line"][0].endswith("registry.py")]
    found = sorted(report["role"] for report in reports)
    assert found == ["attention"] * 3 + ["ffn"], (found, served.alive(), served.text()[-6000:])
    assert all(state in ("APPLIED", "PENDING") for report in reports for state in report["states"].values())
    assert served.text().count("AFD attention: vLLM") == 1
    assert served.text().count("AFD ffn: vLLM") == 1
    ffn, front_end = (set(served.child(part).cpu_affinity()) for part in ("--role ffn", "vllm.entrypoints"))
    assert ffn < front_end, "the FFN server is bound to cores of its own"

    os.kill(served.child("--role ffn").pid, signal.SIGKILL)
    assert served.wait_gone() == 1
    assert "ffn-0 ended with status -9" in served.text()
    assert not any(path.exists() or path.parent.exists() for path in served.sockets())
    assert shared_memory_segments() <= segments
    assert all(path.name.startswith("torchinductor_") for path in temporary.iterdir()), list(temporary.iterdir())


def test_two_side_by_side_and_their_ends(deploy: Deploy, model: str) -> None:
    first, second = deploy(model), deploy(model, "--ffn-servers", "2", "--gate", "attention")
    for served in (first, second):
        served.wait_for("ready after")
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
        assert client.completions.create(model=model, prompt="x", max_tokens=3).choices[0].text is not None
    for served, crossing in ((first, 4), (second, 3)):
        assert f"proxies {crossing} == layers that cross {crossing}" in served.text(), "one of four layers is dense"
    assert not set(first.sockets()) & set(second.sockets())
    assert len(second.sockets()) == 2

    second.child("ffn-0.sock").kill()  # the first one, which has the connection; calls go on to the other
    second.wait_for("ffn-0 ended with status -9; FFN servers that go on: 1")
    client = openai.OpenAI(base_url=f"{second.url}/v1", api_key="none")
    assert client.completions.create(model=model, prompt="x", max_tokens=3).choices[0].text is not None

    first.process.send_signal(signal.SIGINT)
    assert first.wait_gone() == 0
    assert "afd_patch: stopped" in first.text()

    os.kill(second.process.pid, signal.SIGKILL)  # it can stop nobody any more
    second.wait_gone()


def test_the_api_server_dies(deploy: Deploy, model: str) -> None:
    """With cores that both roles share."""
    served = deploy(model, "--share-cores")
    served.wait_for("ready after")
    roles = [served.child(part) for part in ("--role ffn", "vllm.entrypoints")]
    assert all(set(role.cpu_affinity()) == os.sched_getaffinity(0) for role in roles)
    assert all(role.environ()["OMP_WAIT_POLICY"] == "PASSIVE" for role in roles)
    os.kill(served.child("vllm.entrypoints").pid, signal.SIGKILL)
    assert served.wait_gone() == 1
    assert "api ended with status -9" in served.text()
    assert not any(path.parent.exists() for path in served.sockets())


def test_an_ffn_server_of_two_ranks(deploy: Deploy, model: str) -> None:
    """One rank of it is killed: the role ends with status 1, and the launcher takes down the rest."""
    segments = shared_memory_segments()
    served = deploy(model, "--ffn-tensor-parallel-size", "2")
    served.wait_for("ready after")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    assert client.completions.create(model=model, prompt="x", max_tokens=3).choices[0].text is not None
    assert served.text().count("AFD ffn: vLLM") == 2
    assert served.text().count("AFD attention: vLLM") == 1
    first = served.child("--role ffn")
    (second,) = [child for child in first.children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(first.cpu_affinity()) == len(second.cpu_affinity())
    assert os.cpu_count() == 1 or first.cpu_affinity() != second.cpu_affinity()

    second.kill()
    assert served.wait_gone() == 1
    assert "afd_patch: tensor-parallel rank 1 of the FFN role ended (exit status -9)" in served.text()
    assert "ffn-0 ended with status 1" in served.text()
    assert shared_memory_segments() <= segments


def test_start_up_fails_half_way(deploy: Deploy, model: str, tmp_path: Path) -> None:
    """The FFN server cannot load; the API server, which waits for it, goes away too."""
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for path in Path(model).iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.3.down_proj.weight"]
    save_file(tensors, broken / "model.safetensors")
    served = deploy(str(broken))
    assert served.wait_gone(120) == 1
    assert "it lacks model.layers.0.mlp.experts.3.down_proj.weight" in served.text()


def test_taken_port(deploy: Deploy, model: str) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("afd_patch.serve", model, *ENGINE_FLAGS, "--port", str(port))
    assert done.returncode == 2
    assert done.stderr.startswith(f"afd_patch: the OpenAI server cannot listen on port {port}")
    assert "--port" in done.stderr
