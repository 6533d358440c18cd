"""The command line: ``python -m afd_patch.tiny ARCH DIR``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from . import ARCHITECTURES, make


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (2 for a wrong argument or a missing input)."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.list:
        width = max(map(len, ARCHITECTURES))
        for architecture in ARCHITECTURES.values():
            print(f"{architecture.name:{width}}  {architecture.about}")
        return 0
    if arguments.arch is None or arguments.dir is None:
        parser.error("name an architecture and a directory, or pass --list to see the architectures")
    try:
        target = make(
            arguments.arch,
            arguments.dir,
            shards=arguments.shards,
            seed=arguments.seed,
            force=arguments.force,
            gguf=arguments.gguf,
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in Path(target).iterdir())
    print(f"{target}: {arguments.arch}, {size / 1e6:.1f} MB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afd_patch.tiny",
        description="Write a small checkpoint (config, safetensors, tokenizer with chat template) to try AFD on.",
    )
    parser.add_argument("arch", metavar="ARCH", nargs="?", help="the architecture; --list shows all")
    parser.add_argument("dir", metavar="DIR", nargs="?", help="the directory to write")
    parser.add_argument("--list", action="store_true", help="show the architectures and exit")
    parser.add_argument("--shards", type=int, default=1, metavar="N", help="number of weight files (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default: 0)")
    parser.add_argument("--force", action="store_true", help="replace the checkpoint that DIR already holds")
    parser.add_argument("--gguf", metavar="FILE", help="GGUF file for smollm2 and smollm2-moe")
    return parser


if __name__ == "__main__":
    sys.exit(main())
