"""GPT-2: learned positions, LayerNorm, a plain MLP, matrices stored [in, out]."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.architecture import Architecture, Names
from paged_jax.models.config import Config
from paged_jax.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec


def _gpt2(values: Mapping[str, Any]) -> DecoderSpec:
    config = Config(values)
    size, heads = config.integer("n_embd"), config.integer("n_head")
    if heads < 1 or size % heads:
        raise ValueError(f"config n_embd ({size}) must be a multiple of n_head ({heads})")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.flag(key):
            raise ValueError(f"config {key} is not supported")
    head_dim = size // heads
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        rope=None,
        sm_scale=None if config.flag("scale_attn_weights", default=True) else 1.0,
        has_qkv_bias=True,
        has_out_bias=True,
    )
    mlp = MLPSpec(
        size=config.integer("n_inner", 4 * size),
        activation=config.activation("activation_function", default="gelu_new"),
        is_gated=False,
        has_bias=True,
    )
    layer = LayerSpec(attention=attention, mlp=mlp)
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=size,
        layers=(layer,) * config.integer("n_layer"),
        norm=NormSpec(kind="layer", eps=config.number("layer_norm_epsilon", 1e-5)),
        max_position_embeddings=config.integer("n_positions", 1024),
        has_learned_positions=True,
        is_tied=config.flag("tie_word_embeddings", default=True),
    )


GPT2 = Architecture(
    _gpt2,
    Names(
        embed="transformer.wte",
        positions="transformer.wpe",
        norm="transformer.ln_f",
        layer="transformer.h.{}",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
        has_transposed_matrices=True,
        optional_prefix="transformer.",
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
)
