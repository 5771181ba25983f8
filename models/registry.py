"""Architectures by Hugging Face's class name, resolved when they are used."""

import importlib
from collections.abc import Mapping
from typing import Any

from paged_jax.models.architecture import Architecture
from paged_jax.models.spec import DecoderSpec

# Module and name in it. Resolved at call time: nobody pays for the architectures of others.
ARCHITECTURES = {
    "DeepseekV3ForCausalLM": "deepseek:DEEPSEEK_V3",
    "GPT2LMHeadModel": "gpt2:GPT2",
    "Gemma2ForCausalLM": "gemma:GEMMA2",
    "Gemma3ForCausalLM": "gemma:GEMMA3",
    "GemmaForCausalLM": "gemma:GEMMA",
    "GptOssForCausalLM": "gpt_oss:GPT_OSS",
    "GraniteForCausalLM": "granite:GRANITE",
    "LlamaForCausalLM": "llama:LLAMA",
    "MistralForCausalLM": "llama:MISTRAL",
    "MixtralForCausalLM": "mixtral:MIXTRAL",
    "Olmo2ForCausalLM": "olmo2:OLMO2",
    "Phi3ForCausalLM": "phi3:PHI3",
    "Qwen2ForCausalLM": "qwen:QWEN2",
    "Qwen3ForCausalLM": "qwen:QWEN3",
    "Qwen3MoeForCausalLM": "qwen:QWEN3_MOE",
    "SmolLM3ForCausalLM": "smollm3:SMOLLM3",
}


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec that a config describes; ValueError for one that is malformed."""
    found = architecture(config)
    try:
        return found.decoder_spec(config)
    except (TypeError, AttributeError, KeyError, OverflowError, ZeroDivisionError) as error:
        raise ValueError(f"the model's config is malformed: {error}") from error


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Finds the architecture that a config names.

    Raises: ValueError that lists what is supported.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ValueError(f"config architectures ({names!r}) must be a list")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            module, attribute = ARCHITECTURES[name].split(":")
            return getattr(importlib.import_module(f"paged_jax.models.{module}"), attribute)
    raise ValueError(
        f"architecture {', '.join(map(str, names)) or '(none named)'} is not supported; "
        f"supported: {', '.join(sorted(ARCHITECTURES))}"
    )
