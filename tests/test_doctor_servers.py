"""The doctor and FFN servers: who answers, is it ready, and does it serve the model in question?"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from afd_patch import tiny
from afd_patch.connectors.endpoint import Endpoint, parse_endpoint
from afd_patch.doctor import endpoints
from afd_patch.doctor.endpoints import ask, nobodys_identity
from afd_patch.doctor.findings import Section
from afd_patch.doctor.model import check_model, find_model, identity_of
from afd_patch.ffn.listener import Listener
from afd_patch.ffn.server import FFNServer
from afd_patch.hosting import free_port
from afd_patch.identity import Identity, weights_fingerprint


def texts(section: Section, level: str) -> list[str]:
    return [str(f) for f in section.findings if f.level == level]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="afd-"))
    yield path
    shutil.rmtree(path)


def who(**changes: Any) -> Identity:
    values: dict[str, Any] = {
        "vllm": "0.32.0", "model": "0123456789abcdef", "weights": "fedcba9876543210", "architecture": "XForCausalLM",
        "boundary": "x", "gate": "ffn", "dtype": "bfloat16", "hidden_size": 64,
        "request_columns": 64, "reply_columns": 64, "layers": 2, "compiled": True, "max_rows": 16,
    }  # fmt: skip
    return Identity(**{**values, **changes})


@contextmanager
def serving(endpoint: Endpoint, identity: Identity, *, ready: bool = True) -> Iterator[FFNServer]:
    server = FFNServer(Listener(endpoint), identity)
    loop = threading.Thread(target=(lambda: server.serve(lambda _, rows: rows)) if ready else server.shake_hands)
    loop.start()
    try:
        yield server
    finally:
        server.stop_loop()
        loop.join()
        server.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("identity", [who(), who(dtype="float32", compiled=False)])
def test_a_server_says_who_it_is_and_computes_nothing(kind: str, identity: Identity, folder: Path) -> None:
    endpoint = parse_endpoint(f"unix:{folder}/s" if kind == "unix" else f"tcp://127.0.0.1:{free_port()}")
    with serving(endpoint, identity) as server:
        answer = ask(endpoint)
        assert server.calls == 0
    assert answer.trouble == ""
    assert answer.ready
    assert answer.identity == {**identity.to_json(), "max_rows": answer.identity["max_rows"]}  # type: ignore[index]


def test_every_difference_can_be_told() -> None:
    """What nobody announces differs from what servers announce, or is one of its possible values."""
    nobody, server = nobodys_identity(), who()
    refusal = f"unix:/s refused: {server.mismatch(nobody)}"
    assert endpoints.parse_refusal(refusal, nobody) == {**server.to_json(), "max_rows": nobody.max_rows}
    assert endpoints.parse_refusal("unix:/s refused: full", nobody) is None


def test_a_server_that_is_loading(folder: Path) -> None:
    endpoint = parse_endpoint(f"unix:{folder}/s")
    with serving(endpoint, who(), ready=False):
        answer = ask(endpoint)
    assert not answer.ready
    section = endpoints.describe([answer], {}, None)
    assert any("still loading" in text for text in texts(section, "note"))


def test_servers_that_differ_from_each_other(folder: Path) -> None:
    places = [parse_endpoint(f"unix:{folder}/{name}") for name in "ab"]
    with serving(places[0], who()), serving(places[1], who(weights="other")):
        section = endpoints.describe(endpoints.ask_all(tuple(places)), {}, None)
    (sentence,) = texts(section, "problem")
    assert f"it differs from {places[0]} in weights" in sentence


def test_nobody_is_there(folder: Path) -> None:
    assert "no such socket" in ask(parse_endpoint(f"unix:{folder}/s")).trouble
    assert "nobody listens" in ask(parse_endpoint(f"tcp://127.0.0.1:{free_port()}")).trouble


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + b" " * 64, b""])
def test_somebody_else_is_there(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(answer)

        thread = threading.Thread(target=run)
        thread.start()
        found = ask(parse_endpoint(f"tcp://127.0.0.1:{listener.getsockname()[1]}"))
        thread.join()
    assert "does not answer as an FFN server" in found.trouble


def test_a_silent_listener_costs_no_more_than_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = ask(parse_endpoint(f"tcp://127.0.0.1:{listener.getsockname()[1]}"), timeout=0.2)
    assert "no answer within the time limit" in found.trouble


def test_whether_a_server_serves_this_model(tmp_path: Path, folder: Path) -> None:
    checkpoint = tiny.make("mixtral", tmp_path / "mixtral")
    model = find_model(str(checkpoint), {})
    check_model(model, None, {})
    config = model.text_config
    mine = identity_of(model, "0.32.0", "ffn")
    same = who(
        weights=weights_fingerprint(checkpoint), architecture="MixtralForCausalLM", boundary="mixtral",
        hidden_size=config["hidden_size"], layers=config["num_hidden_layers"],
    )  # fmt: skip
    places = [parse_endpoint(f"unix:{folder}/{name}") for name in "ab"]
    with serving(places[0], same), serving(places[1], who(dtype="float16")):
        right, wrong = (endpoints.describe([ask(place)], mine, None) for place in places)
        whole = {**same.to_json(), "compiled": False, "max_rows": 7}
        by_flags = endpoints.describe([ask(places[0])], mine, whole)
    assert texts(right, "problem") == texts(right, "note") == []
    assert any("it serves this model" in text for text in texts(right, "ok"))
    (sentence,) = texts(wrong, "problem")
    assert "architecture 'XForCausalLM' there, 'MixtralForCausalLM' here" in sentence
    assert f"weights {who().weights!r} there, {same.weights!r} here" in sentence
    (sentence,) = texts(wrong, "note")
    assert "dtype 'float16' there, 'bfloat16' here" in sentence
    (sentence,) = texts(by_flags, "note")
    assert "compiled True there, False here" in sentence
    assert texts(by_flags, "problem") == []
