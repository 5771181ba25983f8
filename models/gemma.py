"""Gemma 1, 2 and 3 (text): scaled embeddings, norms stored as differences to 1."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.architecture import Architecture, Names
from paged_jax.models.config import Config
from paged_jax.models.llama import llama_like
from paged_jax.models.rope import rope_spec
from paged_jax.models.spec import DecoderSpec, MLPSpec, NormSpec


def _gemma_like(
    values: Mapping[str, Any], attention: Mapping[str, Any] | None = None, **parts: Any
) -> DecoderSpec:
    config = Config(values)
    if config.flag("use_bidirectional_attention"):
        raise ValueError("config use_bidirectional_attention must be false: decoding is causal")
    # The first configs say "gelu" in hidden_act and mean its tanh form, as all training did.
    activation = config.activation("hidden_activation", default="gelu_pytorch_tanh")
    mlp = MLPSpec(size=config.integer("intermediate_size"), activation=activation)
    head_dim = config.integer("head_dim", 256)
    return llama_like(
        values,
        attention={"head_dim": head_dim, **(attention or {})},
        mlps=[mlp] * config.integer("num_hidden_layers"),
        norm=NormSpec(eps=config.number("rms_norm_eps", 1e-6), offset=1.0),
        embed_scale=config.integer("hidden_size") ** 0.5,
        is_tied=config.flag("tie_word_embeddings", default=True),
        logit_cap=config.optional("final_logit_softcapping"),
        **parts,
    )


def _gemma2(values: Mapping[str, Any]) -> DecoderSpec:
    config = Config(values)
    count = config.integer("num_hidden_layers")
    return _gemma_like(
        values,
        attention={
            "sm_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
            "soft_cap": config.optional("attn_logit_softcapping"),
        },
        windows=config.windows([i % 2 == 0 for i in range(count)]),
        layer={"has_post_norms": True},
    )


def _gemma3(values: Mapping[str, Any]) -> DecoderSpec:
    config = Config(values)
    count = config.integer("num_hidden_layers")
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    windows = config.windows([bool((i + 1) % pattern) for i in range(count)])
    far = rope_spec({"rope_theta": 1e6} | dict(values), layer_type="full_attention")
    if "sliding_attention" in (values.get("rope_parameters") or {}):
        near = rope_spec(values, layer_type="sliding_attention")
    else:
        near = rope_spec({"rope_theta": config.number("rope_local_base_freq", 1e4)})
    return _gemma_like(
        values,
        attention={
            "sm_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
            "soft_cap": config.optional("attn_logit_softcapping"),
            "qk_norm": "head",
        },
        windows=windows,
        ropes=[far if window is None else near for window in windows],
        layer={"has_post_norms": True},
    )


_NAMES = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
GEMMA = Architecture(_gemma_like, Names())
GEMMA2 = Architecture(_gemma2, _NAMES)
GEMMA3 = Architecture(_gemma3, _NAMES)
