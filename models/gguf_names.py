"""What a GGUF file calls the tensors of each model family, and how it changed their values."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Names:
    """Tensors of one value of `general.architecture`."""

    modules: Mapping[str, str]
    """GGUF module to Hugging Face's; `blk.N` is `model.layers.N`."""
    interleaved: Mapping[str, str] = field(default_factory=dict)
    """Module whose rows the converter reordered for rotation, to the config key of its heads."""
    is_norm_raised: bool = False
    """Norm weights are stored as the factor 1 + w, where Hugging Face has w."""

    def translate(self, name: str) -> tuple[str, str]:
        """Hugging Face's name of a tensor, and its GGUF module without `blk.N`.

        A name without translation keeps its own, for the loader to report as surplus.
        """
        module, _, suffix = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(.+)", module, re.ASCII)
        prefix, module = (f"model.layers.{block[1]}.", block[2]) if block else ("", module)
        known = self.modules.get(module)
        return (f"{prefix}{known}.{suffix}" if known else name), module


_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_down": "mlp.down_proj",
}
_QKV = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATE_UP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
# A norm before the MLP only, named for what it follows; with norms on both sides of each part,
# `post_attention_layernorm` is one that attention's output goes through.
_NORM_BEFORE_MLP = {"ffn_norm": "post_attention_layernorm"}
_NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

NAMES: Mapping[str, Names] = {
    "llama": Names(
        _MODEL | _QKV | _GATE_UP | _NORM_BEFORE_MLP,
        interleaved={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
    ),
    "qwen2": Names(_MODEL | _QKV | _GATE_UP | _NORM_BEFORE_MLP),
    "qwen3": Names(_MODEL | _QKV | _QK_NORMS | _GATE_UP | _NORM_BEFORE_MLP),
    "gemma": Names(_MODEL | _QKV | _GATE_UP | _NORM_BEFORE_MLP, is_norm_raised=True),
    "gemma2": Names(_MODEL | _QKV | _GATE_UP | _NORMS_AROUND, is_norm_raised=True),
    "gemma3": Names(_MODEL | _QKV | _QK_NORMS | _GATE_UP | _NORMS_AROUND, is_norm_raised=True),
    "phi3": Names(
        _MODEL | _NORM_BEFORE_MLP | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
}
"""By `general.architecture`; Mistral's files say `llama`."""

IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of the config."""
