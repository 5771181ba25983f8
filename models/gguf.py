"""GGUF files as checkpoints: metadata becomes a Hugging Face config, tensors take its names.

The header is parsed here; the `gguf` package dequantises. Its own reader wraps every string in a
memory-map object, which takes five seconds for the hundred thousand strings of a small vocabulary,
and the header is simple enough to be read in a tenth of one:

    magic u32 | version u32 | number of tensors u64 | number of pairs u64
    pair:    key string | type u32 | value        (an array: type u32 | length u64 | items)
    tensor:  name string | number of dims u32 | dims u64 ... | type u32 | offset u64
    padding up to `general.alignment`; offsets count from there

Source: the GGUF specification, docs/gguf.md of ggml-org/ggml.
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from paged_jax.models.checkpoint import Checkpoint
from paged_jax.models.tokenizer import Tokenizer, tokenizer_from_gguf


@dataclass(frozen=True)
class _Architecture:
    """How one value of `general.architecture` reads as a Hugging Face model."""

    config: Mapping[str, Any]  # keys that are the same for every file of the architecture
    modules: Mapping[str, str]  # GGUF module name -> Hugging Face's; `blk.N` is `model.layers.N`
    interleaved: Mapping[str, str]  # module whose rows the converter reordered -> its head count


_ARCHITECTURES = {
    "llama": _Architecture(
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
        },
        modules={
            "token_embd": "model.embed_tokens",
            "output_norm": "model.norm",
            "output": "lm_head",
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        interleaved={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
    ),
}


def open_gguf(path: str | PathLike[str]) -> Checkpoint:
    """Opens a GGUF file: parses its header and maps its tensor data, which `read` loads on demand.

    A file with precomputed RoPE frequency divisors (tensor `rope_freqs.weight`, as Llama 3.1 has)
    gives `config["rope_freq_factors"]`, one divisor of the inverse frequency per rotated pair.

    Raises: ValueError if the file is unreadable or its architecture unsupported; ImportError if
      the `gguf` package is missing.
    """
    try:
        data = np.asarray(np.memmap(path, np.uint8, "r"))
        metadata, tensors = _parse(data)
    except (OSError, ValueError, ArithmeticError, struct.error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read GGUF file {path}: {reason}") from error
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ValueError(
            f"cannot load GGUF file {path}: architecture {name!r} is not supported "
            f"(supported: {', '.join(_ARCHITECTURES)})"
        )
    try:
        return _GGUFCheckpoint(_ARCHITECTURES[name], metadata, tensors)
    except (ArithmeticError, TypeError, ValueError) as error:  # wrong numbers, wrong types
        raise ValueError(f"cannot load GGUF file {path}: {error}") from error


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]  # row-major, so `[out, in]`: GGUF writes the fastest axis first
    kind: Any  # gguf.GGMLQuantizationType
    data: np.ndarray  # u8, mapped

    def read(self) -> np.ndarray:
        from gguf.quants import dequantize

        # The library works through groups of 16 rows, which is slow for many short ones. A row is
        # a whole number of quantisation blocks, so that several can pose as one long row.
        num_rows = math.prod(self.shape[:-1])
        rows = self.data.reshape(num_rows // math.gcd(num_rows, 16), -1)
        try:
            values = dequantize(rows, self.kind)
        except NotImplementedError as error:
            raise ValueError(f"tensor type {self.kind.name} is not supported") from error
        return np.array(values, np.float32).reshape(self.shape)  # f32 data would be a view


class _GGUFCheckpoint:
    """Implements `Checkpoint`."""

    def __init__(
        self,
        architecture: _Architecture,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, _Tensor],
    ):
        self._metadata = metadata
        self.config = _config(architecture, metadata, tensors)
        self.generation_config = _generation_config(metadata)
        self._tensors: dict[str, _Tensor] = {}
        self._num_interleaved_heads: dict[str, int] = {}
        for name, tensor in tensors.items():
            if name == "rope_freqs.weight":
                continue  # in the config
            module, _, suffix = name.rpartition(".")
            block = re.fullmatch(r"blk\.(\d+)\.(.+)", module)
            prefix, module = (f"model.layers.{block[1]}.", block[2]) if block else ("", module)
            # A name without translation keeps its own, for the loader to report as surplus.
            known = architecture.modules.get(module)
            hf_name = f"{prefix}{known}.{suffix}" if known else name
            self._tensors[hf_name] = tensor
            if module in architecture.interleaved:
                self._num_interleaved_heads[hf_name] = self.config[architecture.interleaved[module]]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        try:
            values = self._tensors[name].read()
        except ValueError as error:
            raise ValueError(f"cannot read tensor {name}: {error}") from error
        if name in self._num_interleaved_heads:
            values = _split_halves(values, self._num_interleaved_heads[name])
        return values

    def tokenizer(self) -> Tokenizer | None:
        if self._metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
            return None
        return tokenizer_from_gguf(self._metadata)


def _split_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Puts the rows of each head back in Hugging Face's order.

    Rotated pairs are rows (i, i + D/2) of a head there; the converter to GGUF makes them
    neighbours: 0, D/2, 1, D/2 + 1, ...
    """
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _config(
    architecture: _Architecture, metadata: Mapping[str, Any], tensors: Mapping[str, _Tensor]
) -> dict[str, Any]:
    prefix = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{prefix}.{key}", default)
        if value is None:
            raise ValueError(f"metadata key {prefix}.{key} is missing")
        if isinstance(value, list):
            raise ValueError(f"{prefix}.{key} varies by layer, which is not supported")
        # Numbers are f32 here: 1e-05 again, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    if num_experts := get("expert_count", 0):
        raise ValueError(f"{num_experts} experts ({prefix}.expert_count) are not supported")
    if metadata.get("split.count", 1) > 1:
        raise ValueError("a model split over several files is not supported; merge them first")
    if "token_embd.weight" not in tensors:
        raise ValueError("tensor token_embd.weight is missing")
    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    rope_dim = get("rope.dimension_count", 0)
    head_dim = get("attention.key_length", rope_dim or hidden_size // num_heads)
    if rope_dim not in (0, head_dim):
        raise ValueError(f"rotating {rope_dim} of {head_dim} head dimensions is not supported")

    config = dict(architecture.config) | {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "rope_parameters": {"rope_type": "default", "rope_theta": get("rope.freq_base", 1e4)},
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    scaling = get("rope.scaling.type", "none")
    if scaling == "linear":
        config["rope_parameters"] |= {"rope_type": "linear", "factor": get("rope.scaling.factor")}
    elif scaling != "none":
        raise ValueError(f"RoPE scaling {scaling!r} is not supported (supported: none, linear)")
    if "rope_freqs.weight" in tensors:
        config["rope_freq_factors"] = tensors["rope_freqs.weight"].read().tolist()
    return config


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    keys = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
    ends = dict.fromkeys(metadata[key] for key in keys if key in metadata)  # ordered, once each
    return {"eos_token_id": list(ends)} if ends else {}


_STRING, _ARRAY = 8, 9
_DTYPES = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")


def _parse(data: np.ndarray) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    """Reads the header of a GGUF file, given as u8[size]."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ImportError(
            "reading GGUF files needs the gguf package: pip install 'paged-jax[llm]'"
        ) from error

    view, position = data.data, 0

    def unpack(format: str) -> tuple[Any, ...]:
        nonlocal position
        start, position = position, position + struct.calcsize("<" + format)
        return struct.unpack_from("<" + format, view, start)

    def text() -> str:
        nonlocal position
        (length,) = unpack("Q")
        position += length
        if position > len(view):
            raise ValueError("the file is truncated")
        return str(view[position - length : position], "utf-8")

    def items(kind: int, length: int) -> list[Any]:
        nonlocal position
        if kind == _STRING:
            return [text() for _ in range(length)]
        dtype = _DTYPES[kind] if kind < len(_DTYPES) else None
        if dtype is None:
            raise ValueError(f"unknown metadata type {kind}")
        values = np.frombuffer(view, dtype, length, position)
        position += values.nbytes
        return values.tolist()

    if bytes(view[:4]) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    _, version, num_tensors, num_pairs = unpack("IIQQ")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not supported (supported: 2, 3, little-endian)")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key, (kind,) = text(), unpack("I")
        metadata[key] = items(*unpack("IQ")) if kind == _ARRAY else items(kind, 1)[0]

    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name, (num_dims,) = text(), unpack("I")
        entries.append((name, unpack(f"{num_dims}Q")[::-1], *unpack("IQ")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-position // alignment) * alignment
    tensors: dict[str, _Tensor] = {}
    for name, shape, raw_kind, offset in entries:
        kind = GGMLQuantizationType(raw_kind)
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block_size:
            raise ValueError(f"tensor {name} has shape {shape}, not rows of {block_size}")
        begin, num_bytes = start + offset, math.prod(shape) // block_size * block_bytes
        if begin + num_bytes > len(view):
            raise ValueError(f"the file is truncated within tensor {name}")
        tensors[name] = _Tensor(shape, kind, data[begin : begin + num_bytes])
    return metadata, tensors
