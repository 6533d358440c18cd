"""The command line: ``python -m afd_patch.doctor [MODEL]``. Exit status 0: sound. 1: problems. 2: wrong usage."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from afd_patch.doctor.examine import Request, examine
from afd_patch.errors import ConfigError

DESCRIPTION = """\
Says whether this installation can run the roles of afd_patch, and with MODEL, whether that model can be split.

It looks at every patch point in vLLM's source, at other plugins in a running vLLM, at the environment, at the FFN
servers, and at the model's files. No model is loaded. Exit status 0: sound; 1: problems found; 2: wrong usage."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    started = time.monotonic()
    parser = _parser()
    flags = parser.parse_args(arguments)
    if flags.explain and flags.model is None:
        parser.error("--explain needs MODEL: a folder, or the name of an architecture")
    if flags.limit < 0:
        parser.error("--limit is a number of seconds; 0 turns the import of vLLM off")
    request = Request(
        model=flags.model,
        vllm_tree=flags.vllm_tree,
        explain=flags.explain,
        ffn=tuple(part for text in flags.ffn for part in text.split(",") if part.strip()),
        limit=flags.limit,
        trust_remote_code=flags.trust_remote_code,
        environ=dict(os.environ),
    )
    try:
        report = examine(request)
    except ConfigError as error:
        print(f"afd_patch.doctor: {error}", file=sys.stderr)
        return 2
    if flags.json:
        print(json.dumps(report.to_json(time.monotonic() - started), indent=2))
    else:
        print(report.render(flags.verbose))
    return report.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afd_patch.doctor",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a model folder, a fetched model of the hub, or an architecture"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--verbose", action="store_true", help="one line for everything that is in order, too")
    parser.add_argument(
        "--vllm-tree",
        metavar="DIR",
        type=Path,
        help="look at this vLLM (a source tree or a wheel) without importing it",
    )
    parser.add_argument("--explain", action="store_true", help="print what MODEL's boundary table would look like")
    parser.add_argument(
        "--ffn", metavar="ENDPOINT", action="append", default=[], help="ask this FFN server; repeatable (AFD_FFN)"
    )
    parser.add_argument(
        "--limit", metavar="SECONDS", type=float, default=11.0,
        help="time for importing vLLM in a subprocess (default 11; 0 leaves it out)",
    )  # fmt: skip
    parser.add_argument("--trust-remote-code", action="store_true", help="as for vllm serve")
    return parser


if __name__ == "__main__":
    sys.exit(main())
