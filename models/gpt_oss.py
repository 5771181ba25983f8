"""gpt-oss: sinks, windows in every other layer, experts with biases and a clamped gate."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.architecture import Architecture, Names
from paged_jax.models.config import Config
from paged_jax.models.llama import llama_like
from paged_jax.models.spec import DecoderSpec, MoESpec


def _gpt_oss(values: Mapping[str, Any]) -> DecoderSpec:
    config = Config(values)
    count = config.integer("num_hidden_layers")
    experts = MoESpec(
        num_experts=config.integer("num_local_experts"),
        num_chosen=config.integer("num_experts_per_tok", 4),
        size=config.integer("intermediate_size"),
        has_router_bias=True,
        has_bias=True,
        activation="clamped_swiglu",
        activation_limit=config.number("swiglu_limit", 7.0),
        activation_alpha=config.number("swiglu_alpha", 1.702),
    )
    has_bias = config.flag("attention_bias", default=True)
    return llama_like(
        values,
        attention={"has_sinks": True, "has_qkv_bias": has_bias, "has_out_bias": has_bias},
        windows=config.windows([i % 2 == 0 for i in range(count)]),
        mlps=[experts] * count,
    )


GPT_OSS = Architecture(
    _gpt_oss,
    Names(
        router="mlp.router",
        expert="mlp.experts",
        expert_gate_up=("gate_up_proj",),
        expert_down="down_proj",
    ),
)
