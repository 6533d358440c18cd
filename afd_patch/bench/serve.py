"""Tokens per second of stock vLLM and of AFD, on the same cores, in one run, in turns.

Stock vLLM runs with several settings of its compute threads; the best one of each workload is what AFD is compared
with. AFD has one half of the cores for attention, the other for the FFN. All engines exist at the same time and stand
still (SIGSTOP) while it is not their turn. Both sides use offline ``LLM`` with vLLM's own processes, as ``vllm serve``
has them; ``--in-process`` puts the engine of both sides into one process. Unknown flags go to all engines.
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
from afd_patch.serve.launcher import READY

TAKES_VLLM_FLAGS = True
#: Name, batch, tokens of a prompt, new tokens, whether prompt tokens are what is counted.
WORKLOADS = (
    ("decode 1", 1, 32, 64, False),
    ("decode 8", 8, 32, 64, False),
    ("decode 32", 32, 32, 64, False),
    ("prefill 8x256", 8, 256, 1, True),
)
AFD = "AFD"
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
        split = _split(str(model), flags, ours, theirs, folder, options)
        stack.callback(split.close)
        split.wait_ready()
        if any(engine.patches for engine in engines) or not split.patches:
            raise ConfigError("the comparison itself is wrong: a stock engine is patched, or the AFD engine is not")
        rates = _take_turns([*engines, split], workloads, options.rounds)
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


def _bindings(ours: str, theirs: str) -> list[str]:
    everything = ours if ours == theirs else f"{ours},{theirs}"
    return list(dict.fromkeys([ours, everything, "auto"]))


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
    model: str, flags: Sequence[str], ours: str, theirs: str, folder: Path, options: argparse.Namespace
) -> Engine:
    endpoint = f"unix:{folder}/ffn.sock"
    own = environment(VLLM_CPU_OMP_THREADS_BIND=theirs)
    if options.spin_us is not None:
        own["AFD_SPIN_US"] = str(options.spin_us)
    command = ["afd_patch.serve", model, "--role", "ffn", "--listen", endpoint, *flags[2:]]
    server = Group("the FFN server", command, own, folder / "ffn.log")
    try:
        server.wait_for(READY)
        env = _environment(ours, options, AFD_ROLE="attention", AFD_FFN=endpoint, AFD_CONNECT_TIMEOUT="600")
        return Engine(AFD, flags, env, folder / "attention.log", [server])
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
    best = max((engine for engine in medians if engine != AFD), key=lambda engine: medians[engine])
    return {
        "workload": name,
        "counted": "prompt tokens" if prompts else "new tokens",
        "tokens_per_second": medians,
        "all_rounds": {engine: [round(value, 1) for value in values] for engine, values in rates.items()},
        "best_stock": best,
        "afd_to_best_stock": round(medians[AFD] / medians[best], 2),
    }


def print_report(results: dict[str, Any]) -> None:
    engines = list(results["results"][0]["tokens_per_second"])
    rows = [
        [
            entry["workload"], *(f"{entry['tokens_per_second'][engine]:.1f}" for engine in engines),
            f"{entry['afd_to_best_stock']:.2f}",
        ]
        for entry in results["results"]
    ]  # fmt: skip
    print(
        f"tokens per second, medians of {results['rounds']} rounds; {results['parameters'] / 1e6:.0f} M parameters, "
        f"engine: {results['engine']}, cores of this process: {len(os.sched_getaffinity(0))}"
    )
    print(table(["", *engines, "AFD / best stock"], rows))
