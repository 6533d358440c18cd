"""Tensor parallelism inside of a role: each role's number of ranks is its own, and what fails hangs nobody.

Where results are compared, worker processes and FFN followers are forked, because each spawned one imports vLLM again.
Where something fails, and in ``tests/serve``, they are spawned, as in production.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.children import Child
from tests.engine.engines import PROMPTS, ask, build, ffn_server, generate
from tests.engine.test_ownership import assert_shared

LAYERS = 4
#: One for each token.
FORWARDS = 8
#: vLLM binds the ranks of a role to NUMA nodes by default, and refuses where there are fewer of them.
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def calls_of_rank(worker: Any) -> int:
    from afd_patch.attention import connections

    return connections.total_calls()


def parameters_of_rank(worker: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in worker.get_model().named_parameters()}


def watch_results(worker: Any) -> None:
    """From now on, remember a digest of each result that this rank gets."""
    from afd_patch.attention.tensor_parallel import GroupConnector

    native = GroupConnector.call
    worker.afd_test_results = []

    def call(self: Any, layer: int, rows: Any, out: Any, **kwargs: Any) -> None:
        native(self, layer, rows, out, **kwargs)
        worker.afd_test_results.append((layer, tuple(out.shape), hash(tuple(out.flatten().tolist()))))

    GroupConnector.call = call  # type: ignore[method-assign]


def results_of_rank(worker: Any) -> list[Any]:
    return list(worker.afd_test_results)


def forked_workers() -> None:
    """vLLM's workers are forked from this process, which has no thread of OpenMP yet."""
    import multiprocessing

    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def forked_ffn_server(model: str, endpoint: str, **engine: Any) -> None:
    from afd_patch.ffn import ranks

    ranks.START_METHOD = "fork"
    ffn_server(model, endpoint, **engine)


def run(model: str, *, watched: bool = False, **engine: Any) -> dict[str, Any]:
    """What an engine says, and what each of its ranks did."""
    forked_workers()
    llm = build(model, **engine)
    if watched:
        llm.collective_rpc(watch_results)
    return {
        "outputs": ask(llm, PROMPTS),
        "calls": llm.collective_rpc(calls_of_rank),
        "parameters": llm.collective_rpc(parameters_of_rank),
        "results": llm.collective_rpc(results_of_rank) if watched else [],
    }


class Combinations:
    """Stock vLLM with one and two ranks, and every combination of the two roles' sizes, for one model."""

    def __init__(self, name: str, model: str, folder: Path, **engine: Any) -> None:
        self.name = name
        self.servers = [
            Child(
                forked_ffn_server,
                model,
                self.endpoint(folder, ranks),
                env=UNBOUND,
                tensor_parallel_size=ranks,
                **engine,
            )
            for ranks in (1, 2)
        ]
        try:
            self.stock = {ranks: self.run(model, {}, ranks, **engine) for ranks in (1, 2)}
            for server in self.servers:
                server.wait_for("AFD ffn: ready:")
            self.split = {
                (attention, ffn): self.run(
                    model,
                    attention_env(self.endpoint(folder, ffn)),
                    attention,
                    watched=attention == 2,
                    **engine,
                )
                for attention in (1, 2)
                for ffn in (1, 2)
            }
        except BaseException:
            self.destroy()
            raise

    @staticmethod
    def endpoint(folder: Path, ranks: int) -> str:
        return f"unix:{folder}/ffn-{ranks}.sock"

    @staticmethod
    def run(model: str, env: dict[str, str], ranks: int, **engine: Any) -> dict[str, Any]:
        child = Child(run, model, env={**UNBOUND, **env}, tensor_parallel_size=ranks, **engine)
        try:
            result: dict[str, Any] = child.result()
        finally:
            child.kill()
        return {**result, "log": child.text()}

    def destroy(self) -> None:
        for server in self.servers:
            server.kill()


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v2"])
def combinations(
    request: pytest.FixtureRequest, checkpoint: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Combinations]:
    made = Combinations(request.param, checkpoint(request.param), tmp_path_factory.mktemp("tp"), dtype="float32")
    yield made
    made.destroy()


def test_equal_sizes_are_exact(combinations: Combinations) -> None:
    for ranks in (1, 2):
        assert combinations.split[ranks, ranks]["outputs"] == combinations.stock[ranks]["outputs"]


def test_mixed_sizes_differ_as_little_as_stock_does(combinations: Combinations) -> None:
    """There is no stock run with two numbers of ranks.

    Stock vLLM with one and with two ranks adds up in another order, and so does each mixed combination. In float32,
    whose unit in the last place is 1e-7 of a value, that is some 1e-6 of a logprob for these sizes. A result that is
    added up twice or not at all, or that belongs to other rows, changes logprobs by more than 0.1. What is compared is
    the first token of each prompt, behind all layers, because later ones depend on it. With MLA, stock vLLM's own
    results go further apart on CPUs, except for the prompt of one token, where there is nothing to attend to.
    """
    prompts = 1 if combinations.name == "deepseek_v2" else len(PROMPTS)
    one = combinations.stock[1]["outputs"][:prompts]
    assert distance(one, combinations.stock[2]["outputs"][:prompts]) < 1e-4
    for sizes in ((1, 2), (2, 1)):
        assert distance(one, combinations.split[sizes]["outputs"][:prompts]) < 1e-4


def distance(one: list[Any], other: list[Any]) -> float:
    """The largest difference of a logprob that is listed for the first token of a prompt."""
    largest = 0.0
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(one, other, strict=True):
        assert tokens[0] == other_tokens[0]
        assert logprobs[0].keys() == other_logprobs[0].keys()
        largest = max(largest, *(abs(logprobs[0][token] - other_logprobs[0][token]) for token in logprobs[0]))
    return largest


def test_one_copy_crosses_and_every_rank_gets_the_result(combinations: Combinations) -> None:
    for (attention, _), result in combinations.split.items():
        assert result["calls"] == [LAYERS * FORWARDS] + [0] * (attention - 1)
    for ffn in (1, 2):
        first, second = combinations.split[2, ffn]["results"]
        assert len(first) == LAYERS * FORWARDS
        assert first == second


def test_each_rank_holds_its_shard_of_its_role(combinations: Combinations) -> None:
    stock = combinations.stock[2]["parameters"]
    for ffn in (1, 2):
        split = combinations.split[2, ffn]
        for rank in (0, 1):
            own = {n: shape for n, shape in stock[rank].items() if ".mlp." not in n}
            assert_shared(split["parameters"][rank], {}, own)
            assert f"left to the other role, tensor-parallel rank {rank} of 2" in split["log"]
    server = combinations.servers[1].text()
    assert all(f"left to the other role, tensor-parallel rank {rank} of 2" in server for rank in (0, 1))
    assert server.count("foreign parameters 0") == 2


def test_idle_followers_sleep(combinations: Combinations) -> None:
    (follower,) = followers(combinations.servers[1])
    before = cpu_seconds(follower)
    time.sleep(2)
    assert cpu_seconds(follower) - before < 0.2


def test_followers_end_with_rank_0(combinations: Combinations) -> None:
    """The last test with these servers: one is stopped (its whole group is told), the other killed."""
    server = combinations.servers[1]
    (follower,) = followers(server)
    if combinations.name == "qwen3_moe":
        os.killpg(server.pid, signal.SIGTERM)
        assert server.outcome(30) == ("value", None)
        assert "AFD ffn: stopped after" in server.text()
    else:
        server.signal(signal.SIGKILL)
    assert ended(follower)
    assert "Traceback" not in server.text()


def test_bfloat16(checkpoint: Callable[..., str], endpoint: str) -> None:
    model = checkpoint("deepseek_v2")
    server = Child(forked_ffn_server, model, endpoint, env=UNBOUND, tensor_parallel_size=2)
    try:
        split = Combinations.run(model, attention_env(endpoint), 2)
    finally:
        server.kill()
    assert split["outputs"] == Combinations.run(model, {}, 2)["outputs"]
    assert split["calls"] == [LAYERS * FORWARDS, 0]


def test_compiled(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    """Two ranks in both roles: the collectives and the hand-off are opaque to the compiler."""
    compiled = {"enforce_eager": False}
    env = {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    model, endpoint = checkpoint("qwen3_moe"), f"unix:{tmp_path}/ffn.sock"
    server = Child(forked_ffn_server, model, endpoint, env={**UNBOUND, **env}, tensor_parallel_size=2, **compiled)
    try:
        stock = Combinations.run(model, env, 2, **compiled)
        split = Combinations.run(model, {**env, **attention_env(endpoint)}, 2, **compiled)
    finally:
        server.kill()
    assert split["outputs"] == stock["outputs"]
    assert split["calls"] == [LAYERS * (FORWARDS + 1), 0]  # and the one that compiles


def lose_server(model: str, server: int) -> tuple[str, float, list[int]]:
    """What a request says after its FFN server was killed, how long that took, and the workers that are left."""
    import multiprocessing

    llm = build(model, tensor_parallel_size=2)
    assert ask(llm, PROMPTS[:1])
    os.kill(server, signal.SIGKILL)
    started = time.monotonic()
    said = "nothing"
    try:
        ask(llm, PROMPTS)
    except RuntimeError as error:  # vLLM's own, about its worker
        said = str(error)
    seconds = time.monotonic() - started
    llm.llm_engine.engine_core.shutdown()
    return said, seconds, [process.pid or 0 for process in multiprocessing.active_children()]


def test_a_killed_server_ends_the_engine_on_every_rank(checkpoint: Callable[..., str], endpoint: str) -> None:
    model = checkpoint("qwen3_moe")
    server = Child(ffn_server, model, endpoint)
    env = {**UNBOUND, **attention_env(endpoint), "AFD_CALL_TIMEOUT": "3"}
    child = Child(lose_server, model, server.pid, env=env)
    try:
        said, seconds, left = child.result()
    finally:
        server.kill()
        child.kill()
    assert f"no FFN server at {endpoint} answered within 3 s" in said
    assert 2.5 < seconds < 15
    assert left == []
    assert "the call of tensor-parallel rank 0 failed" in child.text()


def test_no_server_at_the_start(checkpoint: Callable[..., str], endpoint: str) -> None:
    """The early look finds none, before any worker is started."""
    env = {**UNBOUND, **attention_env(endpoint), "AFD_CONNECT_TIMEOUT": "1"}
    child = Child(build, checkpoint("qwen3_moe"), env=env, tensor_parallel_size=2)
    kind, message = child.outcome()
    assert kind == "exit"
    assert "no FFN server answered" in message


def test_a_lost_follower_ends_the_role(checkpoint: Callable[..., str], endpoint: str) -> None:
    """It stops in the middle of a call, so rank 0 waits for it inside of a collective; then it is gone."""
    model = checkpoint("qwen3_moe")
    server = Child(ffn_server, model, endpoint, env=UNBOUND, tensor_parallel_size=2)
    try:
        server.wait_for("AFD ffn: ready:")
        (follower,) = followers(server)
        follower.suspend()
        env = {**UNBOUND, **attention_env(endpoint), "AFD_CALL_TIMEOUT": "4"}
        attention = Child(generate, model, env=env)
        attention.wait_for("AFD attention: vLLM")
        time.sleep(1)
        follower.kill()
        kind, message = server.outcome(30)
        assert kind in ("died", "error")
        assert "tensor-parallel rank 1 of the FFN role ended (exit status -9)" in message
        assert not Path(endpoint.removeprefix("unix:")).exists()
        kind, message = attention.outcome(60)
        assert kind == "error"
        assert "answered within 4 s" in message
    finally:
        server.kill()


def failing_server(model: str, endpoint: str, **engine: Any) -> None:
    """The native FFN of layer 2 raises on rank 0, at its third call."""
    from afd_patch.ffn.runner import FFNRunner

    native, calls = FFNRunner.compute_ffn_output, []

    def compute(self: Any, layer: int, rows: Any) -> Any:
        calls.append(layer)
        if calls.count(2) == 3:
            raise ValueError("no such rows")
        return native(self, layer, rows)

    FFNRunner.compute_ffn_output = compute  # type: ignore[method-assign]
    ffn_server(model, endpoint, **engine)


def test_an_error_on_rank_0_ends_the_role(checkpoint: Callable[..., str], endpoint: str) -> None:
    model = checkpoint("qwen3_moe")
    server = Child(failing_server, model, endpoint, env=UNBOUND, tensor_parallel_size=2)
    try:
        attention = Child(generate, model, env={**UNBOUND, **attention_env(endpoint)})
        kind, message = attention.outcome(60)
        assert kind == "error"
        assert "layer 2: ValueError: no such rows" in message
        kind, message = server.outcome(30)
        assert kind == "error"
        assert message.startswith("RankLost: tensor-parallel rank 0 of the FFN role failed in layer 2")
    finally:
        server.kill()


def refusals_of_partial_results() -> list[str]:
    """What is said about FFNs that leave the sum over the ranks to somebody else, in each way that vLLM knows."""
    from types import SimpleNamespace

    from torch import nn

    from afd_patch.errors import UnsupportedError
    from afd_patch.patches.model_build import ModelBuild

    class Part(nn.Module):
        def __init__(self, **attributes: Any) -> None:
            super().__init__()
            vars(self).update(attributes)

    dense, experts, sequence_parallel, complete = (nn.Module() for _ in range(4))
    dense.down_proj = Part(reduce_results=False)
    experts.experts = Part(moe_config=SimpleNamespace(skip_final_all_reduce=True))
    sequence_parallel.experts = Part(is_sequence_parallel=True)
    complete.shared_expert = nn.Module()
    complete.shared_expert.down_proj = Part(reduce_results=False)  # added up with the routed experts
    complete.experts = Part(moe_config=SimpleNamespace(skip_final_all_reduce=False), is_sequence_parallel=False)
    build = object.__new__(ModelBuild)
    said = []
    for ranks, module in ((2, dense), (2, experts), (2, sequence_parallel), (2, complete), (1, dense)):
        build.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=ranks))
        try:
            build._require_complete_result(module, 3)
            said.append("")
        except UnsupportedError as error:
            said.append(str(error))
    return said


def test_partial_results_are_refused() -> None:
    """Some native layers leave the sum over the ranks to the next norm, which would add up a complete result again."""
    said = Child(refusals_of_partial_results).result()
    assert [bool(text) for text in said] == [True, True, True, False, False]
    assert all("leaves the sum over the tensor-parallel ranks to what follows it" in text for text in said[:3])


def attention_env(endpoint: str) -> dict[str, str]:
    return {"AFD_ROLE": "attention", "AFD_FFN": endpoint, "AFD_CONNECT_TIMEOUT": "120"}


def followers(server: Child) -> list[psutil.Process]:
    """The other ranks of an FFN server; Python's resource tracker is its child too."""
    children = psutil.Process(server.pid).children()
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def ended(process: psutil.Process, timeout: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False
