"""DeepSeek-V3: latent attention, and experts in groups beside a shared one."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.architecture import Architecture, Names
from paged_jax.models.config import Config
from paged_jax.models.llama import dense
from paged_jax.models.rope import rope_spec, yarn_scale
from paged_jax.models.spec import (
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    MoESpec,
    NormSpec,
)


def _deepseek_v3(values: Mapping[str, Any]) -> DecoderSpec:
    config = Config(values)
    count = config.integer("num_hidden_layers")
    attention = _attention(config)
    inner = config.integer("moe_intermediate_size")
    experts = MoESpec(
        num_experts=config.integer("n_routed_experts"),
        num_chosen=config.integer("num_experts_per_tok"),
        size=inner,
        scoring="sigmoid",
        is_renormalised=config.flag("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group", 1),
        num_chosen_groups=config.integer("topk_group", 1),
        has_correction=True,
        activation=config.activation("hidden_act"),
        shared_size=inner * config.integer("n_shared_experts", 0),
    )
    num_dense = config.integer("first_k_dense_replace", 0)
    layers = [
        LayerSpec(attention=attention, mlp=dense(config) if i < num_dense else experts)
        for i in range(count)
    ]
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=tuple(layers),
        norm=NormSpec(eps=config.number("rms_norm_eps", 1e-6)),
        max_position_embeddings=config.max_position(),
        is_tied=config.flag("tie_word_embeddings"),
    )


def _attention(config: Config) -> LatentAttentionSpec:
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    is_interleaved = config.flag("rope_interleave", default=True)
    rope = rope_spec(config.values, is_interleaved=is_interleaved)
    scale = (nope_dim + rope_dim) ** -0.5
    found = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if rope.kind != "default" and found.get("mscale_all_dim"):
        scale *= yarn_scale(rope.factor, float(found["mscale_all_dim"])) ** 2
    return LatentAttentionSpec(
        num_heads=config.integer("num_attention_heads"),
        q_rank=None if config.values.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim"),
        rope=rope,
        sm_scale=scale,
        has_bias=config.flag("attention_bias"),
    )


DEEPSEEK_V3 = Architecture(_deepseek_v3, Names())
