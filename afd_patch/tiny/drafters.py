"""Draft models for speculative decoding, small enough to accompany the tiny models, and a model with one built in.

The heads fit every model here that is 256 wide with 512 tokens (``llama``, ``qwen3_moe``, ``deepseek_v3``). Their
weights are random, so nearly every draft is rejected: what they test is that rejection leaves the answers alone.
"""

from __future__ import annotations

from .architecture import COMMON, GQA, HIDDEN, INTERMEDIATE, LAYERS, VOCAB, Architecture, Options
from .checkpoint import Checkpoint
from .deepseek import ARCHITECTURES as DEEPSEEK

_HEAD_DIM = 64


def _head(seed: int, inputs: int, *, states: int, layer: str) -> Checkpoint:
    """One Llama layer whose attention reads ``inputs`` columns, behind a matrix that joins ``states`` vectors."""
    from .random_weights import RandomTensors

    tensors = RandomTensors(seed)
    tensors.linear("embed_tokens.weight", VOCAB, HIDDEN)
    tensors.linear("fc.weight", HIDDEN, states * HIDDEN)
    tensors.linear(f"{layer}.self_attn.q_proj.weight", GQA["num_attention_heads"] * _HEAD_DIM, inputs)
    for part in "kv":
        tensors.linear(f"{layer}.self_attn.{part}_proj.weight", GQA["num_key_value_heads"] * _HEAD_DIM, inputs)
    tensors.linear(f"{layer}.self_attn.o_proj.weight", HIDDEN, GQA["num_attention_heads"] * _HEAD_DIM)
    tensors.vector(f"{layer}.post_attention_layernorm.weight", HIDDEN)
    tensors.mlp(f"{layer}.mlp", HIDDEN, INTERMEDIATE)
    config = dict(
        COMMON,
        **GQA,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        num_hidden_layers=1,
        head_dim=_HEAD_DIM,
        intermediate_size=INTERMEDIATE,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        torch_dtype="bfloat16",
    )
    return Checkpoint(config, tensors)


def _eagle(seed: int, options: Options) -> Checkpoint:
    """Joins the embedding of the last token with the last hidden state."""
    return _head(seed, HIDDEN, states=2, layer="layers.0")


def _eagle3(seed: int, options: Options) -> Checkpoint:
    """Joins the hidden states of three layers, and gives them to attention beside the embedding."""
    checkpoint = _head(seed, 2 * HIDDEN, states=3, layer="midlayer")
    from .random_weights import RandomTensors

    more = RandomTensors(seed + 1)
    more.linear("lm_head.weight", VOCAB, HIDDEN)
    for norm in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm"):
        more.vector(f"{norm}.weight", HIDDEN)
    config = {
        **checkpoint.config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": list(range(1, LAYERS)),
    }
    return Checkpoint(config, {**checkpoint.tensors, **more})


def _deepseek_v3_mtp(seed: int, options: Options) -> Checkpoint:
    """DeepSeek V3 with its next-token-prediction layer, behind the decoder layers as in the released checkpoint."""
    from .random_weights import RandomTensors

    (source,) = [architecture for architecture in DEEPSEEK if architecture.name == "deepseek_v3"]
    main, own = source.build(seed, options), source.build(seed + 1, options)
    last, extra = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    layer = {name.replace(last, extra): t for name, t in own.tensors.items() if name.startswith(last)}
    more = RandomTensors(seed + 2)
    more.linear(f"{extra}eh_proj.weight", HIDDEN, 2 * HIDDEN)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        more.vector(f"{extra}{norm}.weight", HIDDEN)
    more[f"{extra}embed_tokens.weight"] = main.tensors["model.embed_tokens.weight"].clone()
    more[f"{extra}shared_head.head.weight"] = main.tensors["lm_head.weight"].clone()
    return Checkpoint({**main.config, "num_nextn_predict_layers": 1}, {**main.tensors, **layer, **more})


ARCHITECTURES = (
    Architecture("deepseek_v3_mtp", "DeepSeek V3 with a layer for next-token prediction", _deepseek_v3_mtp),
    Architecture("eagle", "an EAGLE draft head for the tiny models", _eagle),
    Architecture("eagle3", "an EAGLE-3 draft head for the tiny models", _eagle3),
)
