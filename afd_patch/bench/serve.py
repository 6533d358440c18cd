"""Tokens per second of stock vLLM and of AFD, on the same cores, in one run, in turns.

Stock vLLM runs with several settings of its compute threads; the best one of each workload is what AFD is compared
with. AFD runs twice, as the launcher starts it: with one half of the cores for attention and the other for the FFN, and
with all of them for both (``--share-cores``). All engines exist at the same time and stand still (SIGSTOP) while it is
not their turn. All use offline ``LLM`` with vLLM's own processes, as ``vllm serve`` has them; ``--in-process`` puts
each engine into one process. Unknown flags go to all engines.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from afd_patch.bench.models import checkpoint, parameters
from afd_patch.bench.processes import Engine, Group, environment
from afd_patch.bench.report import divide, median, table
from afd_patch.errors import ConfigError
from afd_patch.serve.launcher import READY, WAITING

TAKES_VLLM_FLAGS = True
#: Name, batch, tokens of a prompt, new tokens, whether prompt tokens are what is counted.
WORKLOADS = (
    ("decode 1", 1, 32, 64, False),
    ("decode 8", 8, 32, 64, False),
    ("decode 32", 32, 32, 64, False),
    ("prefill 8x256", 8, 256, 1, True),
)
#: How AFD has the cores.
DIVIDED, SHARED = "AFD, cores divided", "AFD, cores shared"
_MODEL_FLAGS = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "512M", "--no-enable-prefix-caching")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a folder (default: a new qwen3_moe_231m)")
    parser.add_argument("--cores", metavar="A,B", help="cores of attention and FFN (default: a half each)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every engine and workload (%(default)s)")
    parser.add_argument("--only", metavar="TEXT", default="", help="workloads whose name contains TEXT")
    parser.add_argument("--stock", metavar="BINDING", action="append", help="a setting of VLLM_CPU_OMP_THREADS_BIND to "
                        "try; repeatable (default: half of the cores, all of them, auto)")  # fmt: skip
    parser.add_argument("--in-process", action="store_true", help="the engine in one process, on both sides")
    parser.add_argument("--spin-us", type=int, help="AFD_SPIN_US of both roles (default: the product's)")


def run(options: argparse.Namespace, vllm_flags: Sequence[str]) -> dict[str, Any]:
    """Measure; returns tokens per second by workload and engine."""
    workloads = [workload for workload in WORKLOADS if options.only in workload[0]]
    if not workloads or options.rounds < 1:
        raise ConfigError(f"no workload has {options.only!r} in its name" if not workloads else "--rounds must be >= 1")
    ours, theirs = divide(options.cores)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="afd-bench-")))
        model = checkpoint(options.model, folder, "qwen3_moe_231m")
        flags = ["--model", str(model), *_MODEL_FLAGS, *vllm_flags]
        engines = []
        for binding in options.stock or _bindings(ours, theirs):
            engine = _stock(binding, flags, folder, options)
            stack.callback(engine.close)
            engine.wait_ready()  # one start at a time: each takes all cores
            engines.append(engine)
        for name, cores in ((DIVIDED, (ours, theirs)), (SHARED, (_union(ours, theirs),) * 2)):
            engine = _split(name, str(model), flags, cores, folder, options)
            stack.callback(engine.close)
            engine.wait_ready()
            engines.append(engine)
        if any(bool(engine.patches) != is_split(engine.name) for engine in engines):
            raise ConfigError("the comparison itself is wrong: a stock engine is patched, or an AFD engine is not")
        rates = _take_turns(engines, workloads, options.rounds)
        count = parameters(model)
    return {
        "model": options.model or "qwen3_moe_231m",
        "parameters": count,
        "engine_flags": [*_MODEL_FLAGS, *vllm_flags],
        "engine": "in process" if options.in_process else "processes",
        "cores": {"attention": ours, "ffn": theirs},
        "rounds": options.rounds,
        "results": [_summary(name, rates[name], prompts) for name, _, _, _, prompts in workloads],
    }


def is_split(name: str) -> bool:
    """Whether the engine ``name`` is AFD."""
    return name in (DIVIDED, SHARED)


def _union(ours: str, theirs: str) -> str:
    return ours if ours == theirs else f"{ours},{theirs}"


def _bindings(ours: str, theirs: str) -> list[str]:
    return list(dict.fromkeys([ours, _union(ours, theirs), "auto"]))


def _environment(binding: str, options: argparse.Namespace, **settings: str) -> dict[str, str]:
    if options.spin_us is not None and settings:
        settings["AFD_SPIN_US"] = str(options.spin_us)
    return environment(
        VLLM_CPU_OMP_THREADS_BIND=binding,
        VLLM_ENABLE_V1_MULTIPROCESSING="0" if options.in_process else "1",
        # An engine that is stopped in the middle of its last, empty step must not take that for a dead worker.
        VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="86400",
        **settings,
    )


def _stock(binding: str, flags: Sequence[str], folder: Path, options: argparse.Namespace) -> Engine:
    name = f"stock, threads on {binding}"
    return Engine(name, flags, _environment(binding, options), folder / f"stock-{binding}.log")


def _split(
    name: str, model: str, flags: Sequence[str], cores: tuple[str, str], folder: Path, options: argparse.Namespace
) -> Engine:
    place = f"{folder}/{name.rpartition(' ')[2]}"
    endpoint, waiting = f"unix:{place}.sock", WAITING if name == SHARED else {}
    own = environment(VLLM_CPU_OMP_THREADS_BIND=cores[1], **waiting)
    if options.spin_us is not None:
        own["AFD_SPIN_US"] = str(options.spin_us)
    command = ["afd_patch.serve", model, "--role", "ffn", "--listen", endpoint, *flags[2:]]
    server = Group("the FFN server", command, own, Path(f"{place}-ffn.log"))
    try:
        server.wait_for(READY)
        settings = {"AFD_ROLE": "attention", "AFD_FFN": endpoint, "AFD_CONNECT_TIMEOUT": "600", **waiting}
        return Engine(name, flags, _environment(cores[0], options, **settings), Path(f"{place}.log"), [server])
    except BaseException:
        server.kill()
        raise


def _take_turns(
    engines: Sequence[Engine], workloads: Sequence[tuple[str, int, int, int, bool]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    rates: dict[str, dict[str, list[float]]] = {}
    for name, batch, prompt, new, prompts in workloads:
        mine = rates[name] = {engine.name: [] for engine in engines}
        for turn in range(rounds + 1):
            first = turn % len(engines)
            for engine in [*engines[first:], *engines[:first]]:
                few = new if turn else min(new, 4)  # the first turn only warms up
                answer = engine.ask(batch=batch, prompt=prompt, new=few, seed=1000 * batch + turn)
                if answer["generated"] != batch * few:
                    raise ConfigError(f"{engine.name} generated {answer['generated']} tokens instead of {batch * few}")
                if turn:
                    mine[engine.name].append(batch * (prompt if prompts else new) / answer["seconds"])
    return rates


def _summary(name: str, rates: dict[str, list[float]], prompts: bool) -> dict[str, Any]:
    medians = {engine: round(median(values), 1) for engine, values in rates.items()}
    best = max((engine for engine in medians if not is_split(engine)), key=lambda engine: medians[engine])
    return {
        "workload": name,
        "counted": "prompt tokens" if prompts else "new tokens",
        "tokens_per_second": medians,
        "all_rounds": {engine: [round(value, 1) for value in values] for engine, values in rates.items()},
        "best_stock": best,
        "to_best_stock": {engine: round(medians[engine] / medians[best], 2) for engine in medians if is_split(engine)},
    }


def print_report(results: dict[str, Any]) -> None:
    engines = list(results["results"][0]["tokens_per_second"])
    rows = [
        [
            entry["workload"], *(f"{entry['tokens_per_second'][engine]:.1f}" for engine in engines),
            *(f"{ratio:.2f}" for ratio in entry["to_best_stock"].values()),
        ]
        for entry in results["results"]
    ]  # fmt: skip
    print(
        f"tokens per second, medians of {results['rounds']} rounds; {results['parameters'] / 1e6:.0f} M parameters, "
        f"engine: {results['engine']}, cores of this process: {len(os.sched_getaffinity(0))}"
    )
    print(table(["", *engines, "divided / best stock", "shared / best stock"], rows))
