"""The FFN role as a process: listen, shake hands while loading, serve, drain."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from afd_patch import activation, boundaries
from afd_patch.config import AFDConfig
from afd_patch.ffn.listener import Listener
from afd_patch.ffn.ranks import Cores, Ranks
from afd_patch.ffn.runner import FFNRunner, configure
from afd_patch.ffn.server import Compute, FFNServer
from afd_patch.identity import identify

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.afd_patch")


def serve(config: AFDConfig, listener: Listener, engine: EngineArgs, cores: Cores | None = None) -> None:
    """Serve the FFN of the model that ``engine`` describes on ``listener`` until SIGTERM or SIGINT.

    With tensor parallelism this process is rank 0, and starts the other ones; ``cores`` are those of each rank.
    Raises ``AFDError`` for what can be said before loading, ``RankLost`` when one of several ranks has ended, and
    whatever the native loader raises.
    """
    activation.start(config, from_environment=False)
    vllm_config = configure(engine)
    boundary = boundaries.find(vllm_config.model_config.hf_config.architectures[0])
    server = FFNServer(listener, identify(vllm_config, boundary, config), spin=config.spin_us * 1e-6)
    with closing(Ranks(config, vllm_config, cores, on_loss=server.stop_loop, last_wish=listener.close)) as ranks:
        _serve(server, vllm_config, config, ranks)


def _serve(server: FFNServer, vllm_config: Any, config: AFDConfig, ranks: Ranks) -> None:
    handshakes = threading.Thread(target=server.shake_hands, name="afd-handshakes", daemon=True)
    handshakes.start()
    try:
        runner = FFNRunner(vllm_config, 0, ranks.rendezvous)
        ranks.wait_loaded()
    finally:
        server.stop_loop()
        handshakes.join()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.drain(config.call_timeout))
    identity = server.identity
    logger.info(
        "AFD ffn: ready: %d layers of %s (%s, hidden %d) at %s, up to %d rows a call%s",
        identity.layers, identity.architecture, identity.dtype, identity.hidden_size, config.listen, identity.max_rows,
        f", {ranks.size} tensor-parallel ranks" if ranks.size > 1 else "",
    )  # fmt: skip
    try:
        server.serve(runner.compute_ffn_output if ranks.size == 1 else _with_all_ranks(runner, ranks))
        ranks.check()
        logger.info("AFD ffn: stopped after %d calls", server.calls)
    finally:
        server.close()
        runner.shutdown()


def _with_all_ranks(runner: FFNRunner, ranks: Ranks) -> Compute:
    """``compute_ffn_output`` of rank 0, together with all other ranks."""

    def compute(layer: int, rows: torch.Tensor) -> torch.Tensor:
        ranks.announce(layer, rows.shape[0])
        try:
            runner.give_rows(rows)
            return runner.compute_ffn_output(layer, rows)
        except Exception as error:  # as with one rank, it is the caller's answer; here it is the server's end too
            ranks.give_up(f"tensor-parallel rank 0 of the FFN role failed in layer {layer} ({error!r})")
            raise

    return compute
