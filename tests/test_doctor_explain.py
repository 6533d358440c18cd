"""``doctor --explain``: what is derived from vLLM's source is what the tables say, and a draft can be pasted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afd_patch import boundaries
from afd_patch.doctor import registry
from afd_patch.doctor.__main__ import main
from afd_patch.doctor.explain import explain
from afd_patch.doctor.model import Model
from afd_patch.doctor.names import Names
from afd_patch.doctor.source import installed

_tree = installed()
assert _tree is not None
INSTALLED = Path(_tree.where).parent
NAMES = Names(_tree)


@pytest.mark.parametrize("table", boundaries.TABLES, ids=lambda table: table.family)
def test_what_is_derived_from_the_source_is_what_the_tables_say(table: boundaries.Boundary) -> None:
    known = registry.architectures(NAMES.tree)
    for architecture in table.architectures:
        found = explain(NAMES, Model(architecture, boundary=table), known)
        assert table.decoder in (found["decoder"], *found["other_decoders"])
        if table.decoder == found["decoder"]:
            assert set(found["ffn"]) == {table.ffn_attribute, *table.ffn_summands}
            assert {cls for classes in found["ffn"].values() for cls in classes} <= set(table.ffn)
            assert {cls for classes in found["attention"].values() for cls in classes} <= set(table.attention)


def test_explain_drafts_a_table_for_an_architecture_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    architecture = "BailingMoeForCausalLM"
    assert architecture not in boundaries.architectures()
    assert main([architecture, "--explain", "--json", "--vllm-tree", str(INSTALLED)]) == 1
    report = json.loads(capsys.readouterr().out)
    found = report["explanation"]
    assert found["has_table"] is False
    table: boundaries.Boundary = eval(  # the draft is Python that can be pasted
        found["table"].partition("=")[2].strip(),
        {"Boundary": boundaries.Boundary, "Router": boundaries.Router, "WeightRules": boundaries.WeightRules},
    )
    assert table.decoder == "vllm.model_executor.models.bailing_moe:BailingMoeBlock"
    assert table.moe == ("vllm.model_executor.models.bailing_moe:BailingMoE",)
    assert table.router == boundaries.Router(always_shared=True), "it names shared experts"
    assert table.attention == ("vllm.model_executor.models.bailing_moe:BailingAttention",)
    assert table.weights.owner("model.layers.0.attention.dense.weight", 1) == "attention"
    assert "num_experts" not in found["parameters"][table.decoder]
    assert found["parameters"][table.decoder][0] == "config"
