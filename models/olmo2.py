"""OLMo 2: norms after attention and MLP only, and over all heads of queries and keys at once."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.architecture import Architecture, Names
from paged_jax.models.llama import llama_like
from paged_jax.models.spec import DecoderSpec


def _olmo2(values: Mapping[str, Any]) -> DecoderSpec:
    return llama_like(
        values,
        attention={"qk_norm": "all"},
        layer={"has_pre_norms": False, "has_post_norms": True},
    )


OLMO2 = Architecture(
    _olmo2,
    Names(
        attention_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
)
