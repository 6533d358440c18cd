"""The documents say what the code says: patch points, settings, architectures, wire format, links and commands."""

from __future__ import annotations

import ast
import importlib.util
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from afd_patch import boundaries
from afd_patch.boundaries import Boundary
from afd_patch.config import VARIABLES
from afd_patch.connectors import wire
from afd_patch.connectors.endpoint import MAX_UNIX_PATH
from afd_patch.connectors.wire import DType, Header, Kind
from afd_patch.identity import Identity
from afd_patch.serve import flags
from tests.engine import (
    test_exact_compiled,
    test_exact_eager,
    test_gate_on_attention,
    test_more_architectures,
    test_v2_runner,
)

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md")), ROOT / "sitecustomize_example" / "README.md"]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def rows(page: Path, *header: str) -> list[list[str]]:
    """The cells of the one table of ``page`` that has this header, without their back-ticks."""
    lines = iter(page.read_text().splitlines())
    found = [list(_body(lines)) for line in lines if _cells(line) == list(header)]
    assert len(found) == 1, f"{len(found)} tables with {header} in {page.name}"
    return found[0]


def _body(lines: Iterator[str]) -> Iterator[list[str]]:
    assert set(next(lines)) <= set("| -"), "a table begins with its header"
    for line in lines:
        if not line.startswith("|"):
            return
        yield _cells(line)


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


# ---------------------------------------------------------------- patch points


def test_patch_points_are_those_of_the_code() -> None:
    command = [sys.executable, "-m", "afd_patch.patches.catalogue"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert (DOCS / "patch-points.md").read_text() == done.stdout, (
        "renew it: python -m afd_patch.patches.catalogue > docs/patch-points.md"
    )


def test_patch_points_are_written_without_vllm() -> None:
    code = (
        "import sys; from afd_patch.patches import catalogue; catalogue.render()\n"
        "sys.exit(not {'vllm', 'torch'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False).returncode == 0


def test_every_patch_says_why_where_and_until_when() -> None:
    code = (
        "from afd_patch.patches import catalogue\n"
        "print([p.name for p in catalogue._patches().values() if not (p.why and p.upstream and p.removal)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- links and commands


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """The anchors that a Markdown renderer makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_commands_name_modules_that_exist(page: Path) -> None:
    for name in re.findall(r"python -m (afd_patch[\w.]*)", page.read_text()):
        assert runs(name), f"{page.name}: python -m {name}"


def runs(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{name}.__main__")
    return spec is not None and '__name__ == "__main__"' in Path(str(spec.origin)).read_text()


@every_page
def test_files_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = re.findall(r"`((?:afd_patch|tests|docs|requirements|sitecustomize_example)/[\w./-]*)`", text)
    wanted = {"afd_patch/boundaries/qwen2_moe.py"} if page.name == "adding-a-model.md" else set()
    assert not [name for name in named if name not in wanted and not (ROOT / name).exists()]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"(?:`|^)make (\w+)", page.read_text(), re.MULTILINE)) <= targets, page.name


# ---------------------------------------------------------------- settings


@every_page
def test_no_setting_is_made_up(page: Path) -> None:
    assert set(re.findall(r"\bAFD_[A-Z_]+\b", page.read_text())) <= VARIABLES.keys()


def test_every_setting_is_described_as_in_the_code() -> None:
    table = rows(README, "Variable", "Flag", "Meaning")
    assert {name: meaning for name, _, meaning in table} == dict(VARIABLES)


def test_every_setting_has_its_flag() -> None:
    values = {"--role": "ffn", "--gate": "ffn"}
    for name, flag, _ in rows(README, "Variable", "Flag", "Meaning"):
        assert flag == name.replace("AFD_", "--").replace("_", "-").lower()
        _, left = flags.parse(["MODEL", flag, values.get(flag, "1")])
        assert left == [], f"{flag} goes to vLLM"


def test_every_option_that_is_refused_is_listed() -> None:
    """With the words of the code, except that one sentence there may be one row here for several options."""
    source = (ROOT / "afd_patch" / "patches" / "engine_config.py").read_text()
    options = set(re.findall(r"--[a-z][a-z-]+|AFD_GATE=attention", source))
    assert len(options) >= 10
    listed = " ".join(cell for row in rows(DOCS / "what-works.md", "Asked for", "Why not") for cell in row)
    assert not {option for option in options if option not in listed}


# ---------------------------------------------------------------- architectures

#: Names of the tiny checkpoints with which each architecture is tested.
CHECKPOINTS = {
    "DeepseekForCausalLM": ["deepseek_v1"],
    "DeepseekV2ForCausalLM": ["deepseek_v2", "deepseek_v2_qlora"],
    "DeepseekV32ForCausalLM": ["deepseek_v32"],
    "DeepseekV3ForCausalLM": ["deepseek_v3", "deepseek_v3_noqlora"],
    "DeepseekV4ForCausalLM": ["deepseek_v4"],
    "Ernie4_5_MoeForCausalLM": ["ernie4_5_moe"],
    "Glm4MoeForCausalLM": ["glm4_moe"],
    "GlmMoeDsaForCausalLM": ["glm_moe_dsa"],
    "GptOssForCausalLM": ["gpt_oss"],
    "Llama4ForCausalLM": ["llama4"],
    "MiniMaxM2ForCausalLM": ["minimax_m2"],
    "OlmoeForCausalLM": ["olmoe"],
    "Qwen2MoeForCausalLM": ["qwen2_moe"],
    "Qwen3NextForCausalLM": ["qwen3_next"],
    "Qwen3_5MoeForCausalLM": ["qwen3_5_moe_text"],
    "Qwen3_5MoeForConditionalGeneration": ["qwen3_5_moe"],
    "Step3TextForCausalLM": ["step3_text"],
    "LlamaForCausalLM": ["llama"],
    "MixtralForCausalLM": ["mixtral"],
    "Qwen3ForCausalLM": ["qwen3"],
    "Qwen3MoeForCausalLM": ["qwen3_moe"],
}
ROUTED, ROUTED_COMPILED = "Router in attention: eager", "Router in attention: compiled"
COLUMNS = (
    "Architecture", "Models", "Eager, bf16", "Eager, fp16 and fp32", "Compiled, bf16", "V2 model runner",
    ROUTED, ROUTED_COMPILED,
)  # fmt: skip


def parameters_of(function: Any, name: str = "architecture") -> set[str]:
    """The values that ``function`` is run with."""
    values: set[str] = set()
    for mark in function.pytestmark:
        names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
        if mark.name == "parametrize" and name in names:
            place = names.index(name)
            values |= {value if isinstance(value, str) else value[place] for value in mark.args[1]}
    return values


def test_every_architecture_is_in_the_table_of_what_works() -> None:
    assert [name for name, *_ in rows(README, *COLUMNS)] == list(boundaries.architectures())


def test_nothing_is_claimed_that_no_test_shows() -> None:
    shown = {
        "Eager, bf16": parameters_of(test_exact_eager.test_bfloat16)
        | parameters_of(test_more_architectures.test_exact_and_without_overlap),
        "Eager, fp16 and fp32": parameters_of(test_exact_eager.test_other_dtypes),
        "Compiled, bf16": parameters_of(test_exact_compiled.test_exact_and_separate)
        | parameters_of(test_more_architectures.test_exact_compiled),
        "V2 model runner": parameters_of(test_v2_runner.test_exact),
        ROUTED: parameters_of(test_gate_on_attention.test_exact),
        ROUTED_COMPILED: parameters_of(test_gate_on_attention.test_exact_compiled),
    }
    assert parameters_of(test_exact_eager.test_other_dtypes, "dtype") == {"float16", "float32"}
    for architecture, _, *cells in rows(README, *COLUMNS):
        for column, cell in zip(COLUMNS[2:], cells, strict=True):
            expected = ["exact"] if shown[column] & set(CHECKPOINTS[architecture]) else ["by hand", "not tested"]
            if is_refused(architecture, column):
                expected = ["refused"]
            assert cell in expected, f"{architecture}, {column}"


def is_refused(architecture: str, column: str) -> bool:
    mode = "DYNAMO_TRACE_ONCE" if column in ("Compiled, bf16", ROUTED_COMPILED) else "NONE"
    gate = "attention" if column in (ROUTED, ROUTED_COMPILED) else "ffn"
    return bool(test_more_architectures.reasons(architecture, mode, gate=gate))


def test_the_worked_example_is_a_table_for_the_installed_vllm() -> None:
    page = (DOCS / "adding-a-model.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Boundary(" in code]
    namespace = vars(ModuleType("example"))
    exec(code, namespace)
    (table,) = [value for value in namespace.values() if isinstance(value, Boundary)]
    assert table.architectures[0] in page
    for name in (table.decoder, *table.ffn, *table.attention):
        module, _, cls = name.partition(":")
        assert cls in classes(module), f"{module} defines no {cls}"


def classes(module: str) -> set[str]:
    """The classes that a module of vLLM defines, read from its source: importing vLLM takes many seconds."""
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None, "the tests need vLLM"
    assert vllm.origin is not None
    path = Path(vllm.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}


# ---------------------------------------------------------------- wire protocol

WIRE = DOCS / "wire-protocol.md"


def test_header_fields_are_where_the_table_says() -> None:
    table = [
        (int(offset), int(size), name) for offset, size, name, _ in rows(WIRE, "Offset", "Bytes", "Field", "Meaning")
    ]
    places = {name: (offset, size) for offset, size, name in table}
    assert set(places) == {*Header._fields, "magic", "version", "checksum"}
    end = 0
    for offset, size, _ in table:
        assert offset == end, "without gaps, in order"
        end = offset + size
    assert end == wire.HEADER_SIZE
    zero = Header(Kind.HELLO).pack()
    for name in Header._fields:
        offset, size = places[name]
        value = {"kind": Kind.ERROR, "dtype": DType.FLOAT32}.get(name, 256**size - 1)
        packed = Header(Kind.HELLO)._replace(**{name: value}).pack()
        changed = [place for place in range(wire.HEADER_SIZE) if packed[place] != zero[place]]
        checksum = range(places["checksum"][0], wire.HEADER_SIZE)
        assert [place for place in changed if place not in checksum] == list(range(offset, offset + size)), name
    meanings = {name: meaning for _, _, name, meaning in rows(WIRE, "Offset", "Bytes", "Field", "Meaning")}
    assert meanings["version"] == f"protocol version, {wire.PROTOCOL_VERSION}"
    assert zero[:4] == wire.MAGIC == meanings["magic"].encode()
    assert struct.unpack_from("<H", zero, places["version"][0]) == (wire.PROTOCOL_VERSION,)


def test_codes() -> None:
    assert [(int(code), name) for code, name, *_ in rows(WIRE, "Code", "kind", "From", "Payload")] == [
        (int(kind), kind.name) for kind in Kind
    ]
    assert [(int(code), name) for code, name in rows(WIRE, "Code", "dtype")] == [(int(d), d.name) for d in DType]
    assert f"protocol version {wire.PROTOCOL_VERSION}" in WIRE.read_text()


def test_every_field_of_the_handshake_is_described() -> None:
    types = {"text": "str", "number": "int", "true or false": "bool"}
    table = rows(WIRE, "Field", "Type", "Meaning")
    assert [(name, types[kind]) for name, kind, _ in table] == [(field.name, field.type) for field in fields(Identity)]


def test_limits() -> None:
    from afd_patch.connectors import stream
    from afd_patch.connectors.client import HANDSHAKE_TIMEOUT
    from afd_patch.ffn.peer import FRAME_TIMEOUT
    from afd_patch.serve.roles import FFN_MAX_ROWS

    limits = dict(rows(WIRE, "Limit", "Value"))
    assert limits["text of `HELLO`, `WELCOME`, `REFUSE`, `ERROR"] == f"{wire.MAX_TEXT} bytes"
    assert limits["path of a Unix socket"] == f"{MAX_UNIX_PATH} bytes"
    assert limits["rest of a frame, once it has begun"] == f"{FRAME_TIMEOUT:g} s" == f"{HANDSHAKE_TIMEOUT:g} s"
    assert limits["one attempt to connect, of several"] == f"{stream._ATTEMPT:g} s"
    (gone,) = [value for limit, value in limits.items() if limit.startswith("until the kernel gives up")]
    assert gone == f"{stream._IDLE + stream._INTERVAL * stream._PROBES} s"
    assert f"without that flag takes {FFN_MAX_ROWS}" in WIRE.read_text()
