"""What an architecture file provides: how a config reads, and what its modules are called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from paged_jax.models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Names:
    """What an architecture calls its modules; defaults are Llama's."""

    embed: str = "model.embed_tokens"
    positions: str = ""
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}"
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """One name where the checkpoint has them fused."""
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    latent: str = "self_attn"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    """Without braces where the checkpoint has all experts in one tensor."""
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    shared_expert: str = "mlp.shared_experts"
    has_transposed_matrices: bool = False
    optional_prefix: str = ""
    """Some checkpoints leave it out."""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Ends of the names of tensors that the model derives itself."""


class Architecture(NamedTuple):
    """One Hugging Face model class."""

    decoder_spec: Callable[[Mapping[str, Any]], DecoderSpec]
    names: Names
