"""The FFN role as a process: listen, shake hands while loading, serve, drain."""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

from afd_patch import activation, boundaries
from afd_patch.config import AFDConfig
from afd_patch.ffn.listener import Listener
from afd_patch.ffn.runner import FFNRunner, configure
from afd_patch.ffn.server import FFNServer
from afd_patch.identity import identify

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.afd_patch")


def serve(config: AFDConfig, listener: Listener, engine: EngineArgs) -> None:
    """Serve the FFN of the model that ``engine`` describes on ``listener`` until SIGTERM or SIGINT.

    Raises ``AFDError`` for what can be said before loading, and whatever the native loader raises.
    """
    activation.start(config, from_environment=False)
    vllm_config = configure(engine)
    boundary = boundaries.find(vllm_config.model_config.hf_config.architectures[0])
    server = FFNServer(listener, identify(vllm_config, boundary, config), spin=config.spin_us * 1e-6)
    _serve(server, vllm_config, config)


def _serve(server: FFNServer, vllm_config: Any, config: AFDConfig) -> None:
    handshakes = threading.Thread(target=server.shake_hands, name="afd-handshakes", daemon=True)
    handshakes.start()
    try:
        runner = FFNRunner(vllm_config)
    finally:
        server.stop_loop()
        handshakes.join()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.drain(config.call_timeout))
    identity = server.identity
    logger.info(
        "AFD ffn: ready: %d layers of %s (%s, hidden %d) at %s, up to %d rows a call",
        identity.layers, identity.architecture, identity.dtype, identity.hidden_size, config.listen, identity.max_rows,
    )  # fmt: skip
    try:
        server.serve(runner.compute_ffn_output)
        logger.info("AFD ffn: stopped after %d calls", server.calls)
    finally:
        server.close()
        runner.shutdown()
