"""AFDConfig: from the environment and back, and what it refuses."""

from __future__ import annotations

import pytest

from afd_patch.config import AFDConfig
from afd_patch.connectors.endpoint import parse_endpoint
from afd_patch.errors import ConfigError

ATTENTION = {"AFD_ROLE": "attention", "AFD_FFN": "unix:/run/a.sock, tcp://[::1]:7000"}


def test_unset_and_empty_mean_no_role() -> None:
    assert AFDConfig.from_env({}) is None
    assert AFDConfig.from_env({"AFD_ROLE": "", "AFD_FFN": "nonsense", "AFD_WHAT": "1"}) is None


@pytest.mark.parametrize(
    "environ",
    [
        ATTENTION,
        {**ATTENTION, "AFD_CALL_TIMEOUT": "2.5", "AFD_CONNECT_TIMEOUT": "7", "AFD_SPIN_US": "0"},
        {"AFD_ROLE": "ffn", "AFD_LISTEN": "tcp://0.0.0.0:7000"},
    ],
)
def test_children_get_the_same_configuration(environ: dict[str, str]) -> None:
    config = AFDConfig.from_env(environ)
    assert config is not None
    assert AFDConfig.from_env(config.to_env()) == config


def test_several_servers() -> None:
    config = AFDConfig.from_env(ATTENTION)
    assert config is not None
    assert [str(endpoint) for endpoint in config.ffn] == ["unix:/run/a.sock", "tcp://[::1]:7000"]


def test_the_graph_key_has_what_changes_the_graph_and_no_addresses() -> None:
    key = AFDConfig.build(role="attention", ffn="unix:/a").graph_key()
    assert key == AFDConfig.build(role="attention", ffn="unix:/b", call_timeout=1).graph_key()
    assert key != AFDConfig.build(role="attention", ffn="unix:/a", gate="attention").graph_key()
    assert key != AFDConfig.build(role="ffn", listen="unix:/a").graph_key()


@pytest.mark.parametrize(
    "name",
    [
        "AFD_FFN_SERVICE_HOST",
        "AFD_FFN_SERVICE_PORT",
        "AFD_FFN_SERVICE_PORT_HTTP",
        "AFD_PORT",
        "AFD_FFN_PORT_80_TCP_ADDR",
    ],
)
def test_names_that_kubernetes_injects_are_none_of_ours(name: str) -> None:
    assert AFDConfig.from_env({**ATTENTION, name: "10.0.0.1"}) is not None


def test_a_misspelt_name_is_not_ignored() -> None:
    with pytest.raises(ConfigError, match=r"AFD_CONECT_TIMEOUT .*did you mean 'AFD_CONNECT_TIMEOUT'"):
        AFDConfig.from_env({**ATTENTION, "AFD_CONECT_TIMEOUT": "3"})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"role": "ffn", "ffn": "unix:/a"}, "AFD_FFN belongs to the attention role"),
        ({"role": "attention", "ffn": "unix:/a", "listen": "unix:/b"}, "AFD_LISTEN belongs to the ffn role"),
        ({"role": "attention", "ffn": "unix:/a", "call_timeout": float("nan")}, "positive number"),
        ({"role": "attention", "ffn": "unix:/a", "connect_timeout": 7 * 86400 + 1}, "604800 at most"),
        ({"role": "attention", "ffn": "unix:/a", "spin_us": 10**6}, "between 0 and 10000"),
    ],
)
def test_contradictions(settings: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        AFDConfig.build(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["AFD_CONNECT_TIMEOUT", "AFD_CALL_TIMEOUT"])
@pytest.mark.parametrize("text", ["0", "-1", "1e10", "1e400", "inf", "-inf", "nan"])
def test_times_that_no_clock_takes(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.* must be a positive number of seconds, 604800 at most$"):
        AFDConfig.from_env({**ATTENTION, name: text})


def test_a_week_is_a_timeout() -> None:
    assert AFDConfig.build(role="attention", ffn="unix:/a", call_timeout=7 * 86400).call_timeout == 604800


@pytest.mark.parametrize("text", ["1.9", "inf", "-inf", "nan", "1e400"])
def test_spinning_is_a_whole_number_of_microseconds(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^AFD_SPIN_US='{text}' is not a whole number$"):
        AFDConfig.from_env({**ATTENTION, "AFD_SPIN_US": text})


@pytest.mark.parametrize(
    "text", ["unix:", "tcp://:1", "tcp://h:0", "tcp://h:65536", "tcp://h:\u0661", "http://h:1", "h:1"]
)
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_endpoint(text, "AFD_FFN")
    assert text in str(caught.value)
    assert "AFD_FFN" in str(caught.value)


def test_relative_paths_mean_the_same_in_every_process(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert parse_endpoint("unix:ffn.sock").path == f"{tmp_path}/ffn.sock"
