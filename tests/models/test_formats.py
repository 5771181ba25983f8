"""One model in every format: the same spec and the same parameters, whatever it was read from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from paged_jax import LLM
from paged_jax.models.convert import convert
from paged_jax.models.load import load_model, open_checkpoint
from paged_jax.models.rope import inverse_frequencies
from paged_jax.models.spec import DecoderSpec
from tests.llm_harness import OPTIONS
from tests.models.gguf_files import (
    FAMILIES,
    metadata_of,
    read_model,
    tensors_of,
    write_file,
    write_gguf,
)
from tests.models.tiny import NAMES, TINY, config, model, short_set_first

IN_GGUF = [name for name in NAMES if config(name)["architectures"][0] in FAMILIES]


def parameters(decoder) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(decoder)))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_parameters(got, want, atol=0.0):
    got, want = parameters(got), parameters(want)
    assert got.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", short_set_first())
def test_orbax_gives_the_same_model(tmp_path, name):
    convert(TINY / name, tmp_path / "model")
    got = load_model(open_checkpoint(tmp_path / "model"))
    assert got.spec == model(name).spec
    assert_same_parameters(got, model(name))


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_gives_the_same_model(tmp_path, name):
    got = load_model(open_checkpoint(write_gguf(tmp_path / "model.gguf", TINY / name)))
    assert without_rope(got.spec) == without_rope(model(name).spec)
    for ours, theirs in zip(got.spec.layers, model(name).spec.layers, strict=True):
        ours, theirs = ours.attention, theirs.attention
        assert ours.rope.attention_factor == pytest.approx(theirs.rope.attention_factor, rel=1e-6)
        np.testing.assert_allclose(
            inverse_frequencies(ours.rope, ours.head_dim),
            inverse_frequencies(theirs.rope, theirs.head_dim),
            rtol=1e-6,
        )
    # Norms of Gemma go through a sum with 1.
    assert_same_parameters(got, model(name), atol=1e-6 if "gemma" in name else 0.0)


def test_a_quantised_embedding_is_the_head_too(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", TINY / "llama_tied_bias", kind="Q8_0")
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint)
    assert model.head is None
    embedding = checkpoint.read("model.embed_tokens.weight")
    hidden = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    np.testing.assert_array_equal(model.embed(jnp.asarray([5, 319])), embedding[[5, 319]])
    np.testing.assert_allclose(model.logits(jnp.asarray(hidden)), hidden @ embedding.T, atol=1e-5)


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_gguf_file_that_names_one_end_is_served(tmp_path, has_tokenizer):
    """With a tokenizer, ends of a turn are found by their texts."""
    config_, hf_tensors = read_model(TINY / "llama")
    metadata = metadata_of(config_)
    del metadata["tokenizer.ggml.bos_token_id"]
    metadata["tokenizer.ggml.eos_token_id"] = ("add_uint32", 7)
    if has_tokenizer:
        texts = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ab", "<|im_end|>"]
        metadata |= {
            "tokenizer.ggml.model": ("add_string", "gpt2"),
            "tokenizer.ggml.pre": ("add_string", "gpt-2"),
            "tokenizer.ggml.tokens": ("add_array", texts),
            "tokenizer.ggml.merges": ("add_array", ["a b"]),
            "tokenizer.ggml.token_type": ("add_array", [1] * 257 + [3]),
        }
    path = tmp_path / "model.gguf"
    write_file(path, "llama", metadata, tensors_of(config_, hf_tensors), "Q8_0")
    with LLM(path, **OPTIONS) as llm:
        assert llm.engine.eos_token_ids == ({7, 257} if has_tokenizer else {7})


def without_rope(spec: DecoderSpec) -> DecoderSpec:
    """A spec without rope, which formats describe in different ways; numbers as GGUF has them."""

    def clean(layer):
        scale = layer.attention.sm_scale
        scale = None if scale is None else float(np.float32(scale))
        attention = dataclasses.replace(layer.attention, rope=None, sm_scale=scale)
        return dataclasses.replace(layer, attention=attention)

    return dataclasses.replace(spec, layers=tuple(map(clean, spec.layers)))
