"""The listening socket of an FFN server: taken endpoints, stale socket files and bad folders get one clear sentence."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from afd_patch.connectors.endpoint import Endpoint
from afd_patch.errors import ConfigError

_BACKLOG = 128
#: Seconds to wait for another server that starts in the same folder.
_LOCK_TIMEOUT = 2.0


class Listener:
    """Listens on ``endpoint`` until ``close``; raises ``ConfigError`` when it cannot."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.socket = socket.socket(endpoint.family, socket.SOCK_STREAM)
        self._file: tuple[int, int] | None = None
        try:
            if endpoint.kind == "unix":
                self._listen_unix(Path(endpoint.path))
            else:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(endpoint.address)
                self.socket.listen(_BACKLOG)
            self.socket.setblocking(False)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot listen on {endpoint}: {_reason(error)}") from error
        except ConfigError:
            self.close()
            raise

    def _listen_unix(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise ConfigError(
                f"cannot listen on {self.endpoint}: {path.parent} is not a folder that exists; create it first"
            )
        with _locked(path.parent):
            if os.path.lexists(path):
                self._remove_stale(path)
            self.socket.bind(str(path))
            self._file = _inode(path)
            os.chmod(path, 0o600)
            self.socket.listen(_BACKLOG)

    def _remove_stale(self, path: Path) -> None:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(
                f"cannot listen on {self.endpoint}: {path} exists and is not a socket; choose another path"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)  # left behind by a server that was killed
                return
            except BlockingIOError:
                pass  # its queue is full
        raise OSError(errno.EADDRINUSE, "taken")

    def accept(self) -> tuple[socket.socket, str]:
        """A new connection, and the address that it comes from; over a Unix socket that is empty."""
        sock, address = self.socket.accept()
        if sock.family == socket.AF_UNIX:
            return sock, ""
        host, port = address[:2]
        return sock, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Stop listening and remove our socket file, unless somebody else's is there by now."""
        if self._file is not None:
            path = Path(self.endpoint.path)
            # As long as our socket is open, nobody else's file can have its inode.
            with suppress(OSError):
                if _inode(path) == self._file:
                    path.unlink()
            self._file = None
        self.socket.close()


def _inode(path: Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other servers from looking at the sockets in ``folder``: two could find the same stale one."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        give_up = time.monotonic() + _LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                # Some file systems have no locks, and strangers may hold one for long: then we do without.
                if error.errno != errno.EWOULDBLOCK or time.monotonic() >= give_up:
                    break
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another process is listening there; stop it or choose another endpoint"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"this user may not create it ({error.strerror}); choose another folder or port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this host has no such address; use one of its own, or 0.0.0.0"
    return f"{error.strerror or error}"
