"""Which cores the ranks of a role get, from the launcher and in an FFN server of its own."""

from __future__ import annotations

import os

import pytest

from afd_patch.errors import ConfigError
from afd_patch.serve.launcher import all_cores, divide_cores
from afd_patch.serve.roles import cores_of_ranks, tensor_parallel_size


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return 8


@pytest.mark.parametrize(
    ("available", "attention", "ffn", "expected"),
    [
        (8, 1, 1, ("0,1,2,3", "4,5,6,7")),
        (8, 2, 1, ("0,1|2,3", "4,5,6,7")),
        (8, 1, 2, ("0,1,2,3", "4,5|6,7")),
        (8, 2, 3, ("0,1|2,3", "4|5|6,7")),
        # A half is too small for its ranks: they spread over all cores, and the roles take turns.
        (2, 2, 2, ("0|1", "0|1")),
        (2, 1, 2, ("0", "0|1")),
        (2, 2, 1, ("0|1", "1")),
        # More ranks than cores.
        (2, 3, 1, ("0|1|0", "1")),
        (1, 2, 1, ("0|0", "0")),
        (1, 1, 1, (None, None)),
    ],
)
def test_the_launcher_divides(
    available: int, attention: int, ffn: int, expected: tuple[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(available)))
    assert divide_cores(attention, ffn) == expected


@pytest.mark.parametrize(
    ("chosen", "attention", "ffn", "expected"),
    [
        ("0-5", 1, 1, ("0-5", "6,7")),
        ("0-2|3-5", 2, 2, ("0-2|3-5", "6|7")),
        ("0-3|4-6", 2, 2, ("0-3|4-6", "0,1,2,3|4,5,6,7")),
        ("0-7", 1, 1, ("0-7", None)),
    ],
)
def test_the_launcher_keeps_what_the_user_chose(
    chosen: str, attention: int, ffn: int, expected: tuple[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", chosen)
    assert divide_cores(attention, ffn) == expected


def test_shared_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all_cores() == ("0,1,2,3,4,5,6,7", "0,1,2,3,4,5,6,7")
    with pytest.raises(ConfigError, match="does not go with tensor parallelism"):
        all_cores(1, 2)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    with pytest.raises(ConfigError, match="'0-3' chooses some; leave one of the two out"):
        all_cores(1, 1)


def test_the_launcher_refuses_cores_for_other_numbers_of_ranks(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    with pytest.raises(ConfigError, match=r"names the cores of 1 rank\(s\), and the attention role has 2"):
        divide_cores(2, 1)


@pytest.mark.parametrize(
    ("binding", "ranks", "expected"),
    [
        ("auto", 1, None),
        ("nobind", 2, None),
        ("auto", 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ("0-1,4|5", 2, [{0, 1, 4}, {5}]),
        ("3", 1, [{3}]),
    ],
)
def test_an_ffn_server_divides(binding: str, ranks: int, expected: list[set[int]] | None, cores: int) -> None:
    assert cores_of_ranks(binding, ranks) == expected


@pytest.mark.parametrize(
    ("binding", "ranks", "expected"),
    [
        ("0|1", 1, r"names the cores of 2 rank\(s\), and the FFN role has 1"),
        ("0", 2, r"names the cores of 1 rank\(s\), and the FFN role has 2"),
        ("0|9", 2, "names cores that this process may not use"),
        ("0|", 2, "is not a list of cores"),
    ],
)
def test_an_ffn_server_refuses(binding: str, ranks: int, expected: str, cores: int) -> None:
    with pytest.raises(ConfigError, match=expected):
        cores_of_ranks(binding, ranks)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 1),
        (["--tensor-parallel-size", "4"], 4),
        (["--dtype", "bfloat16", "-tp", "2"], 2),
        (["--tensor_parallel_size=3"], 3),
        (["-tp=2", "--tensor-parallel-size=5"], 5),
    ],
)
def test_the_number_of_ranks_is_read_from_vllms_flags(flags: list[str], expected: int) -> None:
    assert tensor_parallel_size(flags) == expected


@pytest.mark.parametrize("flags", [["-tp", "two"], ["-tp", "0"], ["--tensor-parallel-size"]])
def test_a_wrong_number_of_ranks(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="tensor-parallel-size"):
        tensor_parallel_size(flags)
