"""From a checkpoint to a model: what is missing, surplus or broken is named."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from paged_jax.models.load import load_model, open_checkpoint
from tests.models.tiny import TINY, assert_logits, expected, model


@pytest.fixture
def checkpoint(tmp_path):
    """A function that writes a changed copy of the tiny llama and returns its directory."""

    def write(name="llama", config=None, change=lambda tensors: None) -> Path:
        target = tmp_path / "model"
        shutil.copytree(TINY / name, target)
        target.chmod(0o755)
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        (target / "model.safetensors").unlink()
        save_file(tensors, target / "model.safetensors")
        found = json.loads((target / "config.json").read_text()) | (config or {})
        (target / "config.json").unlink()
        (target / "config.json").write_text(json.dumps(found))
        return target

    return write


def test_a_missing_tensor_is_named(checkpoint):
    path = checkpoint(change=lambda t: t.pop("model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(ValueError, match=r"lacks tensor model\.layers\.1\.mlp\.down_proj\.weight"):
        load_model(open_checkpoint(path))


def test_names_without_their_prefix_are_not_taken_for_others(checkpoint):
    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    with pytest.raises(ValueError, match=r"lacks tensor model\.embed_tokens\.weight \(20 missing"):
        load_model(open_checkpoint(checkpoint(change=change)))


def test_a_surplus_tensor_is_named(checkpoint):
    path = checkpoint(change=lambda t: t.update(extra=np.zeros(3, np.float32)))
    with pytest.raises(ValueError, match="has tensor extra, which the model does not use"):
        load_model(open_checkpoint(path))


def test_a_misshapen_tensor_is_named(checkpoint):
    name = "model.layers.0.self_attn.k_proj.weight"
    path = checkpoint(change=lambda t: t.update({name: t[name][:-1].copy()}))
    with pytest.raises(ValueError, match=r"k_proj\.weight has shape \(31, 64\), not \(32, 64\)"):
        load_model(open_checkpoint(path))


def test_stored_rotary_frequencies_are_ignored(checkpoint):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    path = checkpoint(change=lambda t: t.update({name: np.zeros(8, np.float32)}))
    load_model(open_checkpoint(path))


def test_a_tied_model_ignores_a_stored_head(checkpoint):
    head = np.ones((320, 64), np.float32)
    path = checkpoint("llama_tied_bias", change=lambda t: t.update({"lm_head.weight": head}))
    tokens = jnp.asarray([[3, 4, 5]])
    loaded, without = load_model(open_checkpoint(path)), model("llama_tied_bias")
    np.testing.assert_array_equal(
        jax.jit(lambda tokens: loaded(tokens))(tokens),
        jax.jit(lambda tokens: without(tokens))(tokens),
    )


def test_an_untied_model_without_a_head_is_refused(checkpoint):
    path = checkpoint("llama_tied_bias", config={"tie_word_embeddings": False})
    with pytest.raises(ValueError, match=r"lacks tensor lm_head\.weight"):
        load_model(open_checkpoint(path))


def test_unknown_architectures_and_rope_types_list_what_is_supported(checkpoint):
    path = checkpoint(config={"architectures": ["BertModel"]})
    with pytest.raises(ValueError, match=r"BertModel is not supported; supported: Deepseek"):
        load_model(open_checkpoint(path))
    shutil.rmtree(path)
    path = checkpoint(config={"rope_parameters": {"rope_type": "spiral"}})
    with pytest.raises(ValueError, match=r"'spiral' is not supported; supported: default"):
        load_model(open_checkpoint(path))


def test_heads_that_do_not_divide_are_refused(checkpoint):
    path = checkpoint(config={"num_attention_heads": 3, "num_key_value_heads": 2})
    with pytest.raises(ValueError, match=r"num_heads \(3\) must be a multiple"):
        load_model(open_checkpoint(path))


def test_shards_are_joined_and_a_missing_one_is_named(checkpoint):
    path = checkpoint()
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in halves.items():
        save_file({name: tensors[name] for name in own}, path / file)
    index = {"weight_map": {name: file for file, own in halves.items() for name in own}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    want = expected("llama")
    model = load_model(open_checkpoint(path))
    got = jax.jit(lambda tokens: model(tokens))(jnp.asarray(want["prompt_5"])[None])[0]
    assert_logits(np.asarray(got), "llama", 5)
    (path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names b\.safetensors, which is missing"):
        open_checkpoint(path)


def test_bfloat16_checkpoints_are_read(checkpoint):
    def to_bfloat16(tensors):
        for name in tensors:
            tensors[name] = tensors[name].astype(jnp.bfloat16)

    path = checkpoint(change=to_bfloat16)
    want = expected("llama")
    for dtype in ("float32", "bfloat16"):
        model = load_model(open_checkpoint(path), dtype)
        got = model(jnp.asarray(want["prompt_5"])[None])[0]
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got[-4:], want["logits_5"], atol=0.05, rtol=0)
    with pytest.raises(ValueError, match="dtype"):
        load_model(open_checkpoint(path), "int4")


def test_broken_files_are_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(ValueError, match="cannot read safetensors file"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")


def test_parameters_go_straight_to_their_shards():
    mesh = jax.make_mesh((4,), ("tp",), devices=jax.devices()[:4])
    whole = model("llama")
    seen = []

    def sharding(name, shape):
        seen.append(name)
        is_matrix = len(shape) == 2 and shape[0] % 4 == 0
        return NamedSharding(mesh, PartitionSpec("tp" if is_matrix else None))

    loaded = load_model(open_checkpoint(TINY / "llama"), sharding=sharding)
    qkv = loaded.blocks[0].attention.qkv.weight[...]
    assert "blocks.0.attention.qkv.weight" in seen
    assert qkv.addressable_shards[0].data.shape == (qkv.shape[0] // 4, qkv.shape[1])
    np.testing.assert_array_equal(qkv, whole.blocks[0].attention.qkv.weight[...])
