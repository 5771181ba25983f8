"""Phi-3: Llama with q, k, v and gate, up fused in the checkpoint, and LongRoPE."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.architecture import Architecture, Names
from paged_jax.models.config import Config
from paged_jax.models.llama import llama_like
from paged_jax.models.spec import DecoderSpec


def _phi3(values: Mapping[str, Any]) -> DecoderSpec:
    return llama_like(values, windows=Config(values).windows(True))


PHI3 = Architecture(_phi3, Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)))
