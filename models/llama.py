"""Llama and its look-alikes: config keys and weight names, nothing else."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.rope import rope_spec
from paged_jax.models.spec import DecoderSpec


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Maps a Hugging Face config.

    Raises: ValueError for a missing key or an activation other than silu; NotImplementedError
      for a sliding window shorter than the context.
    """
    required = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
    )
    for key in required:
        if not isinstance(config.get(key), int):
            raise ValueError(f"config {key} ({config.get(key)!r}) must be an integer")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: silu")
    max_position = int(config.get("max_position_embeddings") or 2048)
    window = config.get("sliding_window")
    if window and window < max_position:
        raise NotImplementedError(f"sliding_window ({window}) is not built yet")
    heads = config["num_attention_heads"]
    has_bias = bool(config.get("attention_bias", False))
    return DecoderSpec(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        mlp_size=config["intermediate_size"],
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope_spec(config),
        max_position_embeddings=max_position,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )


def weight_names(spec: DecoderSpec) -> dict[str, tuple[str, ...]]:
    """Our parameter to the checkpoint tensors whose rows are stacked into it."""
    names = {
        "embed.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
    }
    if not spec.is_tied:
        names["head.weight"] = ("lm_head.weight",)
    for layer in range(spec.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        names[f"{ours}.attention_norm.weight"] = (f"{theirs}.input_layernorm.weight",)
        names[f"{ours}.mlp_norm.weight"] = (f"{theirs}.post_attention_layernorm.weight",)
        parts = {
            "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.out": ("self_attn.o_proj",),
            "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.down": ("mlp.down_proj",),
        }
        has_bias = {
            "attention.qkv": spec.has_qkv_bias,
            "attention.out": spec.has_out_bias,
            "mlp.gate_up": spec.has_mlp_bias,
            "mlp.down": spec.has_mlp_bias,
        }
        for part, tensors in parts.items():
            for kind in ("weight", "bias") if has_bias[part] else ("weight",):
                names[f"{ours}.{part}.{kind}"] = tuple(f"{theirs}.{t}.{kind}" for t in tensors)
    return names


def is_ignored(name: str, spec: DecoderSpec) -> bool:
    """Tensors that some checkpoints carry and the model derives itself."""
    return name.endswith("rotary_emb.inv_freq") or (spec.is_tied and name == "lm_head.weight")
