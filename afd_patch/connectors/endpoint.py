"""Endpoints: ``unix:PATH`` and ``tcp://HOST:PORT``, parsed and checked before any socket exists."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from afd_patch.errors import ConfigError

#: Linux: sizeof(sockaddr_un.sun_path) is 108 and holds a terminating zero.
MAX_UNIX_PATH = 107


@dataclass(frozen=True)
class Endpoint:
    """Where an FFN server listens. ``kind`` is ``unix`` (with ``path``) or ``tcp`` (with ``host`` and ``port``)."""

    kind: str
    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix:{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        if self.kind == "unix":
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def address(self) -> str | tuple[str, int]:
        """What ``socket.connect`` takes."""
        return self.path if self.kind == "unix" else (self.host, self.port)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536


def parse_endpoint(text: str, setting: str = "endpoint") -> Endpoint:
    """Parse ``text``; ``setting`` is the variable or flag that the error names."""
    text = text.strip()
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path:
            raise ConfigError(f"{setting}={text!r} names no path; write unix:/some/path.sock")
        path = os.path.abspath(path)
        if len(os.fsencode(path)) > MAX_UNIX_PATH:
            raise ConfigError(
                f"{setting}={text!r}: the socket path is {len(os.fsencode(path))} bytes long and the system takes "
                f"{MAX_UNIX_PATH}; choose a shorter folder"
            )
        return Endpoint("unix", path=path)
    if text.startswith("tcp://"):
        host, colon, port = text.removeprefix("tcp://").rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not _is_port(port):
            raise ConfigError(f"{setting}={text!r} is not tcp://HOST:PORT with a port between 1 and 65535")
        return Endpoint("tcp", host=host, port=int(port))
    raise ConfigError(f"{setting}={text!r} is not an endpoint; write unix:PATH or tcp://HOST:PORT")
