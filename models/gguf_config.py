"""The Hugging Face config that the metadata of a GGUF file describes."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paged_jax.models.gguf_header import Header

_MAX_NUMBER = float(np.finfo(np.float32).max)
_GEMMA_ACTIVATION = "gelu_pytorch_tanh"


def config_of(
    architecture: str, header: Header, tables: Mapping[str, list[float]]
) -> dict[str, Any]:
    """Keys and values as in the `config.json` of the model family.

    Args:
      tables: Values of the tensors that belong to the config, by GGUF name.
    Raises: ValueError that names what is missing, malformed or not expressible.
    """
    keys = _Keys(header, architecture)
    _check_expressible(keys)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError("tensor token_embd.weight is missing")
    num_layers = keys.integer("block_count")
    if num_layers > len(header.tensors):
        raise ValueError(f"{num_layers} blocks cannot be in {len(header.tensors)} tensors")
    num_heads = keys.integer("attention.head_count")
    config: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "intermediate_size": keys.integer("feed_forward_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for role in ("bos", "eos"):
        config[f"{role}_token_id"] = _token_id(header.metadata, role)
    config |= _FAMILIES[architecture](keys, config, tables)
    if "rope_freqs.weight" in tables:
        config["rope_freq_factors"] = tables["rope_freqs.weight"]
    return config


def generation_config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens that end a text."""
    found = (_token_id(metadata, role) for role in ("eos", "eot", "eom"))
    ends = dict.fromkeys(token for token in found if token is not None)  # ordered, once each
    return {"eos_token_id": list(ends)} if ends else {}


def _token_id(metadata: Mapping[str, Any], role: str) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    token = metadata.get(key)
    if token is not None and (type(token) is not int or token < 0):
        raise ValueError(f"{key} ({token!r:.80}) must be a token id")
    return token


class _Keys:
    """Checked values of the keys that begin with the architecture."""

    def __init__(self, header: Header, architecture: str) -> None:
        self.metadata, self.tensors, self._prefix = header.metadata, header.tensors, architecture

    def has(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self.metadata

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._single(key, default)
        if type(value) is not int or value < least:
            raise self._wrong(key, value, f"an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._single(key, default)
        if type(value) not in (int, float) or not abs(value) <= _MAX_NUMBER:  # nor nan
            raise self._wrong(key, value, "a number")
        # Numbers are f32 here: 1e-05 again, not 9.999999747378752e-06.
        return float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        value = self._single(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def pattern(self, key: str, num_layers: int, default: int) -> list[bool]:
        """Whether each layer has a sliding window: stored by layer, or as every how many not."""
        value = self.metadata.get(f"{self._prefix}.{key}")
        if isinstance(value, list):
            if len(value) < num_layers or not all(isinstance(flag, bool) for flag in value):
                raise self._wrong(key, value, f"{num_layers} booleans or an integer")
            return value[:num_layers]
        period = self.integer(key, default)
        return [layer % period < period - 1 for layer in range(num_layers)]

    def _single(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"{self._prefix}.{key}", default)
        if value is None:
            raise ValueError(f"metadata key {self._prefix}.{key} is missing")
        if not isinstance(value, list):
            return value
        if not value or value.count(value[0]) < len(value):
            raise ValueError(f"{self._prefix}.{key} varies by layer, which is not supported")
        return value[0]

    def _wrong(self, key: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self._prefix}.{key} ({value!r:.80}) must be {expected}")


def _check_expressible(keys: _Keys) -> None:
    if num_experts := keys.integer("expert_count", 0, least=0):
        raise ValueError(f"{num_experts} experts (expert_count) are not supported")
    num_files = keys.metadata.get("split.count", 1)
    if type(num_files) is not int or num_files > 1:
        raise ValueError("a model split over several files is not supported; merge them first")


def _head_dim(keys: _Keys, config: Mapping[str, Any]) -> int:
    """Size of a head, all of it rotated."""
    rope_dim = keys.integer("rope.dimension_count", 0, least=0)
    head_dim = keys.integer("attention.key_length", rope_dim or _even_head_dim(config))
    if rope_dim not in (0, head_dim):
        raise ValueError(f"rotating {rope_dim} of {head_dim} head dimensions is not supported")
    _check_value_length(keys, head_dim)
    return head_dim


def _even_head_dim(config: Mapping[str, Any]) -> int:
    size, num_heads = config["hidden_size"], config["num_attention_heads"]
    if size < num_heads:
        raise ValueError(f"{num_heads} heads cannot share a hidden size of {size}")
    return size // num_heads


def _check_value_length(keys: _Keys, head_dim: int) -> None:
    if (value_length := keys.integer("attention.value_length", head_dim)) != head_dim:
        raise ValueError(f"keys of {head_dim} and values of {value_length} are not supported")


def _check_scale(keys: _Keys, head_dim: int) -> None:
    """A scale other than the usual one has no config key in most families."""
    scale = keys.number("attention.scale", 0.0)
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-5):
        raise ValueError(f"attention.scale ({scale}) is not supported")


def _llama(keys: _Keys, config: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = _head_dim(keys, config)
    _check_scale(keys, head_dim)
    family = {"hidden_act": "silu", "head_dim": head_dim, "rope_parameters": _rope(keys)}
    if window := keys.integer("attention.sliding_window", 0, least=0):
        names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        return family | names | {"sliding_window": window}
    return family | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in keys.tensors,
    }


def _qwen2(keys: _Keys, config: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    family = _qwen(keys, config) | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    if family["head_dim"] == _even_head_dim(config):
        del family["head_dim"]  # usually not there
    return family


def _qwen3(keys: _Keys, config: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = "blk.0.attn_q.bias" in keys.tensors
    names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return _qwen(keys, config) | names | {"attention_bias": has_bias}


def _qwen(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = _head_dim(keys, config)
    _check_scale(keys, head_dim)
    # Which layers have it would not be known.
    if window := keys.integer("attention.sliding_window", 0, least=0):
        raise ValueError(f"attention.sliding_window ({window}) is not supported here")
    return {
        "hidden_act": "silu",
        "head_dim": head_dim,
        "rope_parameters": _rope(keys),
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _gemma(keys: _Keys, config: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = _head_dim(keys, config)
    _check_scale(keys, head_dim)
    return {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_act": _GEMMA_ACTIVATION,
        "hidden_activation": _GEMMA_ACTIVATION,
        "head_dim": head_dim,
        "attention_bias": False,
        "rope_parameters": _rope(keys),
    }


def _gemma2(keys: _Keys, config: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    # The earliest files lack what all models of the family have in common.
    window = keys.integer("attention.sliding_window", 4096)
    return _later_gemma(keys, config, evenly_scaled_layers=46) | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
        "sliding_window": window,
        "layer_types": _layer_types(keys, config, period=2),
        "rope_parameters": _rope(keys),
    }


def _gemma3(keys: _Keys, config: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.integer("attention.sliding_window", 0, least=0)
    local_theta = keys.number("rope.freq_base_swa", 1e4)
    return _later_gemma(keys, config, evenly_scaled_layers=62) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or None,
        "layer_types": _layer_types(keys, config, period=6 if window else 1),
        "rope_parameters": {
            # The stretching for long contexts is of full attention only.
            "full_attention": _rope(keys, default_theta=None),
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }


def _later_gemma(
    keys: _Keys, config: Mapping[str, Any], *, evenly_scaled_layers: int
) -> dict[str, Any]:
    """What generations 2 and 3 have in common.

    Their queries are scaled by the size of a head, but in each generation's 27B model, told by its
    number of layers, by hidden size over heads. Files have a key for it only if they are unusual.
    """
    head_dim = _head_dim(keys, config)
    is_even = config["num_hidden_layers"] == evenly_scaled_layers
    scalar: float = _even_head_dim(config) if is_even else head_dim
    if scale := keys.number("attention.scale", 0.0):
        scalar = float(np.float32(scale)) ** -2
        if math.isclose(scalar, round(scalar), rel_tol=1e-5):
            scalar = round(scalar)
    return {
        "hidden_activation": _GEMMA_ACTIVATION,
        "head_dim": head_dim,
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
    }


def _layer_types(keys: _Keys, config: Mapping[str, Any], *, period: int) -> list[str]:
    flags = keys.pattern("attention.sliding_window_pattern", config["num_hidden_layers"], period)
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in flags]


def _phi3(keys: _Keys, config: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = keys.integer("attention.key_length", _even_head_dim(config))
    if head_dim != _even_head_dim(config):
        raise ValueError(f"heads of {head_dim} dimensions are not supported here")
    _check_value_length(keys, head_dim)
    _check_scale(keys, head_dim)
    rope_dim = keys.integer("rope.dimension_count", head_dim)
    if rope_dim > head_dim:
        raise ValueError(f"rotating {rope_dim} of {head_dim} head dimensions is not possible")
    max_positions = config["max_position_embeddings"]
    original = keys.integer("rope.scaling.original_context_length", max_positions)
    long, short = (tables.get(f"rope_factors_{length}.weight") for length in ("long", "short"))
    if (long is None) != (short is None):
        raise ValueError("of rope_factors_long and rope_factors_short, one is missing")
    if long is None or short is None:
        rope = _rope(keys)
    else:
        rope = {
            "rope_type": "longrope",
            "rope_theta": _theta(keys),
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": original,
        }
        if keys.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "sliding_window": keys.integer("attention.sliding_window", 0, least=0) or None,
        "original_max_position_embeddings": original,
        "rope_parameters": rope | {"partial_rotary_factor": rope_dim / head_dim},
    }


def _theta(keys: _Keys, default: float | None = 1e4) -> float:
    theta = keys.number("rope.freq_base", default)
    if theta <= 0:
        raise ValueError(f"rope.freq_base ({theta}) must be above 0")
    return theta


def _rope(keys: _Keys, default_theta: float | None = 1e4) -> dict[str, Any]:
    """Base and scaling of the rotation."""
    rope = {"rope_type": "default", "rope_theta": _theta(keys, default_theta)}
    # A factor without a kind, or under its older key, is linear; 0 stands for none.
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    kind = keys.text("rope.scaling.type", "linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(
            f"RoPE scaling {kind!r} is not supported (supported: none, linear, yarn, and "
            "longrope of phi3)"
        )
    if factor < 1:
        raise ValueError(f"rope.scaling.factor ({factor}) of YaRN must be at least 1")
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise ValueError("rope.scaling.yarn_ext_factor other than 1 is not supported")
    original = keys.integer("rope.scaling.original_context_length")
    rope |= {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if keys.has(f"rope.scaling.{theirs}"):
            rope[ours] = keys.number(f"rope.scaling.{theirs}")
    # It multiplies the usual one, where Hugging Face's replaces it.
    extra = keys.number("rope.scaling.attn_factor", 1.0)
    extra *= keys.number("rope.scaling.yarn_attn_factor", 1.0)
    if extra != 1:
        rope["attention_factor"] = extra * (0.1 * math.log(factor) + 1)
    return rope


_Family = Callable[[_Keys, Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
_FAMILIES: Mapping[str, _Family] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
