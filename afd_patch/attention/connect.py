"""From a configuration to a connector: the early check in the front end, and the real connection in the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from afd_patch.attention import connections
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.identity import identify

if TYPE_CHECKING:
    from afd_patch.boundaries import Boundary
    from afd_patch.config import AFDConfig


def _connector(config: AFDConfig, vllm_config: Any, boundary: Boundary) -> RetryingConnector:
    return RetryingConnector(
        config.ffn,
        identify(vllm_config, boundary, config).to_json(),
        connect_timeout=config.connect_timeout,
        call_timeout=config.call_timeout,
        spin=config.spin_us * 1e-6,
    )


def preflight(config: AFDConfig, vllm_config: Any, boundary: Boundary) -> None:
    """Find out whether an FFN server is there and belongs to this model, before any process is started for it."""
    connector = _connector(config, vllm_config, boundary)
    try:
        connector.connect()
    finally:
        connector.close()


def open_connection(config: AFDConfig, vllm_config: Any, boundary: Boundary) -> RetryingConnector:
    """The connector of the model of ``vllm_config``, in the process that runs it."""
    connector = _connector(config, vllm_config, boundary)
    connector.connect()
    connections.bind(vllm_config.compilation_config.static_forward_context, connector)
    return connector
