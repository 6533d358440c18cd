"""Boundary tables: who owns which checkpoint name, by the module that owns it and never by a substring."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from afd_patch import boundaries
from afd_patch.errors import UnsupportedError, WeightError

LAYERS = 4


def owner(architecture: str, name: str) -> str:
    return boundaries.find(architecture).weights.owner(name, LAYERS)


#: DeepSeek V4 has names of its own, which tests/engine/test_deepseek_v4.py looks at.
USUAL = [name for name in boundaries.architectures() if name != "DeepseekV4ForCausalLM"]


@pytest.mark.parametrize("architecture", USUAL)
def test_what_nearly_every_family_has(architecture: str) -> None:
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


MOE = [name for name in USUAL if boundaries.find(name).moe]


@pytest.mark.parametrize("architecture", MOE)
def test_what_the_attention_role_has_of_the_ffn_when_it_runs_the_router(architecture: str) -> None:
    table = boundaries.find(architecture)
    own = table.own_gate({0})
    for child in table.weights.ffn_children:
        for part in ("gate", "experts.0.gate_proj", "shared_expert_gate", "gate_proj", "gate_up_proj"):
            name = f"model.layers.{{}}.{child}.{part}.weight"
            assert table.weights.owner(name.format(0), LAYERS, own) == "attention", "layer 0 is dense"
            expected = "attention" if part in own.names else "ffn"
            assert table.weights.owner(name.format(1), LAYERS, own) == expected
            assert table.weights.owner(name.format(1), LAYERS) == "ffn"
    assert table.weights.owner("model.layers.1.self_attn.q_proj.weight", LAYERS, own) == "attention"
    assert table.weights.owner(f"model.layers.{LAYERS}.mlp.gate.weight", LAYERS, own) == "none"


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("DeepseekV3ForCausalLM", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("Ernie4_5_MoeForCausalLM", "model.layers.1.mlp.moe_statics.e_score_correction_bias"),
        ("GptOssForCausalLM", "model.layers.1.mlp.router.bias"),
        ("Llama4ForCausalLM", "model.layers.1.feed_forward.router.weight"),
        ("MiniMaxM2ForCausalLM", "model.layers.1.block_sparse_moe.e_score_correction_bias"),
        ("Qwen3_5MoeForConditionalGeneration", "model.language_model.layers.1.mlp.gate.weight"),
        ("Step3TextForCausalLM", "model.layers.1.moe.gate.weight"),
    ],
)
def test_names_of_routers(architecture: str, name: str) -> None:
    table = boundaries.find(architecture)
    assert table.weights.owner(name, LAYERS, table.own_gate(())) == "attention"
    assert table.weights.owner(name.replace("layers.1", "layers.4"), LAYERS, table.own_gate(())) == "none"


def test_dense_layers_are_those_without_a_router() -> None:
    table = boundaries.find("DeepseekV3ForCausalLM")
    names = [f"model.layers.{n}.mlp.{part}.weight" for n, part in ((0, "gate_proj"), (1, "gate"), (3, "gate"))]
    names += ["model.layers.2.mlp.experts.0.gate_proj.weight", "model.layers.2.self_attn.gate.weight"]
    assert table.own_gate_in(names, LAYERS).dense_layers == {0, 2}


@pytest.mark.parametrize(
    ("architecture", "config", "itemsize", "expected"),
    [
        ("MixtralForCausalLM", {"num_experts_per_tok": 2}, 2, (64 + 8, 64)),
        ("MixtralForCausalLM", {"num_experts_per_tok": 2}, 4, (64 + 4, 64)),
        ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 8, "n_shared_experts": 1}, 2, (64 + 32, 128)),
        ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 8, "n_shared_experts": None}, 2, (64 + 32, 64)),
        ("Ernie4_5_MoeForCausalLM", {"moe_k": 6, "moe_num_shared_experts": 2}, 2, (64 + 24, 128)),
        ("Llama4ForCausalLM", {"num_experts_per_tok": 1}, 2, (64 + 4, 128)),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 2}, 2, (64 + 8, 64)),
        ("Step3TextForCausalLM", {"moe_top_k": 3}, 2, (64 + 12, 64)),
    ],
)
def test_columns(architecture: str, config: dict[str, object], itemsize: int, expected: tuple[int, int]) -> None:
    table = boundaries.find(architecture)
    assert table.columns(engine("eager", itemsize, **config), "attention") == expected
    assert table.columns(engine("gpu", itemsize, **config), "attention") == expected
    assert table.columns(engine("eager", itemsize, **config), "ffn") == (64, 64)


def engine(how: str, itemsize: int = 2, ranks: int = 1, **config: object) -> SimpleNamespace:
    """What a table looks at of an engine's configuration; ``how``: eager, cpu or gpu, which are compiled."""
    mode = {"eager": "NONE", "cpu": "DYNAMO_TRACE_ONCE", "gpu": "VLLM_COMPILE"}[how]
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(hidden_size=64, **config), dtype=SimpleNamespace(itemsize=itemsize)
        ),
        compilation_config=SimpleNamespace(mode=SimpleNamespace(name=mode)),
        device_config=SimpleNamespace(device_type="cuda" if how == "gpu" else "cpu"),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )


def test_the_gate_of_shared_experts_comes_back_where_a_compiler_sees_it() -> None:
    table = boundaries.find("Qwen2MoeForCausalLM")
    config = {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 8}
    assert table.replies(engine("eager", **config), "attention") == (64, 64)
    assert table.replies(engine("gpu", **config), "attention") == (64, 64)
    assert table.replies(engine("cpu", **config), "attention") == (64, 64, 1)


@pytest.mark.parametrize(
    ("architecture", "config", "gpu", "cpu", "two_ranks"),
    [
        ("DeepseekV3ForCausalLM", {"n_shared_experts": 1}, (64, 64), (64, 64), (64,)),
        ("DeepseekV3ForCausalLM", {"n_shared_experts": None}, (64,), (64,), (64,)),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 8}, (64, 64), (64, 64, 1), (64,)),
        ("Qwen3MoeForCausalLM", {}, (64,), (64,), (64,)),
        # The layer adds the results of two modules, and each of these sums up over the ranks itself.
        ("Step3TextForCausalLM", {}, (64, 64), (64, 64), (64, 64)),
        ("MixtralForCausalLM", {}, (64,), (64,), (64,)),
        ("LlamaForCausalLM", {}, (64,), (64,), (64,)),
    ],
)
def test_what_comes_back_from_a_compiled_ffn(
    architecture: str,
    config: dict[str, object],
    gpu: tuple[int, ...],
    cpu: tuple[int, ...],
    two_ranks: tuple[int, ...],
) -> None:
    table = boundaries.find(architecture)
    assert table.replies(engine("eager", **config), "ffn") == (64,)
    assert table.replies(engine("gpu", **config), "ffn") == gpu
    assert table.replies(engine("cpu", **config), "ffn") == cpu
    assert table.replies(engine("cpu", ranks=2, **config), "ffn") == two_ranks


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
        assert (table.router is not None) == (bool(table.moe) and not table.input_ids)
        assert not set(table.weights.ffn_children) & set(table.weights.attention_children)
