"""Hugging Face checkpoints written as GGUF, by the rules of llama.cpp's converter.

Nothing here comes from the reader: names, orders and offsets are spelled out once more.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.numpy import load_file

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}

_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(rows, num_heads):
    """Row by row, what the converter does to Llama's q and k: halves of a head alternate."""
    head_dim = len(rows) // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + i
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def read_model(directory):
    """Config and tensors of a directory."""
    config = json.loads((directory / "config.json").read_text())
    return config, load_file(directory / "model.safetensors")


def metadata_of(config):
    """Metadata of a config: key to (method of the writer, value)."""
    family = FAMILIES[config["architectures"][0]]
    rope = config["rope_parameters"]
    default_dim = config["hidden_size"] // config["num_attention_heads"]
    head_dim = config.get("head_dim") or default_dim
    numbers = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    if family != "phi3":
        numbers |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if family in ("gemma2", "gemma3"):
        # The converter has no key for it; the reader takes the one that other models have.
        numbers["attention.scale"] = config["query_pre_attn_scalar"] ** -0.5
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config[key] is not None:
                numbers[key] = config[key]
    if family == "gemma3":
        numbers["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if family == "phi3":
        numbers["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
        numbers["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        numbers["attention.sliding_window"] = config["sliding_window"] or 0
    elif config.get("sliding_window"):
        numbers["attention.sliding_window"] = config["sliding_window"]
    if family not in ("gemma", "gemma2"):
        numbers["rope.freq_base"] = rope["rope_theta"]
    metadata = {
        f"{family}.{key}": ("add_float32" if isinstance(value, float) else "add_uint32", value)
        for key, value in numbers.items()
    }
    if rope["rope_type"] in ("linear", "yarn"):
        metadata[f"{family}.rope.scaling.type"] = ("add_string", rope["rope_type"])
        metadata[f"{family}.rope.scaling.factor"] = ("add_float32", rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        metadata[f"{family}.rope.scaling.original_context_length"] = ("add_uint32", original)
    return metadata | {
        "tokenizer.ggml.bos_token_id": ("add_uint32", config["bos_token_id"]),
        "tokenizer.ggml.eos_token_id": ("add_uint32", config["eos_token_id"]),
    }


def tensors_of(config, hf_tensors):
    """Tensors under their GGUF names, with the converter's changes."""
    family = FAMILIES[config["architectures"][0]]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    modules = dict(_MODULES, post_attention_layernorm="ffn_norm")
    if family in ("gemma2", "gemma3"):
        modules["post_attention_layernorm"] = "post_attention_norm"
        modules["pre_feedforward_layernorm"] = "ffn_norm"
        modules["post_feedforward_layernorm"] = "post_ffw_norm"
    tensors = {}
    for hf_name, values in hf_tensors.items():
        hf_module, _, suffix = hf_name.rpartition(".")
        prefix = ""
        if hf_module.startswith("model.layers."):
            _, _, block, hf_module = hf_module.split(".", 3)
            prefix = f"blk.{block}."
        module = modules[hf_module]
        if family == "llama" and module in heads:
            values = interleave(values, heads[module])
        if family.startswith("gemma") and "norm" in module:
            values = values + np.float32(1)
        tensors[f"{prefix}{module}.{suffix}"] = values
    rope = config["rope_parameters"]
    for length in ("long", "short"):
        if factors := rope.get(f"{length}_factor"):
            tensors[f"rope_factors_{length}.weight"] = np.asarray(factors, np.float32)
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_divisors(rope, config["head_dim"])
    return tensors


def llama3_divisors(rope, head_dim):
    """What the converter writes of Llama 3.1's bands: a divisor per frequency."""
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(divisors, np.float32)


def write_file(path, family, metadata, tensors, kind="F32"):
    """A GGUF file of F32 tensors, matrices in `kind` where it fits their rows."""
    writer = gguf.GGUFWriter(path, family)
    for key, (add, value) in metadata.items():
        getattr(writer, add)(key, value)
    for name, values in tensors.items():
        stored = gguf.GGMLQuantizationType[kind]
        block_size, _ = gguf.GGML_QUANT_SIZES[stored]
        if values.ndim == 1 or values.shape[-1] % block_size:
            stored = gguf.GGMLQuantizationType.F32
        data = quantize(np.ascontiguousarray(values, np.float32), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf(path, directory, *, kind="F32", metadata=None, tensors=None) -> Path:
    """Writes a model directory as GGUF, with further or other metadata and tensors."""
    config, hf_tensors = read_model(directory)
    return write_file(
        path,
        FAMILIES[config["architectures"][0]],
        metadata_of(config) | (metadata or {}),
        tensors_of(config, hf_tensors) | (tensors or {}),
        kind,
    )
