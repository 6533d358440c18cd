"""``bench chaos``: what it counts, what it lets pass, and the proxy that disturbs the lines."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afd_patch.bench import chaos
from afd_patch.bench.chaos_streams import Record, Stream
from afd_patch.bench.proxy import Proxy
from afd_patch.connectors.endpoint import parse_endpoint
from afd_patch.connectors.wire import HEADER_SIZE
from tests.test_bench import bench, draw


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_chaos_without_vllm(tmp_path: Path, transport: str) -> None:
    events = "cut,corrupt,truncate,delay,SIGSTOP" if transport == "tcp" else "kill -9,cut"
    content = bench(tmp_path, "chaos", "--without-vllm", "--seconds", "5", "--transport", transport, "--events", events)
    assert (content["failed_requests"], content["changed_tokens"], content["stuck_streams"]) == (0, 0, 0)
    assert content["passed"] is True
    assert content["requests"] > 2
    assert all(event.get("applied", True) for event in content["events"])
    assert content["longest_stall_s"] > content["undisturbed_gap_s"]["p50"]


def stream_of(source: Any) -> Stream:
    stream = Stream(source, [[1, 2, 3]], 0, time.monotonic())
    stream.start()
    deadline = time.monotonic() + 5
    while stream.record.requests < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    stream.stop()
    stream.join(5)
    return stream


def summary(streams: list[Stream], happened: list[dict[str, Any]]) -> dict[str, Any]:
    calm = Record(0.0, gaps=[(0.0, 0.001)])
    proxy: Any = type("NoProxy", (), {"connections": 1})
    return chaos._summary(streams, calm, happened, proxy, timeout=10.0)


def summary_of(stream: Stream, outages: list[float]) -> dict[str, Any]:
    return summary([stream], [{"kind": chaos.KILL, "at": 0.0, "seconds": seconds} for seconds in outages])


def sound(prompt: int) -> Iterator[int]:
    yield from (1, 2, 3)


def test_a_changed_token_is_seen() -> None:
    def source(prompt: int) -> Iterator[int]:
        yield from (1, 7, 3)

    results = summary_of(stream_of(source), [1.0])
    assert results["changed_tokens"] == results["requests"]
    assert results["passed"] is False


def test_missing_tokens_are_changed_ones() -> None:
    def source(prompt: int) -> Iterator[int]:
        yield 1

    results = summary_of(stream_of(source), [1.0])
    assert results["changed_tokens"] == 2 * results["requests"]
    assert results["objections"] == ["tokens changed"]


def test_tokens_beyond_the_last_are_changed_ones() -> None:
    def source(prompt: int) -> Iterator[int]:
        yield from (1, 2, 3, 4, 5)

    results = summary_of(stream_of(source), [1.0])
    assert results["changed_tokens"] == 2 * results["requests"]


def test_tokens_before_a_failure_are_compared() -> None:
    def source(prompt: int) -> Iterator[int]:
        yield from (1, 7)
        raise ConnectionError("gone")

    results = summary_of(stream_of(source), [11.0])
    assert results["tokens"] == 2 * results["requests"]
    assert results["changed_tokens"] == results["requests"], "the third token is missing because the request failed"
    assert results["objections"] == ["tokens changed"]


def test_a_wait_that_ends_in_a_failure_is_a_stall() -> None:
    def source(prompt: int) -> Iterator[int]:
        yield from (1, 2)
        time.sleep(0.3)
        raise ConnectionError("gone")

    stream = stream_of(source)
    assert summary_of(stream, [])["longest_stall_s"] >= 0.3
    assert len(stream.record.gaps) == 3 * stream.record.requests
    assert stream.record.gaps_so_far() == stream.record.gaps, "nobody waits any more"


def test_a_stream_that_hangs_is_a_stall() -> None:
    released = threading.Event()

    def source(prompt: int) -> Iterator[int]:
        yield 1
        released.wait(30)

    stream = Stream(source, [[1, 2, 3]], 0, time.monotonic())
    stream.start()
    time.sleep(0.3)
    results = summary([stream], [{"kind": chaos.KILL, "at": 0.0, "seconds": 1.0}])
    stream.stop()
    released.set()
    stream.join(5)
    assert results["longest_stall_s"] >= 0.2
    assert results["objections"] == ["streams hang"]


def test_a_disturbance_that_met_no_frame_is_no_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = {"kind": "cut", "direction": "call", "applied": False, "at": 0.1, "seconds": 5.0}
    corrupt = {**cut, "kind": "corrupt", "applied": True}
    stream = stream_of(sound)
    nothing, something = summary([stream], [cut]), summary([stream], [cut, cut, corrupt])
    assert nothing["objections"] == ["nothing was disturbed"]
    assert something["passed"] is True
    assert {kind: count for kind, count in something["event_counts"].items() if count} == {"corrupt": 1}
    assert something["events_without_a_frame"] == {"cut": 2}
    content = {**something, "deployment": "none", "transport": "tcp", "call_timeout_s": 10.0}
    chaos.print_report(content)
    assert "met no frame        2 x cut (not counted as events)" in capsys.readouterr().out
    draw(tmp_path, "chaos", **content)


def test_a_run_without_requests_or_events_does_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    results = summary([], [])
    assert results["passed"] is False
    chaos.print_report({**results, "deployment": "none", "transport": "tcp", "call_timeout_s": 10.0})
    assert "NOT passed: no token came, nothing was disturbed" in capsys.readouterr().out


def test_a_disturbance_that_is_under_way_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its end (a long delay) only so long, and is no event that met nothing."""
    monkeypatch.setattr(chaos, "_NO_FRAME", 0.0)
    monkeypatch.setattr(chaos, "_PAUSE", (0.0, 0.0))
    proxy = Proxy(*(parse_endpoint(f"unix:{tmp_path}/{name}") for name in ("front", "behind")), random.Random(0))
    armed = proxy.disturb

    def at_once(kind: str, direction: str, seconds: float) -> Any:
        disturbance = armed(kind, direction, seconds)
        proxy._take(direction)
        return disturbance

    nobody: Any = None
    assert not any(
        e["applied"] for e in chaos._disturb(nobody, proxy, ["cut"], random.Random(0), time.monotonic(), 0.1)
    )
    monkeypatch.setattr(proxy, "disturb", at_once)
    happened = chaos._disturb(nobody, proxy, ["cut"], random.Random(0), time.monotonic(), 0.1)
    assert happened
    assert all(event["applied"] for event in happened)
    proxy.close()


def test_a_failed_request_is_forgiven_only_if_the_server_stayed_away() -> None:
    def source(prompt: int) -> Iterator[int]:
        yield 1
        raise ConnectionError("gone")

    stream = stream_of(source)
    assert summary_of(stream, [1.0])["failed_requests"] == stream.record.requests
    assert summary_of(stream, [1.0])["passed"] is False
    assert summary_of(stream, [11.0])["passed"] is True
    assert "gone" in stream.record.failures[0][1]


# -- the proxy ------------------------------------------------------------------------------------------------------


def test_a_proxy_without_a_server_hangs_up(tmp_path: Path) -> None:
    front, behind = (parse_endpoint(f"unix:{tmp_path}/{name}") for name in ("front", "behind"))
    proxy = Proxy(front, behind, random.Random(0))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(front.address)
        sock.settimeout(5)
        assert sock.recv(1) == b""
    proxy.close()


@pytest.mark.parametrize("speaker", ["client", "server"])
def test_a_proxy_hangs_up_on_both_sides_of_a_line_that_carries_no_frames(speaker: str, tmp_path: Path) -> None:
    front, behind = (parse_endpoint(f"unix:{tmp_path}/{name}") for name in ("front", "behind"))
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(behind.address)
        listener.listen()
        proxy = Proxy(front, behind, random.Random(0))
        client.connect(front.address)
        server, _ = listener.accept()
        with server:
            socket.send_fds(client if speaker == "client" else server, [b"x" * HEADER_SIZE], [writing])
            os.close(writing)
            for side in (client, server):
                side.settimeout(5)
                assert side.recv(1) == b""
        proxy.close()
    os.set_blocking(reading, False)
    assert os.read(reading, 1) == b"", "the descriptor that came with it is closed"
    os.close(reading)


def test_a_proxy_hangs_up_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    front, behind = (parse_endpoint(f"unix:{tmp_path}/{name}") for name in ("front", "behind"))
    near, client = socket.socketpair()
    far, server = socket.socketpair()
    proxy = Proxy(front, behind, random.Random(0))

    def defect(*_: object) -> bool:
        raise IndexError("a defect")

    monkeypatch.setattr(proxy, "_forward_frame", defect)
    with near, client, far, server:
        with pytest.raises(IndexError):
            proxy._pump(near, far, "call")
        for side in (client, server):
            side.settimeout(5)
            assert side.recv(1) == b""
    proxy.close()
