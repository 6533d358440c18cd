"""AFDConfig: every setting of a role in one frozen object.

This file is the only reader of ``AFD_*`` variables. Each variable is also a flag of ``python -m afd_patch.serve``
(``AFD_CALL_TIMEOUT`` is ``--call-timeout``). It knows nothing about vLLM or torch, so that a wrong setting is
refused before anything expensive is imported.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afd_patch.connectors.endpoint import Endpoint, parse_endpoint
from afd_patch.errors import ConfigError

ROLES = ("attention", "ffn")
GATES = ("ffn", "attention")

#: The name of our entry point in the group ``vllm.general_plugins``, which ``VLLM_PLUGINS`` must let through.
PLUGIN_NAME = "afd_patch"

#: The longest timeout, a week: no clock takes an infinite one.
MAX_SECONDS = 7 * 24 * 3600

#: Variables that are read, with what they mean; the documentation and the error for unknown names use this table.
VARIABLES: Mapping[str, str] = {
    "AFD_ROLE": "attention or ffn; unset means that vLLM is left alone",
    "AFD_FFN": "attention role: endpoints of the FFN servers, comma separated (unix:PATH or tcp://HOST:PORT)",
    "AFD_LISTEN": "ffn role: the endpoint to listen on",
    "AFD_GATE": "where the router of a mixture of experts runs: ffn (default) or attention",
    "AFD_CONNECT_TIMEOUT": "seconds to wait at start until an FFN server answers (default 60)",
    "AFD_CALL_TIMEOUT": "seconds until a call that no FFN server answers fails (default 30)",
    "AFD_SPIN_US": "microseconds of active waiting before a wait blocks (default 100; 0 turns it off)",
}

#: Kubernetes injects these for a service whose name starts with "afd"; they are never ours.
_INJECTED = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_.*)?)$")


@dataclass(frozen=True)
class AFDConfig:
    """The settings of one role, checked.

    Timeouts are seconds, ``spin_us`` is microseconds. ``ffn`` is empty for the ffn role, ``listen`` is ``None``
    for the attention role.
    """

    role: str
    ffn: tuple[Endpoint, ...] = ()
    listen: Endpoint | None = None
    gate: str = "ffn"
    connect_timeout: float = 60.0
    call_timeout: float = 30.0
    spin_us: int = 100

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(
                f"AFD_ROLE={self.role!r} is not a role{_nearest(self.role, ROLES)}; use one of: {', '.join(ROLES)}"
            )
        if self.gate not in GATES:
            raise ConfigError(
                f"AFD_GATE={self.gate!r} is not a place for the router{_nearest(self.gate, GATES)}; "
                f"use one of: {', '.join(GATES)}"
            )
        if self.role == "attention" and not self.ffn:
            raise ConfigError(
                "AFD_ROLE=attention needs to know where the FFN is; set AFD_FFN=unix:PATH or AFD_FFN=tcp://HOST:PORT"
            )
        if self.role == "attention" and self.listen is not None:
            raise ConfigError("AFD_LISTEN belongs to the ffn role, and this is the attention role; unset it")
        if self.role == "ffn" and self.ffn:
            raise ConfigError("AFD_FFN belongs to the attention role, and this is the ffn role; unset it")
        if len(set(self.ffn)) != len(self.ffn):
            raise ConfigError(f"AFD_FFN names an endpoint twice: {','.join(map(str, self.ffn))}; name each server once")
        for name, seconds in (("AFD_CONNECT_TIMEOUT", self.connect_timeout), ("AFD_CALL_TIMEOUT", self.call_timeout)):
            if not 0 < seconds <= MAX_SECONDS:  # NaN is not
                raise ConfigError(f"{name}={seconds} must be a positive number of seconds, {MAX_SECONDS} at most")
        if not 0 <= self.spin_us <= 10_000:
            raise ConfigError(f"AFD_SPIN_US={self.spin_us} must be between 0 and 10000 microseconds")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> AFDConfig | None:
        """The configuration that ``environ`` asks for, or ``None`` when ``AFD_ROLE`` is unset or empty."""
        role = environ.get("AFD_ROLE", "")
        if not role:
            return None
        _check_names(environ)
        return cls.build(
            role=role,
            ffn=[part for part in environ.get("AFD_FFN", "").split(",") if part.strip()],
            listen=environ.get("AFD_LISTEN") or None,
            gate=environ.get("AFD_GATE") or "ffn",
            connect_timeout=_number(environ, "AFD_CONNECT_TIMEOUT", 60.0),
            call_timeout=_number(environ, "AFD_CALL_TIMEOUT", 30.0),
            spin_us=_whole_number(environ, "AFD_SPIN_US", 100),
        )

    @classmethod
    def build(
        cls, *, role: str, ffn: Sequence[str] | str = (), listen: str | None = None, **settings: Any
    ) -> AFDConfig:
        """Like the constructor, with endpoints as text."""
        endpoints = [ffn] if isinstance(ffn, str) else ffn
        return cls(
            role=role,
            ffn=tuple(parse_endpoint(text, "AFD_FFN") for text in endpoints),
            listen=None if listen is None else parse_endpoint(listen, "AFD_LISTEN"),
            **settings,
        )

    def to_env(self) -> dict[str, str]:
        """The variables that make a child process choose the same configuration."""
        env = {
            "AFD_ROLE": self.role,
            "AFD_GATE": self.gate,
            "AFD_CONNECT_TIMEOUT": repr(self.connect_timeout),
            "AFD_CALL_TIMEOUT": repr(self.call_timeout),
            "AFD_SPIN_US": str(self.spin_us),
        }
        if self.ffn:
            env["AFD_FFN"] = ",".join(map(str, self.ffn))
        if self.listen is not None:
            env["AFD_LISTEN"] = str(self.listen)
        return env

    def graph_key(self) -> dict[str, str]:
        """What changes the compiled graph; goes into vLLM's ``additional_config``, which its caches hash."""
        return {"role": self.role, "gate": self.gate}


def _check_names(environ: Mapping[str, str]) -> None:
    for name in environ:
        if name.startswith("AFD_") and name not in VARIABLES and not _INJECTED.search(name):
            raise ConfigError(
                f"{name} is not a setting of afd_patch{_nearest(name, tuple(VARIABLES))}; known: {', '.join(VARIABLES)}"
            )


def _nearest(word: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number") from None


def _whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    number = _number(environ, name, float(default))
    if not number.is_integer():  # infinity and NaN are none
        raise ConfigError(f"{name}={environ[name]!r} is not a whole number")
    return int(number)
