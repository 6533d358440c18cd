"""From a configuration to a connector: the early check in the front end, and the real connection in the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from afd_patch.attention import connections
from afd_patch.attention.tensor_parallel import GroupConnector
from afd_patch.connectors.retry import RetryingConnector

if TYPE_CHECKING:
    from afd_patch.config import AFDConfig
    from afd_patch.identity import Identity


def _connector(config: AFDConfig, identity: Identity) -> RetryingConnector:
    return RetryingConnector(
        config.ffn,
        identity,
        connect_timeout=config.connect_timeout,
        call_timeout=config.call_timeout,
        spin=config.spin_us * 1e-6,
    )


def preflight(config: AFDConfig, identity: Identity) -> None:
    """Find out whether an FFN server is there and belongs to this model, before any process is started for it."""
    connector = _connector(config, identity)
    try:
        connector.connect()
    finally:
        connector.close()


def open_connection(config: AFDConfig, vllm_config: Any, identity: Identity) -> RetryingConnector | GroupConnector:
    """The connector of the model of ``vllm_config``, in the process that runs it (or one of its ranks)."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    connector: RetryingConnector | GroupConnector
    if group.world_size == 1:
        connector = _connector(config, identity)
    else:
        first = group.rank_in_group == 0
        connector = GroupConnector(group, _connector(config, identity) if first else None, identity)
    connector.connect()
    connections.bind(vllm_config.compilation_config.static_forward_context, connector)
    return connector
