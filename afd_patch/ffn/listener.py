"""The listening socket of an FFN server: taken endpoints, stale socket files and bad folders get one clear sentence."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from afd_patch.connectors.endpoint import Endpoint
from afd_patch.errors import ConfigError


class Listener:
    """Listens on ``endpoint`` until ``close``; raises ``ConfigError`` when it cannot."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.socket = socket.socket(endpoint.family, socket.SOCK_STREAM)
        self._inode: int | None = None
        try:
            if endpoint.kind == "unix":
                self._bind_unix(Path(endpoint.path))
            else:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(endpoint.address)
            self.socket.listen(128)
            self.socket.setblocking(False)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot listen on {endpoint}: {_reason(error)}") from error
        except ConfigError:
            self.close()
            raise

    def _bind_unix(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise ConfigError(f"cannot listen on {self.endpoint}: the folder {path.parent} does not exist; create it first")
        if path.exists() or path.is_symlink():
            self._remove_stale(path)
        self.socket.bind(str(path))
        os.chmod(path, 0o600)
        self._inode = os.stat(path).st_ino

    def _remove_stale(self, path: Path) -> None:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"cannot listen on {self.endpoint}: {path} exists and is not a socket; choose another path")
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            probe.settimeout(1.0)
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # left behind by a server that was killed
        else:
            raise ConfigError(f"cannot listen on {self.endpoint}: another server is listening there; stop it or choose another path")
        finally:
            probe.close()

    def close(self) -> None:
        """Stop listening and remove our socket file, unless somebody else's is there by now."""
        self.socket.close()
        if self._inode is not None:
            path = Path(self.endpoint.path)
            if path.exists() and os.stat(path).st_ino == self._inode:
                path.unlink()
            self._inode = None


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another process is listening there; stop it or choose another endpoint"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"this user may not create it ({error.strerror}); choose another folder or port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this host has no such address; use one of its own, or 0.0.0.0"
    return f"{error.strerror or error}"
