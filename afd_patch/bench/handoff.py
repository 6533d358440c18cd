"""The cost of one hand-off: rows of one layer to the FFN process and back, with an FFN that computes nothing.

Four contenders move the same bytes between the same two sets of cores, in turns of a few calls, so that whatever else
the machine does hits all of them: a bare blocking socket echo, shared memory with active waiting, the connector
alone, and the op as a decoder layer of vLLM calls it.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from afd_patch.bench import floors
from afd_patch.bench.report import core_set, divide, percentile, table
from afd_patch.errors import ConfigError
from afd_patch.hosting import free_port

TAKES_VLLM_FLAGS = False
BLOCKING, ACTIVE, CONNECTOR, OP = "blocking floor", "active floor", "connector", "op"
ROWS = (1, 8, 32, 256, 2048)
#: The bars: at up to this many rows, connector / blocking floor, and microseconds of the op above it (p50).
BAR_ROWS, CONNECTOR_BAR, OP_BAR_US = 32, 1.5, 50.0
_WARM_UP = 20


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), metavar="N,N", help="rows of a call (%(default)s)")
    parser.add_argument("--hidden", type=int, default=2048, help="elements of a row, bf16 (%(default)s)")
    parser.add_argument("--transports", default="unix,tcp", help="unix, tcp or both (%(default)s)")
    parser.add_argument("--cores", metavar="A,B", help="cores of the two sides (default: a half each)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of every contender (%(default)s)")
    parser.add_argument("--calls", type=int, default=50, help="calls in a turn; fewer of large ones (%(default)s)")
    parser.add_argument("--spin-us", type=int, help="active waiting of both sides (default: the product's)")
    parser.add_argument("--busy", action="store_true", help="keep all cores busy with other processes meanwhile")
    parser.add_argument("--no-op", action="store_true", help="leave out the op, which needs vLLM")


def run(options: argparse.Namespace, _: object = None) -> dict[str, Any]:
    """Measure; returns microseconds by transport, rows and contender."""
    rows = _numbers("--rows", options.rows)
    kinds = options.transports.split(",")
    if not set(kinds) <= {"unix", "tcp"}:
        raise ConfigError(f"--transports {options.transports!r} is not a list of unix and tcp")
    if min(options.rounds, options.calls, options.hidden) < 1:
        raise ConfigError("--rounds, --calls and --hidden must be at least 1")
    ours, theirs = divide(options.cores)
    spin_us = options.spin_us if options.spin_us is not None else _default_spin()
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if options.busy:
            for core in sorted(core_set(ours) | core_set(theirs)):
                stack.enter_context(_process(_burn, str(core)))
        for kind in kinds:
            results += _measure(kind, rows, options, ours, theirs, spin_us)
    return {
        "cores": {"attention": ours, "ffn": theirs},
        "hidden": options.hidden,
        "dtype": "bfloat16",
        "spin_us": spin_us,
        "busy": options.busy,
        "bars": {"rows": BAR_ROWS, "connector_ratio": CONNECTOR_BAR, "op_extra_us": OP_BAR_US},
        "results": results,
    }


def _measure(
    kind: str, rows: list[int], options: argparse.Namespace, ours: str, theirs: str, spin_us: int
) -> list[dict[str, Any]]:
    limit = max(rows) * options.hidden * 2
    shared = floors.SharedFloor(limit)
    near, far = floors.connected(kind)
    with ExitStack() as stack:
        # Forked before this process imports vLLM, and each on the cores of the FFN side.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="afd-bench-"))
        endpoint = _endpoint(kind, Path(folder))
        stack.enter_context(_process(_echo, near, far, theirs, limit))
        stack.callback(near.close)
        stack.enter_context(_process(shared.mirror, theirs))
        stack.callback(shared.end)
        stack.enter_context(_process(_serve, endpoint, theirs, options.hidden, max(rows), spin_us))
        far.close()
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        os.sched_setaffinity(0, core_set(ours))
        from afd_patch.bench import handoff_calls

        caller = stack.enter_context(
            handoff_calls.Caller(endpoint, options.hidden, max(rows), spin_us, ours, op=not options.no_op)
        )
        results = []
        for count in rows:
            size = count * options.hidden * 2
            contenders: dict[str, Callable[[], None]] = {
                BLOCKING: floors.socket_floor(near, size),
                ACTIVE: shared.call(size),
                CONNECTOR: caller.connector_call(count),
            }
            if not options.no_op:
                contenders[OP] = caller.op_call(count)
            calls = max(5, min(options.calls, options.calls * (256 << 10) // size))
            times = _take_turns(contenders, shared, options.rounds, calls)
            results.append(_summary(kind, count, size, times))
    return results


def _take_turns(
    contenders: dict[str, Callable[[], None]], shared: floors.SharedFloor, rounds: int, calls: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                call = contenders[name]
                if name == ACTIVE:
                    shared.wake()
                for _ in range(min(calls, _WARM_UP) if turn == 0 else 2):
                    call()
                if turn:  # the first turn only warms up
                    for _ in range(calls):
                        begin = time.perf_counter_ns()
                        call()
                        times[name].append((time.perf_counter_ns() - begin) / 1e3)
                if name == ACTIVE:
                    shared.rest()
    finally:
        gc.enable()
    return times


def _summary(kind: str, rows: int, size: int, times: dict[str, list[float]]) -> dict[str, Any]:
    us = {
        name: {"p50": round(percentile(values, 50), 2), "p99": round(percentile(values, 99), 2), "calls": len(values)}
        for name, values in times.items()
    }
    floor = us[BLOCKING]["p50"]
    entry: dict[str, Any] = {"transport": kind, "rows": rows, "bytes_each_way": size, "us": us}
    entry["ratio_to_blocking"] = {name: round(value["p50"] / floor, 2) for name, value in us.items()}
    if rows <= BAR_ROWS:
        entry["connector_bar_met"] = us[CONNECTOR]["p50"] <= CONNECTOR_BAR * floor
        if OP in us:
            entry["op_bar_met"] = us[OP]["p50"] <= floor + OP_BAR_US
    return entry


def print_report(results: dict[str, Any]) -> None:
    names = list(results["results"][0]["us"])
    head = ["", *(f"{name} p50 / p99" for name in names), "ratios to blocking", "bars"]
    lines = []
    for entry in results["results"]:
        us = entry["us"]
        bars = [entry[key] for key in ("connector_bar_met", "op_bar_met") if key in entry]
        lines.append(
            [
                f"{entry['transport']} {entry['rows']} rows ({entry['bytes_each_way'] >> 10} KiB)",
                *(f"{us[name]['p50']:.1f} / {us[name]['p99']:.1f}" for name in names),
                " ".join(f"{entry['ratio_to_blocking'][name]:.2f}" for name in names[1:]),
                "-" if not bars else "met" if all(bars) else "missed",
            ]
        )
    print(f"one hand-off, microseconds; hidden {results['hidden']}, bf16, {results['spin_us']} us of active waiting")
    print(table(head, lines))


# -- the processes ----------------------------------------------------------------------------------------------------


@contextmanager
def _process(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """``target`` in a fork while the block lasts; whatever ends it comes before."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.join(0.5)
        process.kill()
        process.join()


def _echo(near: Any, far: Any, cores: str, limit: int) -> None:
    near.close()
    floors.echo(far, cores, limit)


def _burn(core: str) -> None:
    os.sched_setaffinity(0, core_set(core))
    while True:
        pass


def _serve(endpoint: str, cores: str, hidden: int, rows: int, spin_us: int) -> None:
    os.sched_setaffinity(0, core_set(cores))
    from afd_patch.bench import handoff_calls

    handoff_calls.serve_identity(endpoint, hidden, rows, spin_us, cores)


def _endpoint(kind: str, folder: Path) -> str:
    return f"unix:{folder}/ffn.sock" if kind == "unix" else f"tcp://127.0.0.1:{free_port()}"


def _default_spin() -> int:
    from afd_patch.config import AFDConfig

    return AFDConfig.spin_us


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{flag} {text!r} is not a list of positive numbers like 1,8,32")
    return numbers
