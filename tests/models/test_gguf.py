import struct

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.quants import quantize

from paged_jax.models.gguf import open_gguf
from tests.conftest import DATA
from tests.models.gguf_files import (
    interleave,
    metadata_of,
    read_model,
    tensors_of,
    write_file,
    write_gguf,
)

TINY = DATA / "tiny"
MODELS = [
    *("llama", "llama_mha", "llama_mqa_hd", "llama_tied_bias", "llama_rope_linear"),
    *("llama_rope_yarn", "mistral_swa", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"),
]
ATTENTION = "model.layers.0.self_attn."


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_checkpoint_reads_as_the_original(path, name):
    config, hf_tensors = read_model(TINY / name)
    checkpoint = open_gguf(write_gguf(path, TINY / name))

    assert checkpoint.shapes() == {key: values.shape for key, values in hf_tensors.items()}
    for key, values in hf_tensors.items():
        read = checkpoint.read(key)
        assert read.dtype == np.float32
        if name.startswith("gemma") and "norm" in key:
            # 1 + w in the file lost half a unit in the last place of numbers below 2.
            np.testing.assert_allclose(read, values, atol=2**-24, rtol=0, err_msg=key)
            assert np.abs(values).max() > 0.01
        else:
            np.testing.assert_array_equal(read, values, err_msg=key)
    assert checkpoint.config.items() <= config.items()
    assert checkpoint.generation_config == {"eos_token_id": [2]}
    assert checkpoint.tokenizer() is None


@pytest.mark.parametrize("name", MODELS)
def test_every_key_that_shapes_the_computation_is_in_the_config(path, name):
    config, _ = read_model(TINY / name)
    passive = {
        *("attention_dropout", "dtype", "initializer_range", "pad_token_id", "pretraining_tp"),
        *("transformers_version", "use_cache", "embd_pdrop", "resid_pdrop"),
        # Implied by others: full attention everywhere, or `layer_types`.
        *("use_bidirectional_attention", "_sliding_window_pattern", "max_window_layers"),
    }
    if name in ("qwen2", "qwen3"):
        passive.add("layer_types")
    assert config.keys() - open_gguf(write_gguf(path, TINY / name)).config.keys() <= passive


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (8, 8), (6, 1)])
def test_query_and_key_rows_return_to_halves(path, architecture, num_heads, num_kv_heads):
    name = "llama_tied_bias" if architecture == "llama" else "qwen2"
    config, hf_tensors = read_model(TINY / name)
    config |= {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    config["head_dim"] = 16
    rng = np.random.default_rng(0)
    for module, heads in (("q_proj", num_heads), ("k_proj", num_kv_heads)):
        rows = heads * 16
        hf_tensors[f"{ATTENTION}{module}.weight"] = rng.normal(size=(rows, 64)).astype(np.float32)
        hf_tensors[f"{ATTENTION}{module}.bias"] = rng.normal(size=rows).astype(np.float32)
    tensors = tensors_of(config, hf_tensors)
    checkpoint = open_gguf(write_file(path, architecture, metadata_of(config), tensors))

    for module in ("q_proj", "k_proj"):
        for suffix in ("weight", "bias"):
            key = f"{ATTENTION}{module}.{suffix}"
            np.testing.assert_array_equal(checkpoint.read(key), hf_tensors[key])
    stored = tensors["blk.0.attn_k.weight"]
    is_moved = not np.array_equal(stored, hf_tensors[f"{ATTENTION}k_proj.weight"])
    assert is_moved == (architecture == "llama")


def test_interleaving_swaps_the_middle_rows_of_a_head_of_four():
    np.testing.assert_array_equal(interleave(np.arange(8), 2), [0, 2, 1, 3, 4, 6, 5, 7])


def with_matrix(path, values, kind):
    """Name of a matrix of an F32 file, replaced by `values` as they are stored in `kind`."""
    config, hf_tensors = read_model(TINY / "llama")
    writer = gguf.GGUFWriter(path, "llama")
    for key, (add, value) in metadata_of(config).items():
        getattr(writer, add)(key, value)
    for name, tensor in tensors_of(config, hf_tensors).items():
        if name != "blk.0.ffn_up.weight":
            writer.add_tensor(name, tensor)
    writer.add_tensor("blk.0.ffn_up.weight", values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return "model.layers.0.mlp.up_proj.weight"


# Largest error as a fraction of the largest value of a block: half a rounding step of each format.
PRECISION = {
    "F32": 0,
    "F16": 2**-11,
    "BF16": 2**-8,
    "Q8_0": 0.5 / 127,
    "Q5_1": 1.01 / 31,  # the step is max - min, up to twice the largest, over 31
    "Q5_0": 1.01 / 16,  # the value opposite in sign to the largest may be cut by one step
    "Q4_1": 1.01 / 15,
    "Q4_0": 1.01 / 8,
    "MXFP4": 0.26,  # the largest may be cut from 8 to 6
    "TQ1_0": 0.51,  # -1, 0, 1 times the largest
    "TQ2_0": 0.51,
}


@pytest.mark.parametrize("kind", PRECISION)
@pytest.mark.parametrize("shape", [(1, 256), (37, 256), (48, 256), (256,)])
def test_every_format_keeps_its_precision(path, kind, shape):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    stored = gguf.GGMLQuantizationType[kind]
    name = with_matrix(path, quantize(values, stored), stored)
    checkpoint = open_gguf(path)

    assert checkpoint.shapes()[name] == shape
    read = checkpoint.read(name)
    assert read.dtype == {"F16": np.float16, "BF16": jnp.bfloat16}.get(kind, np.float32)
    assert read.shape == shape
    block_size = 256 if kind.startswith("TQ") else 32
    error = np.abs(read.astype(np.float32) - values).reshape(-1, block_size).max(axis=1)
    largest = np.abs(values).reshape(-1, block_size).max(axis=1)
    assert (error <= largest * (PRECISION[kind] + 1e-3 * ("Q" in kind))).all()


@pytest.mark.parametrize(
    "kind",
    [
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
        *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 17])
def test_any_bytes_of_a_format_read_as_the_gguf_package_has_them(path, kind, num_rows):
    stored = gguf.GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[stored]
    rng = np.random.default_rng(0)
    row_bytes = 512 // block_size * block_bytes
    # Small bytes only where a scale may be: none of them is infinite or not a number.
    values = rng.integers(0, 120, (num_rows, row_bytes), np.uint8)
    name = with_matrix(path, values, stored)
    checkpoint = open_gguf(path)

    assert checkpoint.shapes()[name] == (num_rows, 512)
    expected = gguf.dequantize(values, stored)
    assert np.isfinite(expected).all()
    assert np.ptp(expected) > 0
    np.testing.assert_array_equal(checkpoint.read(name), expected)


def test_a_large_matrix_is_dequantised_in_parts(path):
    values = np.random.default_rng(0).normal(size=(4100, 288)).astype(np.float32)  # 18.02 parts
    stored = gguf.GGMLQuantizationType.Q8_0
    quantised = quantize(values, stored)
    name = with_matrix(path, quantised, stored)
    np.testing.assert_array_equal(open_gguf(path).read(name), gguf.dequantize(quantised, stored))


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_tensors_are_cast_while_they_are_read(path, kind):
    checkpoint = open_gguf(write_gguf(path, TINY / "gemma3", kind=kind))
    for name in (
        *("model.embed_tokens.weight", "model.norm.weight"),
        *(f"{ATTENTION}q_proj.weight", f"{ATTENTION}q_norm.weight"),
    ):
        as_stored = checkpoint.read(name)
        read = checkpoint.read(name, np.dtype(np.float16))
        assert read.dtype == np.float16
        np.testing.assert_array_equal(read, as_stored.astype(np.float16))


def test_integers_are_no_weights(path):
    name = with_matrix(path, np.ones((4, 4), np.int32), gguf.GGMLQuantizationType.I32)
    with pytest.raises(ValueError, match=rf"cannot read tensor {name}: tensor type I32"):
        open_gguf(path).read(name)


def test_what_is_read_is_a_copy_that_jax_need_not_copy_again(path):
    write_gguf(path, TINY / "llama", kind="Q8_0")
    checkpoint = open_gguf(path)
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        before = checkpoint.read(name)
        assert before.ctypes.data % 64 == 0
        before[...] = 0
        assert np.any(checkpoint.read(name))


def test_reading_agrees_with_the_gguf_package(path):
    write_gguf(path, TINY / "llama_mqa_hd", kind="Q8_0")
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


@pytest.mark.parametrize("name", ["llama_tied_bias", "qwen2", "gemma"])
def test_without_an_output_matrix_the_quantised_embedding_is_the_head(path, name):
    checkpoint = open_gguf(write_gguf(path, TINY / name, kind="Q8_0"))
    assert checkpoint.config["tie_word_embeddings"]
    assert "lm_head.weight" not in checkpoint.shapes()
    embedding = checkpoint.read("model.embed_tokens.weight")
    _, hf_tensors = read_model(TINY / name)
    original = hf_tensors["model.embed_tokens.weight"]
    assert embedding.shape == original.shape
    np.testing.assert_allclose(embedding, original, atol=np.abs(original).max() / 100)


def test_an_output_matrix_unties_it(path):
    untied = open_gguf(write_gguf(path, TINY / "llama"))
    assert not untied.config["tie_word_embeddings"]
    assert "lm_head.weight" in untied.shapes()


def test_every_end_token_stops_generation(path):
    ends = {
        "tokenizer.ggml.eot_token_id": ("add_uint32", 7),
        "tokenizer.ggml.eom_token_id": ("add_uint32", 2),
    }
    checkpoint = open_gguf(write_gguf(path, TINY / "llama", metadata=ends))
    assert checkpoint.generation_config == {"eos_token_id": [2, 7]}
    assert checkpoint.config["eos_token_id"] == 2


def test_an_unknown_tensor_keeps_its_name(path):
    extra = {"blk.0.surprise.weight": np.ones(4, np.float32)}
    write_gguf(path, TINY / "llama", tensors=extra)
    assert open_gguf(path).shapes()["blk.0.surprise.weight"] == (4,)


def test_an_unsupported_architecture_names_the_supported_ones(path):
    write_file(path, "mamba", {}, {})
    with pytest.raises(ValueError, match=r"'mamba' is not supported \(supported: llama, qwen2,"):
        open_gguf(path)


def test_missing_metadata_is_named(path):
    write_file(path, "llama", {}, {"token_embd.weight": np.ones((4, 4), np.float32)})
    with pytest.raises(ValueError, match=r"llama\.block_count is missing"):
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
    whole = write_gguf(path, TINY / "llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    for num_bytes in [*range(1, 2400, 13), len(whole) // 2, len(whole) - 1024]:
        cut.write_bytes(whole[:num_bytes])
        with pytest.raises(ValueError, match=r"^cannot read GGUF file [^\n]+$"):
            open_gguf(cut)


def test_a_file_cut_while_it_is_open_is_refused_when_read(path):
    checkpoint = open_gguf(write_gguf(path, TINY / "llama"))
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: the file was cut"):
        checkpoint.read("model.norm.weight")


def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def header(*, num_tensors=0, num_pairs=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + rest


def pair(key, kind, value):
    return string(key) + struct.pack("<I", kind) + value


def array(kind, count, items=b""):
    return struct.pack("<IQ", kind, count) + items


def tensor(name="a", dims=(32,), kind=0, offset=0, num_dims=None):
    num_dims = len(dims) if num_dims is None else num_dims
    packed = struct.pack(f"<I{len(dims)}QIQ", num_dims, *dims, kind, offset)
    return string(name) + packed


ARRAY = 9
HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (header(num_tensors=HUGE), "cannot be in"),
        (header(num_pairs=HUGE), "cannot be in"),
        (header(num_pairs=1, rest=struct.pack("<Q", HUGE) + bytes(64)), "truncated"),
        (header(num_pairs=1, rest=pair("a", ARRAY, array(0, HUGE))), "cannot be in"),
        (header(num_pairs=1, rest=pair("a", ARRAY, array(8, 20, bytes(50)))), "truncated"),
        (header(num_pairs=1, rest=pair("a", ARRAY, array(10, 20, bytes(50)))), "truncated"),
        (header(num_pairs=1, rest=pair("a", ARRAY, array(ARRAY, 1, array(0, 0)))), "of arrays"),
        (header(num_pairs=1, rest=pair("a", ARRAY, array(13, 1, bytes(8)))), "type 13 is unknown"),
        (header(num_pairs=1, rest=pair("a", 77, bytes(8))), "type 77 is unknown"),
        (header(num_pairs=1, rest=pair("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")), "utf-8"),
        (header(num_pairs=2, rest=2 * pair("a", 0, b"\1")), "a is there twice"),
        (header(num_pairs=1, rest=pair("general.alignment", 4, bytes(4))), r"alignment \(0\)"),
        (
            header(num_pairs=1, rest=pair("general.alignment", 10, b"\xff" * 8)),
            "alignment",
        ),
        (header(num_pairs=1, rest=pair("general.alignment", 8, string("x"))), "alignment"),
        (header(num_tensors=1, rest=tensor(num_dims=0) + bytes(200)), "0 dims"),
        (header(num_tensors=1, rest=tensor(num_dims=2**32 - 1) + bytes(200)), "4294967295 dims"),
        (header(num_tensors=1, rest=tensor(dims=(0,)) + bytes(200)), "shape"),
        (header(num_tensors=1, rest=tensor(dims=(HUGE,) * 4) + bytes(200)), "within tensor a"),
        (header(num_tensors=1, rest=tensor(dims=(33,), kind=2) + bytes(200)), "rows of 32"),
        (header(num_tensors=1, rest=tensor(kind=999) + bytes(200)), "unknown type 999"),
        (header(num_tensors=1, rest=tensor(offset=HUGE) + bytes(200)), "within tensor a"),
        (header(num_tensors=2, rest=2 * tensor() + bytes(500)), "a is there twice"),
        (header(num_tensors=2, rest=tensor() + tensor("b", offset=64) + bytes(500)), "overlap"),
    ],
)
def test_absurd_numbers_are_refused(path, contents, reason):
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=rf"^cannot read GGUF file {path}: [^\n]*{reason}"):
        open_gguf(path)


def test_arrays_beyond_any_vocabulary_are_refused(path, monkeypatch):
    monkeypatch.setattr("paged_jax.models.gguf_header._MAX_ITEMS", 100)
    part = pair("a", ARRAY, array(0, 60, bytes(60))), pair("b", ARRAY, array(0, 60, bytes(60)))
    path.write_bytes(header(num_pairs=2, rest=b"".join(part)))
    with pytest.raises(ValueError, match="more than 100 items"):
        open_gguf(path)


def test_the_embedded_model_opens(smollm2_path):
    checkpoint = open_gguf(smollm2_path)
    assert checkpoint.config["num_hidden_layers"] == 30
    assert checkpoint.config["rms_norm_eps"] == 1e-05
    assert len(checkpoint.shapes()) == 272
    assert checkpoint.read("model.layers.3.self_attn.k_proj.weight").shape == (192, 576)
    assert checkpoint.tokenizer() is not None
