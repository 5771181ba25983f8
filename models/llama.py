"""Llama, and the builder that its many look-alikes share."""

from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.models.architecture import Architecture, Names
from paged_jax.models.config import Config
from paged_jax.models.rope import rope_spec
from paged_jax.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    RopeSpec,
)


def llama_like(
    values: Mapping[str, Any],
    *,
    attention: Mapping[str, Any] | None = None,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[RopeSpec | None] | None = None,
    mlps: Sequence[MLPSpec | MoESpec] | None = None,
    layer: Mapping[str, Any] | None = None,
    **decoder: Any,
) -> DecoderSpec:
    """Maps a config with Llama's keys.

    Args:
      values: `config.json`.
      attention: Fields of `AttentionSpec` that differ from Llama's.
      windows: Sliding window of each layer; None: there are none.
      ropes: Rotary embedding of each layer; None: all as the config says.
      mlps: Feed-forward part of each layer; None: all as the config says.
      layer: Fields of `LayerSpec` that differ from Llama's.
      **decoder: Fields of `DecoderSpec` that differ from Llama's.
    Raises: ValueError for a missing or wrong key, which it names.
    """
    config = Config(values)
    count = config.integer("num_hidden_layers")
    heads = config.integer("num_attention_heads")
    has_bias = config.flag("attention_bias")
    common = {
        "num_heads": heads,
        "num_kv_heads": config.integer("num_key_value_heads", heads),
        "head_dim": config.head_dim(),
        "has_qkv_bias": has_bias,
        "has_out_bias": has_bias,
        **(attention or {}),
    }
    parts = zip(
        windows or [None] * count,
        ropes or [rope_spec(values)] * count,
        mlps or [dense(config)] * count,
        strict=True,
    )
    layers = [
        LayerSpec(
            attention=AttentionSpec(rope=rope, sliding_window=window, **common),
            mlp=mlp,
            **(layer or {}),
        )
        for window, rope, mlp in parts
    ]
    fields = {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": config.integer("hidden_size"),
        "norm": NormSpec(eps=config.number("rms_norm_eps", 1e-6)),
        "max_position_embeddings": config.max_position(),
        "is_tied": config.flag("tie_word_embeddings"),
        **decoder,
    }
    return DecoderSpec(layers=tuple(layers), **fields)


def dense(config: Config) -> MLPSpec:
    """The feed-forward part of a config with Llama's keys."""
    return MLPSpec(
        size=config.integer("intermediate_size"),
        activation=config.activation("hidden_act"),
        has_bias=config.flag("mlp_bias"),
    )


def _mistral(values: Mapping[str, Any]) -> DecoderSpec:
    return llama_like(values, windows=Config(values).windows(True))


LLAMA = Architecture(llama_like, Names())
MISTRAL = Architecture(_mistral, Names())
