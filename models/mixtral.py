"""Mixtral: Mistral with experts."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.architecture import Architecture, Names
from paged_jax.models.config import Config
from paged_jax.models.llama import llama_like
from paged_jax.models.spec import DecoderSpec, MoESpec


def _mixtral(values: Mapping[str, Any]) -> DecoderSpec:
    config = Config(values)
    experts = MoESpec(
        num_experts=config.integer("num_local_experts"),
        num_chosen=config.integer("num_experts_per_tok", 2),
        size=config.integer("intermediate_size"),
        activation=config.activation("hidden_act"),
    )
    count = config.integer("num_hidden_layers")
    return llama_like(values, windows=config.windows(True), mlps=[experts] * count)


MIXTRAL = Architecture(
    _mixtral,
    Names(
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}",
        expert_gate_up=("w1", "w3"),
        expert_down="w2",
    ),
)
