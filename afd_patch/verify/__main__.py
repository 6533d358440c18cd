"""The command: runs both sides one after the other and compares what they said."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from afd_patch.config import GATES
from afd_patch.errors import AFDError, ConfigError
from afd_patch.serve.child import ChildProcess
from afd_patch.serve.flags import check_model
from afd_patch.serve.launcher import READY
from afd_patch.serve.roles import tensor_parallel_size

DESCRIPTION = """\
Run the same prompts on stock vLLM and through AFD and compare tokens and logprobs. Exit status 0: no token differs and
the largest absolute logprob error is 0.0. 1: they differ. 2: one side could not run. Other flags are vLLM's engine
flags, and go to both sides."""


@dataclass
class Report:
    """What was compared, and how it differs."""

    model: str
    tokens: int
    mismatching_tokens: int
    largest_logprob_error: float
    remote_calls: int
    #: Those that hand over rows.
    layers: int
    stock_seconds: float
    afd_seconds: float

    @property
    def exact(self) -> bool:
        """Equal, and really computed by an FFN server."""
        return (
            self.tokens > 0
            and self.mismatching_tokens == 0
            and self.largest_logprob_error == 0.0
            and self.layers > 0
            and self.remote_calls > 0
            and self.remote_calls % self.layers == 0
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m afd_patch.verify",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--gate", choices=GATES, default=GATES[0], help="where the router runs (AFD_GATE)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    # An orderly end also when asked to stop: temporary files and the FFN server go away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options, flags = parser.parse_known_args(arguments)
    try:
        check_model(options.model)
        report = verify(options.model, flags, gate=options.gate, quiet=options.json)
    except AFDError as error:
        print(f"afd_patch: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({**asdict(report), "exact": report.exact}))
    else:
        print_report(report)
    return 0 if report.exact else 1


def verify(model: str, flags: Sequence[str], *, gate: str = GATES[0], quiet: bool = True) -> Report:
    """Run both sides; raises ``ConfigError`` with the last lines of a side that could not run."""
    ranks = tensor_parallel_size(flags)
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2 // ranks))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AFD_")}
    # The number of threads changes the last bits of a matrix product. Numba (ngram speculation) sets that of OpenMP.
    environment |= {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
    if ranks > 1:  # by default vLLM binds ranks to NUMA nodes, and refuses where there are fewer of them
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with tempfile.TemporaryDirectory(prefix="afd-verify-") as folder:
        run = [sys.executable, "-m", "afd_patch.verify.run"]
        engine = ["--model", model, *flags]
        started = time.monotonic()
        _say(quiet, f"stock vLLM: running {model}")
        stock = _finish("stock vLLM", [*run, f"{folder}/stock.json", *engine], environment, Path(folder, "stock.json"))
        between = time.monotonic()
        _say(quiet, f"AFD: running it again, split in two ({between - started:.0f} s so far)")
        endpoint = f"unix:{folder}/ffn.sock"
        command = [sys.executable, "-m", "afd_patch.serve", model, "--role", "ffn", "--listen", endpoint]
        command += ["--gate", gate, *flags]
        server = ChildProcess("ffn", command, environment, marker=READY, echo=False)
        try:
            split = {**environment, "AFD_ROLE": "attention", "AFD_FFN": endpoint, "AFD_CONNECT_TIMEOUT": "1800"}
            split["AFD_GATE"] = gate
            afd = _finish(
                "attention role", [*run, f"{folder}/afd.json", *engine], split, Path(folder, "afd.json"), server
            )
        finally:
            server.terminate(10.0)
    if stock["role"] is not None or afd["role"] != "attention":
        raise ConfigError(f"the comparison itself is wrong: roles {stock['role']!r} and {afd['role']!r}")
    tokens, mismatching, error = compare(stock["answers"], afd["answers"])
    return Report(
        model,
        tokens,
        mismatching,
        error,
        afd["remote_calls"],
        afd["layers"],
        between - started,
        time.monotonic() - between,
    )


def _finish(
    name: str, command: list[str], environment: dict[str, str], result: Path, server: ChildProcess | None = None
) -> Any:
    child = ChildProcess(name, command, environment, echo=False)
    try:
        while child.status is None:
            if server is not None and server.status is not None:
                raise ConfigError(f"the FFN server ended with status {server.status}:\n" + _tail(server))
            time.sleep(0.1)
    finally:
        child.terminate(10.0)
    if child.status != 0 or not result.exists():
        raise ConfigError(f"{name} ended with status {child.status}:\n" + _tail(child))
    return json.loads(result.read_text())


def _tail(child: ChildProcess) -> str:
    child.join_output()
    return "\n".join(f"  {line}" for line in child.last_lines)


def compare(stock: list[Any], afd: list[Any]) -> tuple[int, int, float]:
    """Number of tokens, number of mismatching ones, and the largest absolute logprob error.

    A token that only one side lists among its logprobs is an infinite error.
    """
    tokens = mismatching = 0
    error = 0.0
    for ours, theirs in zip(_outputs(stock), _outputs(afd), strict=True):
        tokens += max(len(ours["tokens"]), len(theirs["tokens"]))
        mismatching += abs(len(ours["tokens"]) - len(theirs["tokens"]))
        mismatching += sum(a != b for a, b in zip(ours["tokens"], theirs["tokens"], strict=False))
        for a, b in zip(ours["logprobs"], theirs["logprobs"], strict=False):
            error = max([error, *(abs(a.get(t, math.inf) - b.get(t, -math.inf)) for t in a.keys() | b.keys())])
    return tokens, mismatching, error


def _outputs(answers: list[Any]) -> list[Any]:
    return [output for part in answers for output in part["outputs"]]


def print_report(report: Report) -> None:
    print(f"compared {report.tokens} tokens of {report.model}")
    print(f"  stock vLLM              {report.stock_seconds:6.0f} s, start included")
    print(
        f"  AFD                     {report.afd_seconds:6.0f} s, start included; {report.remote_calls} calls to the "
        f"FFN server = {report.layers} layers x {report.remote_calls / report.layers:g} forwards"
    )
    print(f"  mismatching tokens      {report.mismatching_tokens}")
    print(f"  largest logprob error   {report.largest_logprob_error}")
    print("exact" if report.exact else "NOT exact")


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
