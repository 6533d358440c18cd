"""Listening: what is taken, stale or impossible gets one clear sentence."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import Forked, Server, assert_right, free_endpoint

from afd_patch.connectors.endpoint import Endpoint, parse_endpoint
from afd_patch.errors import ConfigError
from afd_patch.ffn.listener import Listener

Start = Callable[..., Server]


def refusal(endpoint: Endpoint) -> str:
    """The one sentence with which listening at ``endpoint`` fails."""
    with pytest.raises(ConfigError) as error:
        Listener(endpoint)
    message = str(error.value)
    assert message.startswith(f"cannot listen on {endpoint}: ")
    assert "\n" not in message
    assert len(message) < 250
    return message


def test_a_taken_endpoint(endpoint: Endpoint, start: Start) -> None:
    server = start(endpoint)
    assert "is listening there; stop it or choose another endpoint" in refusal(endpoint)
    assert_right(server.client())


def test_a_taken_endpoint_whose_queue_is_full(unix: Endpoint) -> None:
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(unix.path)
        busy.listen(0)
        waiting = []
        for _ in range(3):
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(unix.path)
        assert "is listening there" in refusal(unix)
        for sock in waiting:
            sock.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_has_the_address_that_it_comes_from(host: str) -> None:
    try:
        with socket.create_server((host, 0), family=Endpoint("tcp", host=host).family) as taken:
            endpoint = Endpoint("tcp", host=host, port=taken.getsockname()[1])
    except OSError:
        assert host == "::1"
        pytest.skip("no IPv6 here")
    listener = Listener(endpoint)
    with socket.create_connection((host, endpoint.port)) as peer:
        sock, address = listener.accept()
        assert f"tcp://{address}" == str(Endpoint("tcp", host=host, port=peer.getsockname()[1]))
        sock.close()
    listener.close()


def test_the_socket_of_a_killed_server_is_replaced(unix: Endpoint, start: Start) -> None:
    start(unix).kill()
    assert os.path.lexists(unix.path)
    assert_right(start(unix).client())


def test_only_its_user_can_connect(unix: Endpoint) -> None:
    listener = Listener(unix)
    assert os.stat(unix.path).st_mode & 0o777 == 0o600
    listener.close()


@pytest.mark.parametrize("what", ["file", "folder", "link to nothing"])
def test_what_is_no_socket_is_left_alone(unix: Endpoint, what: str) -> None:
    path = Path(unix.path)
    if what == "file":
        path.write_text("precious")
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    assert "is not a socket; choose another path" in refusal(unix)
    assert os.path.lexists(path)
    assert what != "file" or path.read_text() == "precious"


def test_a_missing_folder(folder: Path) -> None:
    assert "not a folder that exists; create it first" in refusal(parse_endpoint(f"unix:{folder}/no/s"))


def test_a_path_under_a_file(folder: Path) -> None:
    (folder / "file").write_text("")
    assert "not a folder that exists" in refusal(parse_endpoint(f"unix:{folder}/file/s"))


@pytest.mark.parametrize("path", ["/proc/nope.sock", "/sys/nope.sock"])
def test_a_folder_that_takes_no_files(path: str) -> None:
    refusal(parse_endpoint(f"unix:{path}"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tcp://203.0.113.7:5000", "this host has no such address"),
        ("tcp://no-such-host.invalid:5000", ""),
        ("tcp://[2001:db8::7]:5000", ""),
    ],
)
def test_an_address_that_is_not_ours(text: str, says: str) -> None:
    assert says in refusal(parse_endpoint(text))


def test_close_removes_our_socket_only(unix: Endpoint) -> None:
    ours = Listener(unix)
    ours.close()
    assert not os.path.lexists(unix.path)
    ours = Listener(unix)
    os.unlink(unix.path)
    theirs = Listener(unix)
    ours.close()
    assert os.path.lexists(unix.path)
    theirs.close()
    theirs.close()
    assert not os.path.lexists(unix.path)


def test_close_when_the_folder_has_gone(folder: Path) -> None:
    (folder / "sub").mkdir()
    listener = Listener(free_endpoint("unix", folder / "sub"))
    os.unlink(folder / "sub" / "s")
    (folder / "sub").rmdir()
    listener.close()


def test_one_of_many_wins_the_stale_socket(unix: Endpoint, folder: Path) -> None:
    """Servers that start at the same moment do not take each other's socket for the stale one."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(unix.path)
    begin, tell = os.pipe()
    result, report = os.pipe()

    def unlink_late(path: Path, missing_ok: bool = False) -> None:
        time.sleep(0.05)  # so that all have looked before the first one acts
        unlink(path, missing_ok)

    unlink = Path.unlink

    def listen() -> None:
        Path.unlink = unlink_late  # type: ignore[method-assign, assignment]
        os.close(tell)
        os.read(begin, 1)
        try:
            listener = Listener(unix)
        except ConfigError:
            os.write(report, b"lost ")
        else:
            os.write(report, b"won ")
            signal.pause()  # holds what it won
            listener.close()

    processes = [Forked(listen, folder / f"{number}.log") for number in range(6)]
    os.close(tell)
    os.close(report)
    try:
        words: list[bytes] = []
        while len(words) < 6:
            words += os.read(result, 100).split()
        assert sorted(words) == [b"lost"] * 5 + [b"won"]
    finally:
        for process in processes:
            process.kill()
        os.close(begin)
        os.close(result)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("unix:", "names no path"),
        ("unix:/" + "x" * 107, "108 bytes long and the system takes 107"),
        ("unix:/" + "ü" * 54, "109 bytes long"),
        ("tcp://host", "is not tcp://HOST:PORT"),
        ("tcp://:80", "is not tcp://HOST:PORT"),
        ("tcp://host:0", "port between 1 and 65535"),
        ("tcp://host:65536", "port between 1 and 65535"),
        ("tcp://host:" + "9" * 5000, "port between 1 and 65535"),
        ("tcp://host:-1", "port between 1 and 65535"),
        ("tcp://host:8²", "port between 1 and 65535"),
        ("http://host:80", "is not an endpoint; write unix:PATH or tcp://HOST:PORT"),
        ("", "is not an endpoint"),
    ],
)
def test_a_wrong_endpoint_is_refused_before_any_socket_exists(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="AFD_LISTEN=") as error:
        parse_endpoint(text, "AFD_LISTEN")
    assert says in str(error.value)


@pytest.mark.parametrize("text", ["unix:/tmp/a.sock", "tcp://127.0.0.1:80", "tcp://[::1]:80", "tcp://host.name:65535"])
def test_an_endpoint_reads_as_it_was_written(text: str) -> None:
    assert str(parse_endpoint(text)) == text
    assert parse_endpoint(str(parse_endpoint(text))) == parse_endpoint(text)


def test_the_longest_path_works() -> None:
    folder = "/tmp/" + "x" * 90
    os.makedirs(folder, exist_ok=True)
    endpoint = parse_endpoint(f"unix:{folder}/" + "s" * (107 - len(folder) - 1))
    Listener(endpoint).close()
    os.rmdir(folder)
