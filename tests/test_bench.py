"""The benchmarks in small: what they count, the files they write, and what they say of wrong flags."""

from __future__ import annotations

import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afd_patch.bench import chaos, load, models, pages, plots, report, serve
from afd_patch.bench.__main__ import main
from afd_patch.bench.chaos_streams import Record, Stream
from afd_patch.bench.proxy import Proxy
from afd_patch.connectors.endpoint import parse_endpoint
from afd_patch.connectors.wire import HEADER_SIZE

PNG = b"\x89PNG\r\n\x1a\n"


def bench(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the command in a process of its own; its JSON file."""
    files = ["--json", str(folder / "out.json"), "--plot", str(folder / "plot.png")]
    command = [sys.executable, "-m", "afd_patch.bench", *arguments, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert (folder / "plot.png").read_bytes().startswith(PNG)
    content: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert content["benchmark"] == arguments[0]
    assert content["command"].startswith(f"python -m afd_patch.bench {arguments[0]} ")
    assert {"date", "cores", "versions"} <= content["environment"].keys()
    return content


# -- flags --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["handoff", "--cores", "0,4095"], "--cores '0,4095' names cores that this process may not use: [4095]"),
        (["handoff", "--cores", "a,b"], "--cores 'a,b' names no cores; write numbers"),
        (["handoff", "--cores", "0"], "--cores '0' is not A,B"),
        (["handoff", "--rows", "1,x"], "--rows '1,x' is not a list of positive numbers"),
        (["handoff", "--transports", "udp"], "--transports 'udp' is not a list of unix and tcp"),
        (["handoff", "--json", "/nowhere/out.json"], "the folder /nowhere does not exist"),
        (["handoff", "--plot", "out.svg"], "choose a name that ends in .png"),
        (["serve", "--only", "nothing"], "no workload has 'nothing' in its name"),
        (["serve", "/nowhere"], "/nowhere is no model folder"),
        (["load", "--rounds", "0"], "--rounds must be at least 1"),
        (["chaos", "--events", "earthquake"], "--events 'earthquake' is none of kill -9, SIGSTOP"),
        (["chaos", "--seconds", "0"], "must be positive"),
        (["chaos", "--without-vllm", "--enforce-eager"], "--without-vllm has no use for --enforce-eager"),
    ],
)
def test_wrong_flags_get_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("afd_patch: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_unknown_flags_are_refused_where_no_vllm_would_take_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["handoff", "--enforce-eager"])
    assert error.value.code == 2
    assert "--enforce-eager" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["handoff", "--plot", "out.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_percentiles_and_cores() -> None:
    assert report.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert report.percentile([float(i) for i in range(100)], 99) == 99.0
    assert report.core_set("0,2-4") == {0, 2, 3, 4}
    ours, theirs = report.divide(None)
    assert report.core_set(ours)
    assert report.core_set(theirs)


# -- handoff ------------------------------------------------------------------------------------------------------


def test_handoff_without_vllm(tmp_path: Path) -> None:
    content = bench(tmp_path, "handoff", "--no-op", "--rows", "1,40", "--hidden", "64", "--rounds", "2", "--calls", "5")
    assert [(entry["transport"], entry["rows"]) for entry in content["results"]] == [
        ("unix", 1), ("unix", 40), ("tcp", 1), ("tcp", 40),
    ]  # fmt: skip
    for entry in content["results"]:
        assert list(entry["us"]) == ["blocking floor", "active floor", "connector"]
        assert all(0 < value["p50"] <= value["p99"] and value["calls"] == 10 for value in entry["us"].values())
        assert ("connector_bar_met" in entry) == (entry["rows"] <= 32)


def test_handoff_with_the_op_of_a_real_forward(tmp_path: Path) -> None:
    content = bench(
        tmp_path, "handoff", "--rows", "4", "--hidden", "64", "--transports", "unix", "--rounds", "1", "--calls", "5"
    )
    (entry,) = content["results"]
    assert entry["us"]["op"]["p50"] > 0
    assert {"op", "connector"} <= entry["ratio_to_blocking"].keys()
    assert "op_bar_met" in entry


# -- serve --------------------------------------------------------------------------------------------------------


class FakeEngine:
    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.asked: list[dict[str, int]] = []
        self._seconds = seconds

    def ask(self, **command: int) -> dict[str, Any]:
        self.asked.append(command)
        return {"seconds": self._seconds, "generated": command["batch"] * command["new"]}


def test_serve_compares_with_the_best_stock_setting(tmp_path: Path) -> None:
    engines: list[Any] = [
        FakeEngine("stock, one", 2.0),
        FakeEngine("stock, two", 1.0),
        FakeEngine(serve.DIVIDED, 4.0),
        FakeEngine(serve.SHARED, 2.0),
    ]
    rates = serve._take_turns(engines, serve.WORKLOADS, 3)
    results = [serve._summary(name, rates[name], prompts) for name, _, _, _, prompts in serve.WORKLOADS]
    by_name = {entry["workload"]: entry for entry in results}
    rate = {"stock, one": 256.0, "stock, two": 512.0, serve.DIVIDED: 128.0, serve.SHARED: 256.0}
    assert by_name["decode 8"]["tokens_per_second"] == rate
    assert by_name["prefill 8x256"]["tokens_per_second"][serve.DIVIDED] == 8 * 256 / 4
    assert all(entry["best_stock"] == "stock, two" for entry in results)
    assert all(entry["to_best_stock"] == {serve.DIVIDED: 0.25, serve.SHARED: 0.5} for entry in results)
    # Everybody generated the same, in the same order.
    assert engines[0].asked == engines[1].asked == engines[2].asked
    assert len(engines[0].asked) == 4 * (3 + 1)
    draw(tmp_path, "serve", results=results, parameters=1e6, engine="processes")


# -- load ---------------------------------------------------------------------------------------------------------


def test_what_a_role_owns(tmp_path: Path) -> None:
    model = models.checkpoint(None, tmp_path, "qwen3_moe")
    owned = load._owned(model)
    assert owned["attention"] > 0
    assert owned["ffn"] > owned["attention"]
    assert owned["attention"] + owned["ffn"] == owned["stock"] == 2 * models.parameters(model)


def test_pages_see_what_was_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(random.randbytes(1 << 20))
    assert pages.cached([file]) == 1 << 20
    pages.evict([file])
    if pages.cached([file]):
        pytest.skip("this file system keeps its files in memory")
    with file.open("rb") as opened:
        opened.read(4096)
    assert pages.cached([file]) >= 4096
    file.read_bytes()
    assert pages.cached([file]) == 1 << 20


def test_load_summary(tmp_path: Path) -> None:
    def one(growth: int, before: int = 0) -> dict[str, Any]:
        return {"cached_before": before, "read": 1050, "asked": 1000, "resident_growth": growth, "peak_growth": 2000}

    entry = load._summary("ffn", 1000, [one(1100), one(1151), one(9000)])
    assert (entry["read_to_owned"], entry["read_bar_met"]) == (1.05, True)
    assert (entry["resident_to_owned"], entry["resident_bar_met"]) == (1.151, False)
    assert load._summary("ffn", 1000, [one(1100, before=900)])["read_bar_met"] is None
    draw(tmp_path, "load", results=[entry], parameters=1e6)


# -- chaos --------------------------------------------------------------------------------------------------------


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


def draw(folder: Path, benchmark: str, **content: Any) -> None:
    plots.draw({"benchmark": benchmark, **content}, folder / "plot.png")
    assert (folder / "plot.png").read_bytes().startswith(PNG)
    assert not any(isinstance(value, float) and math.isnan(value) for value in content.values())
