"""FFN servers: does somebody answer at an endpoint, who, is it ready, and does it belong to a given model?

A server refuses a partner that differs from it and says both values of every field. So the doctor introduces itself
as something that no server is, and the refusal says who answers. Then it shakes hands with the server's own identity
to learn whether the weights are loaded. No call is made; the server logs one line about a dropped peer.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from afd_patch.connectors.endpoint import Endpoint
from afd_patch.doctor.findings import Section
from afd_patch.errors import ConnectorError, HandshakeError
from afd_patch.identity import Identity

#: Seconds for one connection, handshake included.
TIMEOUT = 3.0

_DIFFERENCE = re.compile(r"(?P<field>\w+): (?P<server>'[^']*'|\S+) here, (?:'[^']*'|\S+) there(?:;|$)")
#: What depends on flags of the attention role, not on the model.
_BY_FLAGS = ("dtype", "request_columns", "reply_columns", "compiled", "max_rows", "gate")
_START = "start one: python -m afd_patch.serve MODEL --role ffn --listen ENDPOINT"


@dataclass(frozen=True)
class Answer:
    """What was found at ``endpoint``: an identity, or the ``trouble`` on the way to one."""

    endpoint: Endpoint
    identity: Mapping[str, Any] | None = None
    ready: bool = False
    trouble: str = ""
    fix: str = ""


def ask_all(endpoints: tuple[Endpoint, ...], timeout: float = TIMEOUT) -> list[Answer]:
    """Ask every endpoint, all at the same time."""
    if not endpoints:
        return []
    with ThreadPoolExecutor(min(16, len(endpoints))) as pool:
        return list(pool.map(lambda endpoint: ask(endpoint, timeout), endpoints))


def ask(endpoint: Endpoint, timeout: float = TIMEOUT) -> Answer:
    """Who answers at ``endpoint``."""
    nobody = nobodys_identity()
    try:
        _shake_hands(endpoint, nobody, timeout)
    except HandshakeError as error:
        identity = parse_refusal(str(error), nobody)
        if identity is None:
            return Answer(endpoint, trouble=str(error), fix="use the same afd_patch on both sides")
    except (OSError, ConnectorError) as error:
        return _unreachable(endpoint, error)
    else:
        return Answer(endpoint, trouble="it welcomed somebody that no FFN server knows", fix="check what listens there")
    try:
        return Answer(endpoint, identity, _shake_hands(endpoint, Identity(**{**identity, "max_rows": 1}), timeout))
    except (OSError, ConnectorError) as error:
        return Answer(endpoint, identity, trouble=f"it does not welcome a partner with its own identity ({error})")


def _shake_hands(endpoint: Endpoint, identity: Identity, timeout: float) -> bool:
    """Whether the server is ready; raises like ``Channel.open``."""
    from afd_patch.connectors.client import Channel

    channel = Channel(endpoint, identity)
    try:
        channel.open(timeout)
        return channel.ready
    finally:
        channel.close()


def nobodys_identity() -> Identity:
    """An identity with which no server agrees. The architecture is what the server's log shows."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Identity):
        values[field.name] = {"int": 1, "bool": False}.get(str(field.type), "?")
    return Identity(**{**values, "architecture": "afd_patch.doctor", "dtype": "float32"})


def parse_refusal(text: str, sent: Identity) -> dict[str, Any] | None:
    """The server's identity in the sentence with which it refused ``sent`` (see ``Identity.mismatch``)."""
    said: dict[str, Any] = {}
    for match in _DIFFERENCE.finditer(text):
        try:
            said[match["field"]] = ast.literal_eval(match["server"])
        except (ValueError, SyntaxError):
            return None
    try:
        # A field that is not mentioned has the value that was sent.
        return Identity.from_json({**sent.to_json(), **said}).to_json() if "model" in said else None
    except HandshakeError:
        return None


def _unreachable(endpoint: Endpoint, error: Exception) -> Answer:
    if isinstance(error, FileNotFoundError):
        return Answer(endpoint, trouble="there is no such socket", fix=_START)
    if isinstance(error, ConnectionRefusedError):
        return Answer(endpoint, trouble="nobody listens there", fix=_START)
    if isinstance(error, PermissionError):
        return Answer(endpoint, trouble="this user may not connect to it", fix="use the server's user")
    if isinstance(error, TimeoutError):
        return Answer(endpoint, trouble="no connection within the time limit", fix="check host, port and firewall")
    if isinstance(error, ConnectorError):
        return Answer(
            endpoint, trouble=f"what listens there does not answer as an FFN server ({error})", fix="check the port"
        )
    return Answer(endpoint, trouble=str(error), fix="check host and port")


def describe(answers: list[Answer], model: Mapping[str, Any], whole: Mapping[str, Any] | None) -> Section:
    """One finding and more for each answer.

    ``model`` is what is known of the given model by reading it (a part of an identity), ``whole`` its identity as
    vLLM's configuration makes it, if that is known.
    """
    section = Section("FFN servers")
    for answer in answers:
        name = str(answer.endpoint)
        if answer.trouble:
            section.problem(name, answer.trouble, answer.fix)
        if answer.identity is None:
            continue
        server = answer.identity
        section.ok(
            name,
            f"an FFN server of {server['architecture']} (model {server['model']}, weights {server['weights']}, "
            f"{server['layers']} layers, hidden size {server['hidden_size']}, {server['dtype']}, "
            f"vLLM {server['vllm']}, {'compiled' if server['compiled'] else 'eager'})",
        )
        if not answer.ready and not answer.trouble:
            section.note(name, "it is still loading its weights")
        _compare(name, server, whole or model, section, complete=whole is not None)
    _compare_with_each_other(answers, section)
    return section


def _compare(
    name: str, server: Mapping[str, Any], mine: Mapping[str, Any], section: Section, *, complete: bool
) -> None:
    different = {k: v for k, v in mine.items() if k in server and server[k] != v and k != "max_rows"}
    by_model = {k: v for k, v in different.items() if k not in _BY_FLAGS}
    by_flags = {k: v for k, v in different.items() if k in _BY_FLAGS}
    if by_model:
        section.problem(
            name,
            "it does not belong to this model: " + _both(server, by_model),
            "serve the same files with the same vLLM on both sides",
        )
    elif mine.get("weights") is not None:
        section.ok(name, "it serves this model" + ("" if complete else " (as far as files and versions tell)"))
    if by_flags:
        section.note(
            name, "flags of the two roles must agree: " + _both(server, by_flags),
            "give the attention role the server's --dtype, --enforce-eager, --tensor-parallel-size and AFD_GATE",
        )  # fmt: skip


def _both(server: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    return "; ".join(f"{key} {server[key]!r} there, {value!r} here" for key, value in mine.items())


def _compare_with_each_other(answers: list[Answer], section: Section) -> None:
    known = [answer for answer in answers if answer.identity is not None]
    for answer in known[1:]:
        first, other = known[0].identity or {}, answer.identity or {}
        differing = [key for key in first if key != "max_rows" and first[key] != other.get(key)]
        if differing:
            section.problem(
                str(answer.endpoint),
                f"it differs from {known[0].endpoint} in {', '.join(differing)}",
                "all servers of one attention role must be alike",
            )
