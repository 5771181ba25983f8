import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from safetensors.numpy import load_file

from paged_jax.models.gguf import open_gguf

TINY = Path(__file__).parents[1] / "data" / "tiny"
MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(rows, num_heads):
    """Row by row, what the converter does to q and k: halves of a head become neighbours."""
    head_dim = len(rows) // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + i
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def write(path, tensors, *, architecture="llama", metadata=None, kind="F32"):
    """A GGUF file of F32 tensors, matrices in `kind` where it fits their rows."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, (add, value) in (metadata or {}).items():
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


def llama_metadata(config):
    return {
        "llama.context_length": ("add_uint32", config["max_position_embeddings"]),
        "llama.embedding_length": ("add_uint32", config["hidden_size"]),
        "llama.block_count": ("add_uint32", config["num_hidden_layers"]),
        "llama.feed_forward_length": ("add_uint32", config["intermediate_size"]),
        "llama.attention.head_count": ("add_uint32", config["num_attention_heads"]),
        "llama.attention.head_count_kv": ("add_uint32", config["num_key_value_heads"]),
        "llama.attention.key_length": ("add_uint32", config["head_dim"]),
        "llama.attention.layer_norm_rms_epsilon": ("add_float32", config["rms_norm_eps"]),
        "llama.rope.freq_base": ("add_float32", config["rope_parameters"]["rope_theta"]),
        "tokenizer.ggml.bos_token_id": ("add_uint32", config["bos_token_id"]),
        "tokenizer.ggml.eos_token_id": ("add_uint32", config["eos_token_id"]),
    }


def llama_tensors(config, hf_tensors):
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for hf_name, values in hf_tensors.items():
        hf_module, _, suffix = hf_name.rpartition(".")
        prefix = ""
        if hf_module.startswith("model.layers."):
            _, _, block, hf_module = hf_module.split(".", 3)
            prefix = f"blk.{block}."
        module = MODULES[hf_module]
        if module in heads:
            values = interleave(values, heads[module])
        tensors[f"{prefix}{module}.{suffix}"] = values
    return tensors


def read_tiny(name):
    config = json.loads((TINY / name / "config.json").read_text())
    return config, load_file(TINY / name / "model.safetensors")


def write_tiny(path, name, *, kind="F32", extra_tensors=None, **extra_metadata):
    config, hf_tensors = read_tiny(name)
    metadata = llama_metadata(config) | extra_metadata
    tensors = llama_tensors(config, hf_tensors) | (extra_tensors or {})
    return write(path, tensors, metadata=metadata, kind=kind)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("name", ["llama", "llama_mha", "llama_mqa_hd", "llama_tied_bias"])
def test_a_converted_checkpoint_reads_as_the_original(path, name):
    config, hf_tensors = read_tiny(name)
    checkpoint = open_gguf(write_tiny(path, name))

    assert checkpoint.shapes() == {key: values.shape for key, values in hf_tensors.items()}
    for key, values in hf_tensors.items():
        np.testing.assert_array_equal(checkpoint.read(key), values, err_msg=key)
        assert checkpoint.read(key).dtype == np.float32
    assert checkpoint.config.items() <= config.items()
    assert checkpoint.generation_config == {"eos_token_id": [2]}
    assert checkpoint.tokenizer() is None


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (4, 4), (6, 1)])
def test_query_and_key_rows_return_to_halves(path, num_heads, num_kv_heads):
    config, hf_tensors = read_tiny("llama_tied_bias")
    config |= {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    rng = np.random.default_rng(0)
    attn = "model.layers.0.self_attn."
    for module, heads in (("q_proj", num_heads), ("k_proj", num_kv_heads)):
        rows = heads * config["head_dim"]
        hf_tensors[f"{attn}{module}.weight"] = rng.normal(size=(rows, 64)).astype(np.float32)
        hf_tensors[f"{attn}{module}.bias"] = rng.normal(size=rows).astype(np.float32)
    tensors = llama_tensors(config, hf_tensors)
    checkpoint = open_gguf(write(path, tensors, metadata=llama_metadata(config)))

    for module in ("q_proj", "k_proj"):
        for suffix in ("weight", "bias"):
            name = f"{attn}{module}.{suffix}"
            np.testing.assert_array_equal(checkpoint.read(name), hf_tensors[name])


# Largest error as a fraction of the largest value: half a rounding step of each format.
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("F32", 0),
        ("F16", 2**-11),
        ("BF16", 2**-8),
        ("Q8_0", 0.5 / 127),
        ("Q4_1", 1.01 / 15),  # the step is max - min, up to twice the largest, over 15
        ("Q4_0", 1.01 / 8),  # the value opposite in sign to the largest may be cut by one step
    ],
)
@pytest.mark.parametrize("num_rows", [37, 48])
def test_every_format_keeps_its_precision(path, kind, tolerance, num_rows):
    config, hf_tensors = read_tiny("llama")
    values = np.random.default_rng(0).normal(size=(num_rows, 64)).astype(np.float32)
    tensors = llama_tensors(config, hf_tensors) | {"blk.0.ffn_up.weight": values}
    checkpoint = open_gguf(write(path, tensors, metadata=llama_metadata(config), kind=kind))

    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.shapes()[name] == (num_rows, 64)
    read = checkpoint.read(name)
    assert read.dtype == np.float32
    assert read.shape == (num_rows, 64)
    # Blocks of 32 share a scale, so the bound is by block.
    error = np.abs(read - values).reshape(-1, 32).max(axis=1)
    largest = np.abs(values).reshape(-1, 32).max(axis=1)
    assert (error <= largest * (tolerance + 1e-3 * (kind[0] == "Q"))).all()


def test_reading_agrees_with_the_gguf_package(path):
    write_tiny(path, "llama_mqa_hd", kind="Q8_0")
    reader = gguf.GGUFReader(path)
    checkpoint = open_gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(checkpoint.shapes()) == len(tensors)
    for name, hf_name in (
        ("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"),
        ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
    ):
        expected = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        np.testing.assert_array_equal(checkpoint.read(hf_name), expected)


def test_the_output_matrix_decides_about_tying(path, tmp_path):
    assert open_gguf(write_tiny(path, "llama_tied_bias")).config["tie_word_embeddings"]
    untied = open_gguf(write_tiny(tmp_path / "untied.gguf", "llama"))
    assert not untied.config["tie_word_embeddings"]
    assert "lm_head.weight" in untied.shapes()


def test_linear_rope_scaling_reads_as_the_original(path):
    scaling = {
        "llama.rope.scaling.type": ("add_string", "linear"),
        "llama.rope.scaling.factor": ("add_float32", 4.0),
    }
    checkpoint = open_gguf(write_tiny(path, "llama_rope_linear", **scaling))
    original = read_tiny("llama_rope_linear")[0]
    assert checkpoint.config["rope_parameters"] == original["rope_parameters"]


def test_other_rope_scaling_is_refused(path):
    write_tiny(path, "llama", **{"llama.rope.scaling.type": ("add_string", "yarn")})
    with pytest.raises(ValueError, match="'yarn' is not supported"):
        open_gguf(path)


def test_precomputed_rope_factors_are_in_the_config(path):
    factors = np.array([1, 1, 1.5, 2, 3, 5, 8, 8], np.float32)
    write_tiny(path, "llama_rope_llama3", extra_tensors={"rope_freqs.weight": factors})
    checkpoint = open_gguf(path)
    assert checkpoint.config["rope_freq_factors"] == factors.tolist()
    assert "rope_freqs.weight" not in checkpoint.shapes()


def test_every_end_token_stops_generation(path):
    ends = {
        "tokenizer.ggml.eot_token_id": ("add_uint32", 7),
        "tokenizer.ggml.eom_token_id": ("add_uint32", 2),
    }
    checkpoint = open_gguf(write_tiny(path, "llama", **ends))
    assert checkpoint.generation_config == {"eos_token_id": [2, 7]}
    assert checkpoint.config["eos_token_id"] == 2


def test_head_dim_comes_from_the_key_length_then_rope_then_the_width(path):
    config, hf_tensors = read_tiny("llama")
    metadata = llama_metadata(config)
    del metadata["llama.attention.key_length"]
    tensors = llama_tensors(config, hf_tensors)
    assert open_gguf(write(path, tensors, metadata=metadata)).config["head_dim"] == 16
    metadata["llama.rope.dimension_count"] = ("add_uint32", 32)
    assert open_gguf(write(path, tensors, metadata=metadata)).config["head_dim"] == 32


def test_an_unknown_tensor_keeps_its_name(path):
    write_tiny(path, "llama", extra_tensors={"blk.0.surprise.weight": np.ones(4, np.float32)})
    assert open_gguf(path).shapes()["blk.0.surprise.weight"] == (4,)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"llama.expert_count": ("add_uint32", 8)}, "8 experts"),
        ({"llama.rope.dimension_count": ("add_uint32", 8)}, "rotating 8 of 16"),
        ({"llama.attention.head_count_kv": ("add_array", [2, 4])}, "varies by layer"),
        ({"split.count": ("add_uint16", 3)}, "several files"),
        ({"llama.embedding_length": ("add_string", "wide")}, "cannot load GGUF file"),
    ],
)
def test_what_the_config_cannot_express_is_refused(path, metadata, reason):
    write_tiny(path, "llama", **metadata)
    with pytest.raises(ValueError, match=reason):
        open_gguf(path)


def test_an_unsupported_architecture_names_the_supported_ones(path):
    write(path, {}, architecture="mamba")
    with pytest.raises(ValueError, match=r"'mamba' is not supported \(supported: llama\)"):
        open_gguf(path)


def test_missing_metadata_is_named(path):
    write(path, {"token_embd.weight": np.ones((4, 4), np.float32)})
    with pytest.raises(ValueError, match=r"llama\.embedding_length is missing"):
        open_gguf(path)


@pytest.mark.parametrize(
    "contents", [b"", b"GGUF", b"GGUF\3\0\0\0", b"PK\3\4 not a model", b"GGML"]
)
def test_a_file_that_is_not_gguf_is_refused(path, contents):
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=f"^cannot read GGUF file {path}: [^\n]+$"):
        open_gguf(path)


def test_a_missing_file_is_refused(path):
    with pytest.raises(ValueError, match="No such file"):
        open_gguf(path)


def test_an_unsupported_version_is_refused(path):
    path.write_bytes(b"GGUF" + bytes([0, 0, 0, 3]) + bytes(16))  # big-endian 3
    with pytest.raises(ValueError, match=r"version 50331648 is not supported"):
        open_gguf(path)


def test_a_file_cut_anywhere_is_refused(path, tmp_path):
    whole = write_tiny(path, "llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    for num_bytes in [*range(1, 2400, 13), len(whole) // 2, len(whole) - 1024]:
        cut.write_bytes(whole[:num_bytes])
        with pytest.raises(ValueError, match=r"^cannot read GGUF file [^\n]+$"):
            open_gguf(cut)


def test_the_embedded_model_opens(smollm2_path):
    checkpoint = open_gguf(smollm2_path)
    assert checkpoint.config["num_hidden_layers"] == 30
    assert checkpoint.config["rms_norm_eps"] == 1e-05
    assert len(checkpoint.shapes()) == 272
    assert checkpoint.read("model.layers.3.self_attn.k_proj.weight").shape == (192, 576)
    assert checkpoint.tokenizer() is not None
