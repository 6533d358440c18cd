"""Server and client processes for the connector tests: real forks, real sockets, a computation that torch can redo.

Nothing here imports vLLM. A ``Server`` is a forked child with an ``FFNServer``; what it logs is in ``log``.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from afd_patch.connectors import columns
from afd_patch.connectors.endpoint import Endpoint, parse_endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.ffn import peer, server
from afd_patch.ffn.listener import Listener
from afd_patch.identity import Identity

HIDDEN, LAYERS, MAX_ROWS = 64, 8, 512
#: Layers at which the computation of a ``Server`` does more than ``reference``.
FAILS, WAITS = 6, 7
#: How long anything in these tests may take that should happen at once.
SOON = 10.0


def identity(**changes: Any) -> Identity:
    values: dict[str, Any] = {
        "vllm": "0.32.0", "model": "m0", "weights": "w0", "architecture": "TestForCausalLM", "boundary": "dense",
        "gate": "ffn", "dtype": "bfloat16", "hidden_size": HIDDEN,
        "request_columns": HIDDEN, "reply_columns": HIDDEN, "layers": LAYERS, "compiled": False, "max_rows": MAX_ROWS,
    }  # fmt: skip
    return Identity(**{**values, **changes})


def reference(layer: int, rows: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What layer ``layer`` makes of ``rows``: depends on the layer, on every value, and not on other rows."""
    return (torch.tanh(rows.float() * (layer + 1.25)) + rows.float() * 0.1).to(dtype or rows.dtype)


def routed(layer: int, rows: torch.Tensor, weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """What layer ``layer`` makes of rows that crossed with their routing: twice as wide, and it tells every bit."""
    mixed = reference(layer, rows, torch.float32) * weights.sum(1, keepdim=True) + numbers.sum(1, keepdim=True) % 97
    return torch.cat([mixed, reference(layer + 1, rows, torch.float32)], 1).to(rows.dtype)


def random_routing(count: int, top_k: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (float32) and numbers (int32, of which some bits make no number in any float) for ``count`` rows."""
    generator = torch.Generator().manual_seed(seed * 7919 + count)
    weights = torch.rand(count, top_k, generator=generator)
    return weights, torch.randint(-(2**31), 2**31 - 1, (count, top_k), generator=generator).to(torch.int32)


def random_rows(count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, width: int = HIDDEN) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed * 7919 + count)).to(dtype)


def free_endpoint(kind: str, folder: Path, name: str = "s") -> Endpoint:
    if kind == "unix":
        return parse_endpoint(f"unix:{folder}/{name}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return parse_endpoint(f"tcp://127.0.0.1:{taken.getsockname()[1]}")


def connector(
    *endpoints: Endpoint, who: Identity | None = None, call_timeout: float = SOON, connect_timeout: float = SOON,
    spin: float = 0.0,
) -> RetryingConnector:  # fmt: skip
    return RetryingConnector(
        endpoints, who or identity(), connect_timeout=connect_timeout, call_timeout=call_timeout, spin=spin
    )


def ask(client: RetryingConnector, layer: int, rows: torch.Tensor) -> torch.Tensor:
    """The result of one call, in memory that held something else before."""
    out = torch.full(rows.shape, float("nan"), dtype=rows.dtype)
    client.call(layer, rows, out)
    return out


def assert_right(client: RetryingConnector, rounds: int = 3) -> None:
    """``client`` gets right results."""
    for seed in range(rounds):
        rows = random_rows(1 + 5 * seed, seed=seed)
        assert torch.equal(ask(client, seed, rows), reference(seed, rows))


class Forked:
    """``function`` in a forked child that writes what it logs to a file."""

    def __init__(self, function: Callable[[], None], log: Path, level: int = logging.INFO) -> None:
        self.log_file = log
        self._level = level
        self._old_lines = 0
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function)

    def _run(self, function: Callable[[], None]) -> None:
        code = 1
        gc.freeze()  # garbage of the parent may hold descriptors; they are not this process's to close at some time
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            output = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 2)
            root = logging.getLogger()
            root.handlers = [logging.FileHandler(self.log_file)]
            root.handlers[0].setFormatter(logging.Formatter("%(levelname)s %(message)s"))
            for logger in (root, logging.getLogger("vllm.afd_patch")):
                logger.setLevel(self._level)
            function()
            code = 0
        except BaseException:
            logging.getLogger().exception("child failed")
        finally:
            os._exit(code)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it without a last word."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def wait(self, timeout: float = SOON) -> int:
        """Its exit code; fails when it does not end."""
        fd = os.pidfd_open(self.pid)
        try:
            assert readable(fd, timeout), f"process {self.pid} did not end within {timeout} s"
        finally:
            os.close(fd)
        status = os.waitpid(self.pid, 0)[1]
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def log(self) -> list[str]:
        """Its complete lines; where a line crosses a page of the file, a reader may see only its first part."""
        text = self.log_file.read_text() if self.log_file.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()[self._old_lines :]

    def forget_log(self) -> None:
        """``log`` begins here."""
        self._old_lines += len(self.log())

    def lines(self, text: str) -> list[str]:
        return [line for line in self.log() if text in line]

    def wait_for_line(self, text: str, count: int = 1) -> list[str]:
        assert eventually(lambda: len(self.lines(text)) >= count), f"no line with {text!r} in {self.log()}"
        return self.lines(text)

    def rss(self) -> int:
        """Bytes of memory that are its own or mapped and touched."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def shared_areas(self) -> int:
        """How many shared memory areas of connections it has mapped."""
        return Path(f"/proc/{self.pid}/maps").read_text().count("memfd:afd_patch")


class Server(Forked):
    """An FFN server of ``reference`` at ``endpoint``; listens when the constructor returns.

    Layer ``FAILS`` raises. Layer ``WAITS`` calls ``entered`` and waits for ``let_go``. With ``loading`` only
    handshakes are answered until ``finish_loading``.
    """

    def __init__(
        self, endpoint: Endpoint, folder: Path, who: Identity | None = None, *, loading: bool = False,
        frame_timeout: float = peer.FRAME_TIMEOUT, spin: float = 0.0, drain: float = SOON,
        drain_idle: float = server.DRAIN_IDLE, level: int = logging.INFO,
    ) -> None:  # fmt: skip
        self.endpoint = endpoint
        self.identity = who or identity()
        # Counters that parent and child share; a read waits until something was written.
        self._counters = [os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) for _ in range(3)]
        self._entered, self._go, self._loaded = self._counters
        listening, tell = os.pipe()

        shape = (self.identity.max_rows, self.identity.reply_columns)
        results = torch.empty(shape, dtype=getattr(torch, self.identity.dtype))
        with_routing = self.identity.request_columns != HIDDEN

        def compute(layer: int, rows: torch.Tensor) -> torch.Tensor:
            if layer == FAILS:
                raise RuntimeError("no such expert")
            if layer == WAITS:
                os.eventfd_write(self._entered, 1)
                os.read(self._go, 8)  # unlike eventfd_read, goes on after a signal
            if with_routing:
                hidden, side = columns.split(rows, HIDDEN, torch.int32)
                weights, numbers = side.chunk(2, dim=1)
                computed = routed(layer, hidden, weights.contiguous().view(torch.float32), numbers)
            else:
                computed = reference(layer, rows)
            result = results[: len(rows)].copy_(computed)
            rows.zero_()  # native code may write to its input, and return the same memory every time
            return result

        def run() -> None:
            peer.FRAME_TIMEOUT = frame_timeout
            server.DRAIN_IDLE = drain_idle
            ffn = server.FFNServer(Listener(endpoint), self.identity, spin)
            signal.signal(signal.SIGTERM, lambda *_: ffn.drain(drain))
            os.write(tell, b"x")
            if loading:
                thread = threading.Thread(target=ffn.shake_hands)
                thread.start()
                os.read(self._loaded, 8)  # unlike eventfd_read, goes on after a signal
                ffn.stop_loop()
                thread.join()
            ffn.serve(compute)
            logging.getLogger().info("served %d calls", ffn.calls)
            ffn.close()

        super().__init__(run, folder / f"server-{time.monotonic_ns()}.log", level)
        os.close(tell)
        assert os.read(listening, 1), self.log()
        os.close(listening)

    def entered(self) -> None:
        """Wait until a call of layer ``WAITS`` is being computed."""
        assert readable(self._entered, SOON), "no call arrived"
        os.read(self._entered, 8)  # unlike eventfd_read, goes on after a signal

    def let_go(self) -> None:
        os.eventfd_write(self._go, 1)

    def finish_loading(self) -> None:
        os.eventfd_write(self._loaded, 1)

    def kill(self) -> None:
        super().kill()
        while self._counters:
            os.close(self._counters.pop())

    def client(self, **settings: Any) -> RetryingConnector:
        """A connector to it that has shaken hands."""
        client = connector(self.endpoint, who=settings.pop("who", self.identity), **settings)
        client.connect()
        return client


def readable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def eventually(condition: Callable[[], bool], timeout: float = SOON) -> bool:
    """Whether ``condition`` becomes true; for what no event tells."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
