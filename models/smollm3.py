"""SmolLM3: Llama with some layers without rotary positions."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.architecture import Architecture, Names
from paged_jax.models.config import Config
from paged_jax.models.llama import llama_like
from paged_jax.models.rope import rope_spec
from paged_jax.models.spec import DecoderSpec


def _smollm3(values: Mapping[str, Any]) -> DecoderSpec:
    config = Config(values)
    count = config.integer("num_hidden_layers")
    rotates = config.items("no_rope_layers", count)  # the key says the contrary: 1 has rope
    if rotates is None:
        every = config.integer("no_rope_layer_interval", 4)
        rotates = [(i + 1) % every != 0 for i in range(count)]
    windows = None
    if config.flag("use_sliding_window"):
        windows = config.windows([not rotated for rotated in rotates])
    rope = rope_spec({"rope_theta": 2e6} | dict(values))
    return llama_like(
        values,
        windows=windows,
        ropes=[rope if rotated else None for rotated in rotates],
        is_tied=config.flag("tie_word_embeddings", default=True),
    )


SMOLLM3 = Architecture(_smollm3, Names())
