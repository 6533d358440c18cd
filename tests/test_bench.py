"""The benchmarks in small: what they count, the files they write, and what they say of wrong flags."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afd_patch.bench import load, models, pages, plots, report, serve
from afd_patch.bench.__main__ import main

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


def draw(folder: Path, benchmark: str, **content: Any) -> None:
    plots.draw({"benchmark": benchmark, **content}, folder / "plot.png")
    assert (folder / "plot.png").read_bytes().startswith(PNG)
    assert not any(isinstance(value, float) and math.isnan(value) for value in content.values())
