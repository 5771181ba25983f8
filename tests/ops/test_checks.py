"""Arguments that ops refuse, and what they say."""

import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from paged_jax import core, ops

S, T, K, D = 2, 3, 2, 8


@pytest.fixture
def cache():
    spec = core.CacheSpec(num_layers=1, num_kv_heads=K, head_dim=D)
    return core.create_kv_cache(spec, 4, 4, "float32")


def decode(cache, q, **options):
    tables, lens = jnp.zeros((q.shape[0], 2), jnp.int32), jnp.zeros(q.shape[0], jnp.int32)
    return ops.paged_decode(q, cache, 0, tables, lens, sm_scale=1.0, **options)


def prefill(cache, q, **options):
    tables, lens = jnp.zeros((S, 2), jnp.int32), jnp.zeros(S, jnp.int32)
    starts = jnp.zeros(S + 1, jnp.int32)
    return ops.paged_prefill(q, cache, 0, tables, lens, starts, sm_scale=1.0, **options)


def write(cache, keys, values, **options):
    return ops.write_kv(cache, 0, keys, values, jnp.zeros(T, jnp.int32), **options)


@pytest.fixture
def no_import_hook(monkeypatch):
    """As for a user: the hook of the tests refuses an unknown backend by its annotation."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


attend = pytest.mark.parametrize("op", [decode, prefill])


@attend
def test_heads_must_be_a_multiple_of_kv_heads(op, cache):
    with pytest.raises(
        ValueError, match=r"num_heads \(3\) must be a multiple of num_kv_heads \(2\)"
    ):
        op(cache, jnp.zeros((T, 3, D)))


@attend
def test_head_dim_must_be_that_of_the_cache(op, cache):
    message = r"head_dim of q \(16\) must be that of the cache \(8\)"
    with pytest.raises(ValueError, match=message):
        op(cache, jnp.zeros((T, 4, 16)))


@attend
def test_attention_names_the_backends_that_are_built(op, cache, no_import_hook):
    message = re.escape(f"backend 'cuda' is not built; use one of {ops.BACKENDS}")
    with pytest.raises(NotImplementedError, match=message):
        op(cache, jnp.zeros((T, 4, D)), backend="cuda")


@attend
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"sliding_window": 0}, r"sliding_window \(0\) must be at least 1"),
        ({"soft_cap": 0.0}, r"soft_cap \(0.0\) must be at least 1e-06"),
        ({"soft_cap": -1.0}, r"soft_cap \(-1.0\) must be at least 1e-06"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(op, cache, option, message):
    with pytest.raises(ValueError, match=message):
        op(cache, jnp.zeros((T, 4, D)), **option)


def test_write_names_the_backends_that_are_built(cache, no_import_hook):
    tokens = jnp.zeros((T, K, D))
    with pytest.raises(NotImplementedError, match="backend 'cuda' is not built"):
        write(cache, tokens, tokens, backend="cuda")


@pytest.mark.parametrize("shape", [(T, K + 1, D), (T, K, D + 1), (T, 1, D)])
def test_keys_and_values_must_have_the_shape_of_the_pool(cache, shape):
    message = re.escape(f"keys {shape} and values {shape} must have shape {(T, K, D)}")
    with pytest.raises(ValueError, match=message):
        write(cache, jnp.zeros(shape), jnp.zeros(shape))


def test_named_backends_run(cache):
    tokens = np.ones((T, K, D), np.float32)
    compiled = jax.jit(write, static_argnames="backend")
    for backend in (None, "xla"):
        written = compiled(cache, tokens, tokens, backend=backend)
        assert np.asarray(written.kv)[0, 0, :, 0].all()
    with pytest.raises(NotImplementedError, match="multiple of 128"):
        compiled(cache, tokens, tokens, backend="pallas_tpu")


def test_arrays_must_be_of_the_same_rows(cache, no_import_hook):
    q = jnp.zeros((3, 4, D))
    tables, lens = jnp.zeros((3, 2), jnp.int32), jnp.zeros(3, jnp.int32)
    for bad in ((tables[:2], lens), (tables, lens[:2])):
        with pytest.raises(ValueError, match=r"must have a row per query \(3\)"):
            ops.paged_decode(q, cache, 0, *bad, sm_scale=1.0)


def test_query_starts_are_one_more_than_rows(cache, no_import_hook):
    q, lens = jnp.zeros((3, 4, D)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=r"query_starts \(3,\) R \+ 1 entries for R = 3 rows"):
        ops.paged_prefill(
            q, cache, 0, jnp.zeros((3, 2), jnp.int32), lens, jnp.zeros(3, jnp.int32), sm_scale=1.0
        )


@attend
def test_layer_and_sinks_must_be_of_the_model(op, cache, no_import_hook):
    q = jnp.zeros((T, 4, D))
    with pytest.raises(ValueError, match=r"sinks \(2,\) must have one entry per query head \(4\)"):
        op(cache, q, sinks=jnp.zeros(2))


@attend
def test_extreme_options_stay_finite(op, cache, no_import_hook):
    """Nothing is written: every row is empty, or attends to zeros."""
    q = jnp.zeros((T, 4, D))
    for options in (
        {"sliding_window": 2**40},
        {"sliding_window": np.int64(3)},
        {"soft_cap": float("inf")},
        {"soft_cap": 1e-6},
        {"sinks": jnp.full(4, jnp.inf)},
        {"sinks": jnp.full(4, -jnp.inf)},
    ):
        assert jnp.isfinite(op(cache, q, **options)).all(), options
    with pytest.raises(ValueError, match="soft_cap"):
        op(cache, q, soft_cap=float("nan"))


def test_an_infinite_sink_takes_everything(cache):
    ones = jnp.ones((1, K, D))
    cache = write_one(cache, ones)
    q, tables, lens = jnp.ones((1, 4, D)), jnp.array([[1]]), jnp.array([1])
    for sink, expected in ((jnp.inf, 0.0), (-jnp.inf, 1.0)):
        out = ops.paged_decode(
            q, cache, 0, tables, lens, sm_scale=1.0, sinks=jnp.full(4, sink, jnp.float32)
        )
        np.testing.assert_allclose(out, expected, rtol=1e-6)


def write_one(cache, heads):
    return ops.write_kv(cache, 0, heads, heads, jnp.array([4]))


@attend
def test_no_queries_give_no_outputs(op, cache):
    assert op(cache, jnp.zeros((0, 4, D))).shape == (0, 4, D)


def test_numbers_may_be_scalars_of_numpy_and_jax_but_not_traced(cache, no_import_hook):
    q, tables, lens = jnp.zeros((1, 4, D)), jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32)

    def decode(scale, **options):
        return ops.paged_decode(q, cache, 0, tables, lens, sm_scale=scale, **options)

    want = decode(0.5, soft_cap=3.0)
    assert jnp.array_equal(decode(jnp.float32(0.5), soft_cap=np.float32(3)), want)
    assert jnp.array_equal(decode(0.5, soft_cap=3e38), decode(0.5))
    with pytest.raises(TypeError, match="sm_scale must be known when the program is traced"):
        jax.jit(decode)(0.5)


def test_layers_are_whole_numbers_in_range(cache, no_import_hook):
    tokens = jnp.zeros((T, K, D))
    for layer, error in ((np.int64(99), ValueError), (1.5, TypeError)):
        with pytest.raises(error):
            ops.write_kv(cache, layer, tokens, tokens, jnp.arange(T))


def test_keys_and_values_are_floating_point(cache, no_import_hook):
    tokens = jnp.zeros((T, K, D), jnp.int32)
    with pytest.raises(
        ValueError, match="keys \\(int32\\) and values \\(int32\\) must be floating"
    ):
        ops.write_kv(cache, 0, tokens, tokens, jnp.arange(T))
