"""The flags of ``python -m afd_patch.serve`` that are ours; every other flag is passed on to vLLM."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from afd_patch.boundaries import find
from afd_patch.config import AFDConfig
from afd_patch.errors import ConfigError

DESCRIPTION = """\
Serve MODEL with attention and FFN in different processes.

Without --role: starts FFN server and OpenAI server on this machine, divides the cores between them, and stops both
with Ctrl-C. With --role ffn: one FFN server, at --listen. With --role attention: the OpenAI server, whose FFN servers
are at --ffn. Every flag that is not listed here goes to vLLM ("vllm serve --help" lists them)."""


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the flags for vLLM."""
    parser = argparse.ArgumentParser(
        prog="python -m afd_patch.serve",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--role", choices=("both", "attention", "ffn"), default="both")
    parser.add_argument("--listen", metavar="ENDPOINT", help="ffn role: unix:PATH or tcp://HOST:PORT")
    parser.add_argument(
        "--ffn", metavar="ENDPOINT", action="append", default=[], help="attention role: an FFN server; repeatable"
    )
    parser.add_argument(
        "--ffn-servers", metavar="N", type=int, default=1, help="both roles: how many FFN servers, all alike"
    )
    parser.add_argument(
        "--ffn-tensor-parallel-size",
        metavar="N",
        type=int,
        help="both roles: ranks of each FFN server, where not those of the attention role (--tensor-parallel-size)",
    )
    parser.add_argument(
        "--share-cores",
        action="store_true",
        help="both roles: each has all cores, and leaves them alone while it waits",
    )
    parser.add_argument("--gate", choices=("ffn", "attention"), default=None, help="where the router runs (AFD_GATE)")
    parser.add_argument("--connect-timeout", metavar="SECONDS", type=float, help="AFD_CONNECT_TIMEOUT")
    parser.add_argument("--call-timeout", metavar="SECONDS", type=float, help="AFD_CALL_TIMEOUT")
    parser.add_argument("--spin-us", metavar="MICROSECONDS", type=int, help="AFD_SPIN_US")
    return parser.parse_known_args(arguments)


def config_for(
    flags: argparse.Namespace, role: str, *, ffn: Sequence[str] = (), listen: str | None = None
) -> AFDConfig:
    """The configuration of ``role``: flags first, then ``AFD_*`` variables, then defaults."""
    environ = {name: value for name, value in os.environ.items() if name.startswith("AFD_")}
    for name in ("AFD_FFN", "AFD_LISTEN"):
        environ.pop(name, None)
    environ["AFD_ROLE"] = role
    if ffn:
        environ["AFD_FFN"] = ",".join(ffn)
    if listen is not None:
        environ["AFD_LISTEN"] = listen
    for name, value in (
        ("AFD_GATE", flags.gate),
        ("AFD_CONNECT_TIMEOUT", flags.connect_timeout),
        ("AFD_CALL_TIMEOUT", flags.call_timeout),
        ("AFD_SPIN_US", flags.spin_us),
    ):
        if value is not None:
            environ[name] = str(value)
    config = AFDConfig.from_env(environ)
    assert config is not None
    return config


def check_model(model: str) -> None:
    """Refuse a folder that cannot be served, before anything is started; names on the hub are left to vLLM."""
    folder = Path(model)
    if not folder.exists():
        if model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise ConfigError(f"the model folder {model} does not exist; give the folder with config.json")
        return
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{model} is no model folder: it has no config.json; give the folder with config.json")
    try:
        architectures = json.loads(config.read_text()).get("architectures") or ["(none)"]
    except ValueError as error:
        raise ConfigError(f"{config} is not JSON ({error}); fetch the model again") from None
    find(architectures[0])
