"""Both roles on this machine: starts them, waits until they are ready, and takes them down together."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from afd_patch.errors import ConfigError
from afd_patch.serve import flags as our
from afd_patch.serve.child import ChildProcess
from afd_patch.serve.roles import attention_command, divide, on_cpu, parse_cores, tensor_parallel_size

#: What an FFN server logs when it answers calls.
READY = "AFD ffn: ready:"
#: What the attention role's worker logs when its model is proven.
PROVEN = "AFD attention: vLLM"
#: How threads of roles that share their cores wait: asleep. OpenMP would let them wait actively for the next loop.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
_PROGRESS = 10.0
#: Names of Unix sockets have 107 bytes; vLLM adds 37 to its folder for temporary files, and that has 13 more than ours.
_LONGEST = 57
_API_STOP_TIMEOUT = 20.0
_FFN_STOP_TIMEOUT = 10.0


class Launcher:
    """One deployment: ``flags`` are ours, ``vllm_flags`` go to both roles."""

    def __init__(self, flags: argparse.Namespace, vllm_flags: Sequence[str]) -> None:
        if flags.ffn_servers < 1:
            raise ConfigError(f"--ffn-servers {flags.ffn_servers} must be at least 1")
        self._flags = flags
        self._attention_ranks = tensor_parallel_size(vllm_flags)
        self._ffn_ranks: int = self._attention_ranks
        if flags.ffn_tensor_parallel_size is not None:
            self._ffn_ranks = flags.ffn_tensor_parallel_size
        if self._ffn_ranks < 1:
            raise ConfigError(f"--ffn-tensor-parallel-size {self._ffn_ranks} must be at least 1")
        self._vllm_flags = [*vllm_flags, *_room_for_both(vllm_flags, self._attention_ranks)]
        self._model: str = flags.model
        self._host, self._port = _address(self._vllm_flags)
        _require_free_port(self._host, self._port)
        cores = all_cores if flags.share_cores else divide_cores
        self._cores = cores(self._attention_ranks, self._ffn_ranks)
        self._stop = threading.Event()
        self._children: list[ChildProcess] = []
        self._shared: dict[str, str] = {}

    def run(self) -> int:
        """Serve until a signal or the end of a child; returns the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._stop.set())
        # The children's folder for temporary files too: vLLM leaves sockets and files of its process groups there.
        folder = Path(tempfile.mkdtemp(prefix="afd-", dir=None if len(tempfile.gettempdir()) < _LONGEST else "/tmp"))
        self._shared = {
            "TMPDIR": str(folder),
            # What is compiled stays where torch would put it otherwise, for the next start.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            or f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",
        }
        try:
            return self._serve([f"unix:{folder}/ffn-{index}.sock" for index in range(self._flags.ffn_servers)])
        finally:
            for child in reversed(self._children):  # the API server first, while its FFN still answers
                child.terminate(_API_STOP_TIMEOUT if child.name == "api" else _FFN_STOP_TIMEOUT)
            # Tensor-parallel ranks on CPUs share memory that is named after the file at which they met, and leave both.
            for meeting in (path.name for pattern in ("vllm_dist_*", "afd_ffn_*") for path in folder.glob(pattern)):
                for segment in Path("/dev/shm").glob(f"*{meeting}*"):
                    segment.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            _say("stopped; no process, socket or shared memory is left")

    def _serve(self, endpoints: list[str]) -> int:
        attention_cores, ffn_cores = self._cores
        if self._flags.share_cores:
            self._shared |= WAITING
        own = [sys.executable, "-m", "afd_patch.serve", self._model, "--role", "ffn"]
        started = time.monotonic()
        for index, endpoint in enumerate(endpoints):
            config = our.config_for(self._flags, "ffn", listen=endpoint)
            settings = {**config.to_env(), "AFD_ROLE": "", "AFD_LISTEN": "", **self._shared}
            env = _environment(settings, ffn_cores)
            command = [*own, "--listen", endpoint, *self._vllm_flags]
            if self._flags.ffn_tensor_parallel_size is not None:
                command += ["--tensor-parallel-size", str(self._ffn_ranks)]
            self._children.append(ChildProcess(f"ffn-{index}", command, env, marker=READY))
            _say(f"starting FFN server {index} at {endpoint}{_on_cores(ffn_cores)}")
        config = our.config_for(self._flags, "attention", ffn=endpoints)
        env = _environment({**config.to_env(), **self._shared}, attention_cores)
        self._children.append(ChildProcess("api", attention_command(self._model, self._vllm_flags), env, marker=PROVEN))
        _say(f"starting the OpenAI server (attention role){_on_cores(attention_cores)}")
        if not self._wait_until_ready(started):
            return 0 if self._stop.is_set() else 1
        self._print_ready(time.monotonic() - started)
        while not self._stop.wait(0.2):
            if self._cannot_go_on():
                return 1
        _say("stopping")
        return 0

    def _wait_until_ready(self, started: float) -> bool:
        report = started + _PROGRESS
        ffn, api_ready = self._children[:-1], False
        while not self._stop.wait(0.2):
            if self._failed():
                return False
            if not api_ready:
                api_ready = _healthy(self._url)
            if api_ready and all(child.seen.is_set() for child in self._children):
                return True
            if time.monotonic() >= report:
                waiting = [child.name for child in ffn if not child.seen.is_set()] + ([] if api_ready else ["api"])
                _say(f"{time.monotonic() - started:.0f} s: waiting for {', '.join(waiting)}")
                report += _PROGRESS
        return False

    def _cannot_go_on(self) -> bool:
        """Once all are ready: whether the API server has ended, or the last FFN server; others are only told of."""
        *servers, api = self._children
        ended = [child for child in servers if child.status is not None]
        if api.status is not None or len(ended) == len(servers):
            return self._failed()
        for child in ended:
            _say(f"{child.name} ended with status {child.status}; FFN servers that go on: {len(servers) - len(ended)}")
            child.terminate(0.0)  # what it left of its process group
            self._children.remove(child)
        return False

    def _failed(self) -> bool:
        for child in self._children:
            if child.status is not None and not self._stop.is_set():
                _say(f"{child.name} ended with status {child.status}; its last lines are above; stopping the others")
                return True
        return False

    @property
    def _url(self) -> str:
        host = "127.0.0.1" if self._host in ("", "0.0.0.0", "::") else self._host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def _print_ready(self, seconds: float) -> None:
        request = {
            "model": _served_name(self._vllm_flags) or self._model,
            "prompt": "Hello, my name is",
            "max_tokens": 16,
        }
        _say(f"ready after {seconds:.0f} s: {self._url}/v1 (attention role), FFN servers: {len(self._children) - 1}")
        _say(f"try: curl {self._url}/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(request)}'")
        _say("Ctrl-C stops everything")


def all_cores(attention_ranks: int = 1, ffn_ranks: int = 1) -> tuple[str | None, str | None]:
    """Cores for the two roles with ``--share-cores``: all, for both, as ``VLLM_CPU_OMP_THREADS_BIND`` lists.

    The roles of one attention process take turns, so each can have all cores, if threads that wait leave them alone.
    The collectives of tensor-parallel ranks wait actively. Raises ``ConfigError`` for those, and for chosen cores.
    """
    chosen = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if chosen not in ("auto", "nobind", ""):
        raise ConfigError(f"--share-cores gives both roles all cores, and VLLM_CPU_OMP_THREADS_BIND={chosen!r} chooses "
                          "some; leave one of the two out")  # fmt: skip
    if max(attention_ranks, ffn_ranks) > 1:
        raise ConfigError("--share-cores does not go with tensor parallelism, whose ranks wait actively; leave it out")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return cores, cores


def divide_cores(attention_ranks: int = 1, ffn_ranks: int = 1) -> tuple[str | None, str | None]:
    """Cores for the attention role and for the FFN servers, as ``VLLM_CPU_OMP_THREADS_BIND`` lists.

    ``None`` means unbound: on one core there is nothing to divide. A binding that the user chose for vLLM stays the
    attention role's, and the FFN gets what it leaves. Several FFN servers share their cores, because the attention
    role calls one of them at a time; the others are there for when it fails. The tensor-parallel ranks of a role
    divide its cores; a role with more ranks than cores of its own takes its cores among all, because the roles take
    turns, and ranks that wait for each other on one core do not.
    """
    cores = sorted(os.sched_getaffinity(0))
    chosen = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if chosen not in ("auto", "nobind", ""):
        if chosen.count("|") + 1 != attention_ranks:
            raise ConfigError(
                f"VLLM_CPU_OMP_THREADS_BIND={chosen!r} names the cores of {chosen.count('|') + 1} rank(s), and the "
                f"attention role has {attention_ranks}; separate those of each rank with |"
            )
        taken = parse_cores(chosen.replace("|", ","))
        left = [core for core in cores if core not in taken]
        return chosen, _between_ranks(left, cores, ffn_ranks) if left or ffn_ranks > 1 else None
    half = len(cores) - len(cores) // 2
    if len(cores) == 1 and attention_ranks == ffn_ranks == 1:
        return None, None
    return (
        _between_ranks(cores[:half], cores, attention_ranks),
        _between_ranks(cores[half:], cores, ffn_ranks),
    )


def _between_ranks(own: list[int], all_cores: list[int], ranks: int) -> str:
    return "|".join(divide(own if len(own) >= ranks else all_cores, ranks))


def _room_for_both(vllm_flags: Sequence[str], ranks: int) -> list[str]:
    """On a CPU each rank asks for nearly all of the host's memory, which two roles on one host cannot both have."""
    chosen = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")
    if not on_cpu() or "VLLM_CPU_KVCACHE_SPACE" in os.environ or any(flag.startswith(chosen) for flag in vllm_flags):
        return []
    return ["--gpu-memory-utilization", f"{0.4 / ranks:.3g}"]


def _environment(settings: dict[str, str], cores: str | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    environment |= {name: value for name, value in settings.items() if value}
    if cores is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = cores
    return environment


def _on_cores(cores: str | None) -> str:
    return f" on core(s) {cores}" if cores else ""


def _address(vllm_flags: Sequence[str]) -> tuple[str, int]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, default=8000)
    known, _ = parser.parse_known_args(vllm_flags)
    return known.host, known.port


def _served_name(vllm_flags: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--served-model-name", nargs="+")
    names = parser.parse_known_args(vllm_flags)[0].served_model_name
    return str(names[0]) if names else None


def _require_free_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"the OpenAI server cannot listen on port {port} ({error.strerror}); choose another one with --port"
            ) from None


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _say(text: str) -> None:
    print(f"afd_patch: {text}", flush=True)
