"""The command: one sub-command per question, each with ``--json FILE`` and ``--plot FILE``."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afd_patch.bench import report
from afd_patch.errors import AFDError

#: Sub-commands and the modules that have ``add_flags``, ``run`` and ``print_report``; none is imported needlessly.
SUBCOMMANDS = {
    "handoff": "the cost of one hand-off, next to the floors of this machine",
    "serve": "tokens per second of stock vLLM and of AFD on the same cores",
    "load": "bytes that each role reads and keeps, against the bytes that it owns",
    "chaos": "what requests notice while the FFN server is killed, stopped and garbled",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 ``chaos`` did not pass, 2 it could not run."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m afd_patch.bench", description=__doc__, allow_abbrev=False)
    choices = parser.add_subparsers(metavar="SUB", required=True, dest="sub")
    modules: dict[str, Any] = {}
    for name, about in SUBCOMMANDS.items():
        modules[name] = importlib.import_module(f"afd_patch.bench.{name}")
        sub = choices.add_parser(name, help=about, description=modules[name].__doc__, allow_abbrev=False)
        modules[name].add_flags(sub)
        sub.add_argument("--json", metavar="FILE", type=Path, help="write the results there")
        sub.add_argument("--plot", metavar="FILE", type=Path, help="draw them there (PNG; needs matplotlib)")
    options, rest = parser.parse_known_args(given)
    if rest and not modules[options.sub].TAKES_VLLM_FLAGS:
        parser.error(f"unknown flags for {options.sub}: {' '.join(rest)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an orderly end: nothing stays running
    try:
        report.check_outputs(options.json, options.plot)
        results = modules[options.sub].run(options, rest)
        modules[options.sub].print_report(results)
        content = report.complete(options.sub, given, results)
        if options.json:
            report.write_json(options.json, content)
        if options.plot:
            plots = importlib.import_module("afd_patch.bench.plots")
            plots.draw(content, options.plot)
    except AFDError as error:
        print(f"afd_patch: {error}", file=sys.stderr)
        return 2
    return 0 if results.get("passed", True) else 1


if __name__ == "__main__":
    sys.exit(main())
