"""Boundary tables: who owns which checkpoint name, by the module that owns it and never by a substring."""

from __future__ import annotations

import pytest

from afd_patch import boundaries
from afd_patch.errors import UnsupportedError, WeightError

LAYERS = 4


def owner(architecture: str, name: str) -> str:
    return boundaries.find(architecture).weights.owner(name, LAYERS)


@pytest.mark.parametrize("architecture", boundaries.architectures())
def test_what_every_family_has(architecture: str) -> None:
    ffn = boundaries.find(architecture).weights.ffn_children[0]
    assert owner(architecture, "model.embed_tokens.weight") == "attention"
    assert owner(architecture, "lm_head.weight") == "attention"
    assert owner(architecture, "model.norm.weight") == "attention"
    assert owner(architecture, "model.layers.0.self_attn.q_proj.weight") == "attention"
    assert owner(architecture, "model.layers.3.post_attention_layernorm.weight") == "attention"
    assert owner(architecture, f"model.layers.3.{ffn}.down_proj.weight") == "ffn"
    assert owner(architecture, f"model.layers.3.{ffn}.gate.weight") == "ffn"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.1.mlp.experts.7.gate_proj.weight", "ffn"),
        ("model.layers.1.mlp.experts.7.gate_proj.weight_scale_inv", "ffn"),
        ("model.layers.1.mlp.experts.gate_up_proj", "ffn"),
        ("model.layers.1.mlp.experts.w13_weight", "ffn"),
        ("model.layers.1.mlp.experts.routed_experts.w2_weight", "ffn"),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", "ffn"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", "ffn"),
        ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "attention"),
        ("model.layers.1.self_attn.k_scale", "attention"),
        ("model.layers.1.self_attn.rotary_emb.inv_freq", "attention"),
        ("layers.1.mlp.gate_proj.weight", "ffn"),
        # A next-token-prediction layer follows the decoder layers; it has an FFN, and norms of its own.
        ("model.layers.4.mlp.experts.0.gate_proj.weight", "none"),
        ("model.layers.4.eh_proj.weight", "none"),
        ("model.layers.4.embed_tokens.weight", "none"),
    ],
)
def test_deepseek_names(name: str, expected: str) -> None:
    assert owner("DeepseekV3ForCausalLM", name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp_extra.weight",
        "model.layers.1.self_attention.q_proj.weight",
        "model.layers.1.gate.weight",
        "model.layers.1.weight",
        "model.layers.x.mlp.gate_proj.weight",
        "model.vision_tower.layers.1.mlp.gate_proj.weight",
        "encoder.layers.1.mlp.gate_proj.weight",
        "model.mlp.weight",
        "embed.weight",
        "",
    ],
)
def test_unknown_names_are_quoted(name: str) -> None:
    with pytest.raises(WeightError) as caught:
        owner("Qwen3MoeForCausalLM", name)
    assert repr(name) in str(caught.value)
    assert "boundary table" in str(caught.value)


def test_mixtral_has_no_mlp() -> None:
    assert owner("MixtralForCausalLM", "model.layers.0.block_sparse_moe.experts.1.w2.weight") == "ffn"
    with pytest.raises(WeightError):
        owner("MixtralForCausalLM", "model.layers.0.mlp.experts.1.w2.weight")


def test_an_architecture_without_a_table() -> None:
    with pytest.raises(UnsupportedError, match="nearest one is Qwen3MoeForCausalLM"):
        boundaries.find("Qwen3MoeForCausalLLM")


def test_tables_do_not_contradict_each_other() -> None:
    names = [name for table in boundaries.TABLES for name in table.architectures]
    assert len(names) == len(set(names))
    for table in boundaries.TABLES:
        assert table.ffn
        assert table.attention
        assert not set(table.ffn) & set(table.attention)
        assert not set(table.weights.ffn_children) & set(table.weights.attention_children)
