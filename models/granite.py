"""Granite: Llama with four multipliers."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.architecture import Architecture, Names
from paged_jax.models.config import Config
from paged_jax.models.llama import llama_like
from paged_jax.models.spec import DecoderSpec


def _granite(values: Mapping[str, Any]) -> DecoderSpec:
    config = Config(values)
    return llama_like(
        values,
        attention={"sm_scale": config.number("attention_multiplier", 1.0)},
        embed_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


GRANITE = Architecture(_granite, Names())
