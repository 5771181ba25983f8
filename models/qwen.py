"""Qwen2, Qwen3 and Qwen3-MoE."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.architecture import Architecture, Names
from paged_jax.models.config import Config
from paged_jax.models.llama import dense, llama_like
from paged_jax.models.spec import DecoderSpec, MLPSpec, MoESpec


def _windows(config: Config) -> list[int | None]:
    if not config.flag("use_sliding_window"):
        return [None] * config.integer("num_hidden_layers")
    first = config.integer("max_window_layers", 28)
    return config.windows([i >= first for i in range(config.integer("num_hidden_layers"))])


def _qwen2(values: Mapping[str, Any]) -> DecoderSpec:
    # The config has no key for it: queries, keys and values have biases, the output has none.
    bias = {"has_qkv_bias": True, "has_out_bias": False}
    return llama_like(values, attention=bias, windows=_windows(Config(values)))


def _qwen3(values: Mapping[str, Any]) -> DecoderSpec:
    config = Config(values)
    attention = {"qk_norm": "head", "head_dim": config.integer("head_dim", 128)}
    return llama_like(values, attention=attention, windows=_windows(config))


def _qwen3_moe(values: Mapping[str, Any]) -> DecoderSpec:
    config = Config(values)
    experts = MoESpec(
        num_experts=config.integer("num_local_experts", config.integer("num_experts", 128)),
        num_chosen=config.integer("num_experts_per_tok", 8),
        size=config.integer("moe_intermediate_size"),
        is_renormalised=config.flag("norm_topk_prob"),
        activation=config.activation("hidden_act"),
    )
    every = config.integer("decoder_sparse_step", 1)
    plain = set(values.get("mlp_only_layers") or ())
    mlps: list[MLPSpec | MoESpec] = [
        dense(config) if i in plain or (i + 1) % every else experts
        for i in range(config.integer("num_hidden_layers"))
    ]
    attention = {"qk_norm": "head", "head_dim": config.head_dim()}
    return llama_like(values, attention=attention, windows=_windows(config), mlps=mlps)


QWEN2 = Architecture(_qwen2, Names())
QWEN3 = Architecture(_qwen3, Names())
QWEN3_MOE = Architecture(_qwen3_moe, Names())
