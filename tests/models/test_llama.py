"""The Llama family against logits and greedy tokens that transformers computed in float32."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paged_jax import core
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.models.load import load_model, open_checkpoint
from paged_jax.sampling_params import SamplingParams

TINY = Path(__file__).parents[1] / "data" / "tiny"
NAMES = ["llama", "llama_tied_bias", "llama_mha", "llama_mqa_hd", "llama_rope_llama3"]
LENGTHS = [1, 5, 17, 40]


@pytest.fixture(scope="module")
def models():
    found = {name: load_model(open_checkpoint(TINY / name)) for name in NAMES}
    found["llama_rope_linear"] = load_model(open_checkpoint(TINY / "llama_rope_linear"))
    return found


def expected(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(TINY / name / "expected.npz"))


@pytest.mark.parametrize("name", [*NAMES, "llama_rope_linear"])
def test_dense_logits_equal_the_reference(models, name):
    want = expected(name)
    dense = jax.jit(lambda tokens: models[name](tokens))
    for length in LENGTHS:
        got = dense(jnp.asarray(want[f"prompt_{length}"])[None])[0]
        last = want[f"logits_{length}"]
        np.testing.assert_allclose(got[-len(last) :], last, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "llama_mqa_hd"])
def test_paged_logits_equal_the_reference_and_the_dense_form(models, name):
    """All prompts in one packed step, in blocks of 4 and out of order."""
    model, want = models[name], expected(name)
    prompts = [want[f"prompt_{length}"] for length in LENGTHS]
    blocks = core.create_block_state(20, 4, 5, 12)
    new = jnp.asarray([17, 0, 1, 40, 5], jnp.int32)
    order = [2, 0, 3, 1]  # prompt of each row that takes part, in the order of the rows
    blocks, _ = core.allocate(blocks, new)
    tokens = np.concatenate([prompts[i] for i in order])
    batch = core.make_batch(
        blocks,
        tokens=np.pad(tokens, (0, 5)),
        row_ids=np.asarray([0, 2, 3, 4, 5]),
        query_lens=np.asarray([17, 1, 40, 5, 0]),
        num_decode=0,
    )
    kv = core.create_kv_cache(model.cache_spec(), 20, 4, jnp.float32)
    kv = dataclasses.replace(kv, kv=jnp.full_like(kv.kv, jnp.nan))
    run = jax.jit(lambda batch, cache: model.logits(model(batch, cache)[0]))
    logits = run(batch, core.PagedCache(blocks=blocks, kv=kv))
    starts = np.asarray(batch.query_starts)
    for row, i in enumerate(order):
        own = logits[starts[row] : starts[row + 1]]
        last = want[f"logits_{LENGTHS[i]}"]
        np.testing.assert_allclose(own[-len(last) :], last, atol=2e-4, rtol=0)
        if LENGTHS[i] == 40:
            dense = jax.jit(lambda tokens: model(tokens))(jnp.asarray(prompts[i])[None])[0]
            np.testing.assert_allclose(own, dense, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama_tied_bias",
        pytest.param("llama_mqa_hd", marks=pytest.mark.exhaustive),
        pytest.param("llama_mha", marks=pytest.mark.exhaustive),
    ],
)
def test_greedy_tokens_through_the_engine_equal_the_reference(models, name):
    want = expected(name)
    config = EngineConfig(
        block_size=4, num_blocks=64, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=64
    )
    engine = Engine(models[name], config)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    for length in LENGTHS:
        engine.add_request(str(length), want[f"prompt_{length}"].tolist(), params)
    got = {}
    while engine.has_unfinished():
        got |= {out.request_id: out.outputs[0].token_ids for out in engine.step()}
    for length in LENGTHS:
        assert got[str(length)] == want[f"greedy_{length}"].tolist()


def test_the_dense_form_is_differentiable(models):
    model = models["llama"]
    from flax import nnx

    graphdef, state = nnx.split(model)
    tokens = jnp.asarray(expected("llama")["prompt_17"])[None]

    def loss(state):
        logits = nnx.merge(graphdef, state)(tokens[:, :-1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2))

    value, grads = jax.jit(jax.value_and_grad(loss))(state)
    norms = [float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(grads)]
    assert np.isfinite(value)
    assert all(np.isfinite(norms))
    assert min(norms) > 0


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


def test_a_surplus_tensor_is_named(checkpoint):
    path = checkpoint(change=lambda t: t.update(extra=np.zeros(3, np.float32)))
    with pytest.raises(ValueError, match="has tensor extra, which the model does not use"):
        load_model(open_checkpoint(path))


def test_a_misshapen_tensor_is_named(checkpoint):
    name = "model.layers.0.self_attn.k_proj.weight"
    path = checkpoint(change=lambda t: t.update({name: t[name][:-1].copy()}))
    with pytest.raises(ValueError, match=r"k_proj\.weight|q_proj\.weight"):
        load_model(open_checkpoint(path))


def test_stored_rotary_frequencies_are_ignored(checkpoint):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    path = checkpoint(change=lambda t: t.update({name: np.zeros(8, np.float32)}))
    load_model(open_checkpoint(path))


def test_a_tied_model_ignores_a_stored_head_and_an_untied_one_needs_it(checkpoint, models):
    head = np.ones((320, 64), np.float32)
    path = checkpoint("llama_tied_bias", change=lambda t: t.update({"lm_head.weight": head}))
    tokens = jnp.asarray([[3, 4, 5]])
    loaded = load_model(open_checkpoint(path))
    np.testing.assert_array_equal(
        jax.jit(lambda tokens: loaded(tokens))(tokens),
        jax.jit(lambda tokens: models["llama_tied_bias"](tokens))(tokens),
    )


def test_an_untied_model_without_a_head_is_refused(checkpoint):
    path = checkpoint("llama_tied_bias", config={"tie_word_embeddings": False})
    with pytest.raises(ValueError, match=r"lacks tensor lm_head\.weight"):
        load_model(open_checkpoint(path))


def test_unknown_architectures_and_rope_types_list_what_is_supported(checkpoint):
    path = checkpoint(config={"architectures": ["BertModel"]})
    with pytest.raises(ValueError, match=r"BertModel is not supported; supported: LlamaFor"):
        load_model(open_checkpoint(path))
    shutil.rmtree(path)
    path = checkpoint(config={"rope_parameters": {"rope_type": "spiral"}})
    with pytest.raises(ValueError, match=r"'spiral' is not supported; supported: default"):
        load_model(open_checkpoint(path))


def test_a_window_that_would_change_results_is_refused(checkpoint):
    path = checkpoint(config={"architectures": ["MistralForCausalLM"], "sliding_window": 32})
    with pytest.raises(NotImplementedError, match="sliding_window"):
        load_model(open_checkpoint(path))
    shutil.rmtree(path)
    path = checkpoint(config={"architectures": ["MistralForCausalLM"], "sliding_window": None})
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
    np.testing.assert_allclose(got[-4:], want["logits_5"], atol=2e-4, rtol=0)
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
