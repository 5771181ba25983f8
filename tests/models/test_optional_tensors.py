"""Tensors that not every checkpoint has: biases, and the output head."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from paged_jax.models.decoder import Decoder
from paged_jax.models.load import load_model, open_checkpoint
from paged_jax.models.registry import read_spec
from tests.conftest import DATA

CONFIG = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
}
# Qwen2's config says nothing about biases.
QWEN2 = CONFIG | {"architectures": ["Qwen2ForCausalLM"]}
LLAMA = CONFIG | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True}
CONFIGS = {"qwen2": QWEN2, "llama": LLAMA}
HEAD = "lm_head.weight"


def stored(name: str) -> dict[str, np.ndarray]:
    """Tensors with biases larger than what they are added to, `tokens` and their `logits`."""
    with np.load(DATA / "biases.npz") as found:
        own = [key for key in found.files if key.startswith(f"{name}/")]
        return {key.removeprefix(f"{name}/"): found[key] for key in own}


def load(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], files: int = 1):
    """Writes a checkpoint of one file or of shards with an index, and reads it."""
    (path / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, path / "model.safetensors")
        return load_model(open_checkpoint(path))
    index = {}
    for i in range(files):
        names, file = sorted(tensors)[i::files], f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in names}, path / file)
        index |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return load_model(open_checkpoint(path))


def logits(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda t: model(t))(jnp.asarray(tokens, jnp.int32)[None])[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_biases_act_as_in_transformers(name, tmp_path):
    tensors = stored(name)
    tokens, want = tensors.pop("tokens"), tensors.pop("logits")
    got = logits(load(tmp_path, CONFIGS[name], tensors), tokens)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.max(np.abs(want)), rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_bias_is_needed_where_the_architecture_has_it(name, tmp_path):
    tensors = stored(name)
    del tensors["tokens"], tensors["logits"]
    has_out_bias = "model.layers.0.self_attn.o_proj.bias" in tensors
    assert has_out_bias == (name == "llama")
    assert read_spec(CONFIGS[name]).layers[0].attention.has_out_bias == has_out_bias
    del tensors["model.layers.1.self_attn.v_proj.bias"]
    with pytest.raises(ValueError, match=r"lacks tensor model\.layers\.1\.self_attn\.v_proj\.bias"):
        load(tmp_path, CONFIGS[name], tensors)


def test_a_bias_that_the_config_does_not_have_is_surplus(tmp_path):
    tensors = stored("llama")
    del tensors["tokens"], tensors["logits"]
    with pytest.raises(ValueError, match=r"has tensor .*mlp\.down_proj\.bias.*does not use"):
        load(tmp_path, LLAMA | {"mlp_bias": False}, tensors)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_is_stored_or_is_the_embedding(is_tied, has_head, files, tmp_path):
    """Tied models ignore a stored head; what an untied one lacks is an error."""
    tensors = stored("qwen2")
    del tensors["tokens"], tensors["logits"]
    head = tensors[HEAD] if has_head else tensors.pop(HEAD)
    config = QWEN2 | {"tie_word_embeddings": is_tied}
    if not is_tied and not has_head:
        with pytest.raises(ValueError, match=r"lacks tensor lm_head\.weight \(1 missing\)"):
            load(tmp_path, config, tensors, files)
        return
    model = load(tmp_path, config, tensors, files)
    used = tensors["model.embed_tokens.weight"] if is_tied else head
    hidden = np.random.default_rng(0).standard_normal((3, 16), dtype=np.float32)
    np.testing.assert_allclose(model.logits(jnp.asarray(hidden)), hidden @ used.T, atol=1e-5)
    assert (model.head is None) == is_tied
