"""How each role is started: the FFN server in this process, stock vLLM's OpenAI server as a command."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import os
import sys
from collections.abc import Sequence
from contextlib import closing

from afd_patch.config import PLUGIN_NAME, AFDConfig
from afd_patch.errors import ConfigError, UnsupportedError
from afd_patch.ffn.listener import Listener
from afd_patch.ffn.ranks import Cores

#: Rows of one call that an FFN server takes, unless --max-num-batched-tokens says otherwise: more than any default of
#: an attention process, so that the two need not be told about each other.
FFN_MAX_ROWS = 16384


def run_ffn_role(config: AFDConfig, model: str, vllm_flags: Sequence[str]) -> None:
    """Serve the FFN of ``model`` in this process until SIGTERM; ``vllm_flags`` are those of ``vllm serve``."""
    assert config.listen is not None
    cores = cores_of_ranks(os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto"), tensor_parallel_size(vllm_flags))
    if cores is not None:
        bind_cores(cores[0])
    with closing(Listener(config.listen)) as listener:  # an endpoint that is taken is known at once
        _load_and_serve(config, listener, model, vllm_flags, cores)


def _load_and_serve(
    config: AFDConfig, listener: Listener, model: str, vllm_flags: Sequence[str], cores: Cores | None
) -> None:
    # The native worker runs in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.engine.arg_utils import EngineArgs

    from afd_patch.ffn.main import serve

    engine = EngineArgs.from_cli_args(serve_parser().parse_args(["--model", model, *vllm_flags]))
    if engine.max_num_batched_tokens is None:
        engine.max_num_batched_tokens = FFN_MAX_ROWS
    if cores is not None and len(cores) != engine.tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size {engine.tensor_parallel_size} comes from a file, so the cores cannot be divided "
            "between the ranks; give it as a flag"
        )
    serve(config, listener, engine, cores)


def require_entry_point() -> None:
    """Raise ``ConfigError`` where vLLM's processes would not find afd_patch: they would silently run natively."""
    if not any(point.name == PLUGIN_NAME for point in importlib.metadata.entry_points(group="vllm.general_plugins")):
        raise ConfigError(
            "afd_patch can be imported but is not installed, so vLLM's processes would not find its entry point; "
            "install it (pip install afd-patch, or pip install -e . in its folder)"
        )


def serve_parser() -> argparse.ArgumentParser:
    """vLLM's own parser of the flags of ``vllm serve``; its module moved after 0.31."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name in ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        parser: argparse.ArgumentParser = module.make_arg_parser(FlexibleArgumentParser())
        return parser
    raise UnsupportedError("this vLLM has its command line parser in a place that afd_patch does not know")


def attention_command(model: str, vllm_flags: Sequence[str]) -> list[str]:
    """The command line of stock vLLM's OpenAI server."""
    require_entry_point()
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # ``vllm serve`` looks up the version of a distribution called vllm; the CPU build has another name.
        return [
            sys.executable,
            "-W",
            "ignore::DeprecationWarning",
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            model,
            *vllm_flags,
        ]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *vllm_flags]


def on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build; asks the installed distributions, not vLLM."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version
    return False


def tensor_parallel_size(vllm_flags: Sequence[str]) -> int:
    """The number of ranks that the flags of ``vllm serve`` ask for; raises ``ConfigError``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tensor-parallel-size", "--tensor_parallel_size", "-tp", type=int, default=1)
    try:
        size = int(parser.parse_known_args(vllm_flags)[0].tensor_parallel_size)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if size < 1:
        raise ConfigError(f"--tensor-parallel-size {size} must be at least 1")
    return size


def cores_of_ranks(binding: str, ranks: int) -> list[set[int]] | None:
    """The cores of each rank of an FFN server, as ``VLLM_CPU_OMP_THREADS_BIND`` says; ``None``: all, for each.

    The ranks are separated by ``|``. With ``auto``, several ranks share the cores out, because their collectives wait
    actively; vLLM itself gives each rank a NUMA node, and refuses where there are too few. Raises ``ConfigError``.
    """
    if binding in ("nobind", "") or (binding == "auto" and ranks == 1):
        return None
    parts = divide(sorted(os.sched_getaffinity(0)), ranks) if binding == "auto" else binding.split("|")
    if len(parts) != ranks:
        raise ConfigError(
            f"VLLM_CPU_OMP_THREADS_BIND={binding!r} names the cores of {len(parts)} rank(s), and the FFN role has "
            f"{ranks}; separate those of each rank with |"
        )
    return [parse_cores(part) for part in parts]


def divide(cores: Sequence[int], ranks: int) -> list[str]:
    """``cores`` in ``ranks`` lists of nearly equal length; where there are too few, several ranks have the same one."""
    if len(cores) < ranks:
        return [str(cores[rank % len(cores)]) for rank in range(ranks)]
    bounds = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    return [",".join(map(str, cores[first:last])) for first, last in itertools.pairwise(bounds)]


def bind_cores(cores: set[int]) -> None:
    """Bind this process to ``cores``.

    vLLM binds its worker processes; an FFN server is its own worker. Must run before torch starts its threads.
    """
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))


def parse_cores(binding: str) -> set[int]:
    """``"0,2-4"`` as a set of core numbers; raises ``ConfigError``."""
    cores: set[int] = set()
    try:
        for part in binding.split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ConfigError(f"VLLM_CPU_OMP_THREADS_BIND={binding!r} is not a list of cores like 0,2-4") from None
    missing = cores - os.sched_getaffinity(0)
    if missing or not cores:
        raise ConfigError(
            f"VLLM_CPU_OMP_THREADS_BIND={binding!r} names cores that this process may not use: {sorted(missing)}"
        )
    return cores
