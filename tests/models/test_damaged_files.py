"""Thousands of damaged files: each is refused with a ValueError that names it, or read.

Whatever a header claims, it gets next to no memory.
"""

import json
import random
import resource
import struct
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import save_file

from paged_jax.models.gguf import open_gguf
from paged_jax.models.safetensors import open_directory
from tests.models.gguf_files import metadata_of, tensors_of, write_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = {
    "model.embed_tokens.weight": (6, 8),
    "model.norm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 4),
}
TENSORS = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
MAX_BYTES = 64 << 20  # more than the process has before; the files are of 2 kB
EXTREMES = [0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]


def damage(draw: random.Random, whole: bytes, header_bytes: int) -> bytes:
    """One to three changes: bits, bytes, integers, or a piece cut out, doubled or appended."""
    data = bytearray(whole)
    for _ in range(draw.choice((1, 1, 2, 3))):
        at = draw.randrange(min(header_bytes, len(data)) or 1)
        kind = draw.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and data:
            data[at] = draw.randrange(256)
        elif kind in (2, 3):
            width = draw.choice("IQ")
            value = draw.choice(EXTREMES) % 2 ** (8 * struct.calcsize(width))
            data[at : at + struct.calcsize(width)] = struct.pack(f"<{width}", value)
        elif kind == 4:
            del data[at : at + draw.randrange(1, 20)]
        elif kind == 5:
            data[at:at] = data[at : at + draw.randrange(1, 40)]
        else:
            del data[draw.randrange(len(data) + 1) :]
    return bytes(data)


def rewrite(path, data):
    """Not by a new file: to empty one and fill it again makes some file systems wait for disks."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def outcome(open_model, path):
    """ "read" or "refused"; anything else raises."""
    names = [str(path.parent)]
    try:
        checkpoint = open_model()
        for names[0] in checkpoint.shapes():
            checkpoint.read(names[0])
    except ValueError as error:
        return "refused" if names[0] in str(error) else f"unnamed: {error}"
    json.dumps([checkpoint.config, checkpoint.generation_config])
    return "read"


@pytest.fixture
def little_memory():
    """Allocations that would be large raise a MemoryError, which no test expects."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MAX_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_large_allocation_would_be_noticed(little_memory):
    with pytest.raises(MemoryError):
        np.empty(2 * MAX_BYTES, np.uint8)


def test_ten_thousand_damaged_gguf_files(tmp_path, little_memory):
    path = tmp_path / "model.gguf"
    words = [f"word{i}" for i in range(6)]
    metadata = metadata_of(CONFIG) | {
        "general.alignment": ("add_uint32", 32),
        "tokenizer.ggml.tokens": ("add_array", words),
        "tokenizer.ggml.scores": ("add_array", [0.5] * 6),
        "tokenizer.ggml.add_bos_token": ("add_bool", True),
        "llama.rope.scaling.type": ("add_string", "linear"),
        "llama.rope.scaling.factor": ("add_float32", 2.0),
    }
    tensors = tensors_of(CONFIG, TENSORS) | {"rope_freqs.weight": np.ones(2, np.float32)}
    whole = write_file(path, "llama", metadata, tensors).read_bytes()
    header_bytes = whole.rindex(b"rope_freqs.weight") + 40
    assert outcome(lambda: open_gguf(path), path) == "read"
    found, draw = Counter(), random.Random(0)
    for _ in range(10_000):
        rewrite(path, damage(draw, whole, header_bytes))
        found[outcome(lambda: open_gguf(path), path)] += 1
    assert found.keys() == {"read", "refused"}
    assert min(found.values()) > 500


def test_thousands_of_damaged_safetensors_files(tmp_path, little_memory):
    path = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    blocks = {
        "x_blocks": np.ones((1, 2, 1, 16), np.uint8),
        "x_scales": np.ones((1, 2, 1), np.uint8),
    }
    save_file(TENSORS | blocks, path)
    whole = path.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    found, draw = Counter(), random.Random(0)
    for _ in range(4_000):
        rewrite(path, damage(draw, whole, header_bytes))
        found[outcome(lambda: open_directory(tmp_path), path)] += 1
    assert found.keys() == {"read", "refused"}
    assert min(found.values()) > 50


def test_thousands_of_damaged_indices(tmp_path, little_memory):
    path = tmp_path / "model.safetensors.index.json"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    halves = {"a.safetensors": list(TENSORS)[::2], "b.safetensors": list(TENSORS)[1::2]}
    for file, names in halves.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / file)
    weight_map = {name: file for file, names in halves.items() for name in names}
    whole = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()
    path.write_bytes(whole)
    found, draw = Counter(), random.Random(0)
    for _ in range(2_000):
        rewrite(path, damage(draw, whole, len(whole)))
        found[outcome(lambda: open_directory(tmp_path), path)] += 1
    assert found.keys() == {"read", "refused"}
    assert min(found.values()) > 10
