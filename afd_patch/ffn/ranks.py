"""The ranks of a tensor-parallel FFN role: rank 0 is the server's process, the others are children that follow it.

A follower holds its shard of every FFN and waits, blocked on a pipe, for the next call. The pipe says which layer and
how many rows; the rows follow through vLLM's own tensor-parallel group, whose timeouts only run while a call does. All
ranks then run the native module, whose collectives make the result complete.

vLLM's collectives on CPUs wait actively and for ever, so a rank that has gone must be noticed from outside: a thread
watches the followers and ends the role when one ends; the kernel kills the followers when rank 0 ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from afd_patch.config import AFDConfig
from afd_patch.errors import AFDError, RankLost
from afd_patch.hosting import end_with_parent

logger = logging.getLogger("vllm.afd_patch")

#: A call, as followers get it: layer and number of rows. No rows: the end.
_CALL = struct.Struct("<ii")
_END = _CALL.pack(0, 0)
_LOADED = b"loaded"

#: Seconds that the followers have to end by themselves, and rank 0 when a follower has ended.
_END_TIMEOUT, _LOST_GRACE = 5.0, 2.0
#: Seconds after which the end of one process is known to the others.
_SETTLE = 0.2

#: How followers are started. A forked one would inherit threads of OpenMP that it does not have.
START_METHOD = "spawn"

#: Cores of each rank.
Cores = Sequence[set[int]]


class Ranks:
    """The followers of this process, which is rank 0; none where ``vllm_config`` asks for one rank.

    ``cores`` are those of each rank, or ``None`` to bind none. ``on_loss`` is called, in another thread, when a
    follower has ended; if this process then does not end within ``_LOST_GRACE`` seconds, ``last_wish`` is called and
    the process ends with status 1.
    """

    def __init__(
        self, config: AFDConfig, vllm_config: Any, cores: Cores | None, *, on_loss: Callable[[], None],
        last_wish: Callable[[], None],
    ) -> None:  # fmt: skip
        self.size: int = vllm_config.parallel_config.tensor_parallel_size
        self.rendezvous = f"file://{tempfile.gettempdir()}/afd_ffn_{uuid.uuid4().hex}" if self.size > 1 else None
        self._on_loss = on_loss
        self._last_wish = last_wish
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._ending = threading.Event()
        self._lost: str | None = None
        context: Any = multiprocessing.get_context(START_METHOD)
        for rank in range(1, self.size):
            own, theirs = context.Pipe()
            mine = None if cores is None else cores[rank]
            arguments = (config, vllm_config, rank, self.rendezvous, mine, theirs, os.getpid())
            process = context.Process(target=_follow, args=arguments, name=f"afd-ffn-rank-{rank}", daemon=True)
            with _threads(mine):
                process.start()
            theirs.close()
            self._pipes.append(own)
            self._processes.append(process)
        if self._processes:
            threading.Thread(target=self._watch, name="afd-ffn-ranks", daemon=True).start()

    def wait_loaded(self) -> None:
        """Wait until every follower has proven its load; raises ``RankLost`` when one has ended."""
        for rank, pipe in enumerate(self._pipes, start=1):
            try:
                pipe.recv_bytes(len(_LOADED))
            except EOFError:
                self._processes[rank - 1].join()
                self._note_loss(rank)
        self.check()

    def announce(self, layer: int, rows: int) -> None:
        """Tell the followers which call comes next; raises ``RankLost`` when one has ended."""
        call = _CALL.pack(layer, rows)
        for rank, pipe in enumerate(self._pipes, start=1):
            try:
                pipe.send_bytes(call)
            except OSError:
                self._note_loss(rank)
                self.check()

    def give_up(self, reason: str) -> None:
        """After an error inside of a computation the ranks may be out of step: the role ends after this call.

        Raises ``RankLost`` where it is a follower's end that was the error.
        """
        time.sleep(_SETTLE)
        for rank, process in enumerate(self._processes, start=1):
            if not process.is_alive():
                self._note_loss(rank)
                self.check()
        self._lost = f"{reason}, and the ranks may be out of step, so the role ends; start it again"
        self._on_loss()

    def check(self) -> None:
        """Raise ``RankLost`` when the role cannot go on."""
        if self._lost is not None:
            raise RankLost(self._lost)

    def close(self) -> None:
        """End the followers; those that do not end by themselves are killed."""
        self._ending.set()
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(_END)
            pipe.close()
        deadline = time.monotonic() + (_END_TIMEOUT if self._lost is None else 0.0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self._forget_rendezvous()

    def _forget_rendezvous(self) -> None:
        if self.rendezvous is not None:
            Path(self.rendezvous.removeprefix("file://")).unlink(missing_ok=True)

    def _watch(self) -> None:
        wait([process.sentinel for process in self._processes])
        time.sleep(_SETTLE)  # rank 0 may have stopped for the same reason, or be about to end them
        if self._ending.is_set():
            return
        rank = next(rank for rank, process in enumerate(self._processes, start=1) if not process.is_alive())
        self._note_loss(rank)
        self._on_loss()
        if not self._ending.wait(_LOST_GRACE):
            # It is inside of a collective that waits for the lost rank, and cannot be reached there.
            self._last_wish()
            self._forget_rendezvous()
            print(f"afd_patch: {self._lost}", file=sys.stderr, flush=True)
            os._exit(1)

    def _note_loss(self, rank: int) -> None:
        if self._lost is None:
            status = self._processes[rank - 1].exitcode
            self._lost = (
                f"tensor-parallel rank {rank} of the FFN role ended (exit status {status}), so the role ends; "
                "its own lines are above; start it again"
            )


@contextmanager
def _threads(cores: set[int] | None) -> Iterator[None]:
    """The environment from which a child takes its number of compute threads, as it loads OpenMP."""
    before = os.environ.get("OMP_NUM_THREADS")
    if cores is not None:
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _follow(
    config: AFDConfig, vllm_config: Any, rank: int, rendezvous: str, cores: set[int] | None, pipe: Connection,
    rank_0: int,
) -> None:  # fmt: skip
    """A follower, from its first line to its last."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != rank_0:
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # they reach rank 0 too, which drains first
        signal.signal(number, signal.SIG_IGN)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    from afd_patch import activation
    from afd_patch.ffn.runner import FFNRunner

    if logging_config := getattr(vllm_config, "logging_config", None):
        from vllm.logger import configure_logging

        configure_logging(logging_config)  # as in vLLM's own worker processes
    try:
        activation.start(config, from_environment=False)
        runner = FFNRunner(vllm_config, rank, rendezvous)
        pipe.send_bytes(_LOADED)
        with suppress(EOFError):  # rank 0 has gone
            while (call := pipe.recv_bytes(_CALL.size)) != _END:
                layer, count = _CALL.unpack(call)
                runner.compute_ffn_output(layer, runner.take_rows(count))
        runner.shutdown()
    except AFDError as error:
        print(f"afd_patch: tensor-parallel rank {rank}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
