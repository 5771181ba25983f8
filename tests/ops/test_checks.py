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
        ({"soft_cap": 0.0}, r"soft_cap \(0.0\) must be above 0"),
        ({"soft_cap": -1.0}, r"soft_cap \(-1.0\) must be above 0"),
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
    for backend in (None, *ops.BACKENDS):
        written = compiled(cache, tokens, tokens, backend=backend)
        assert np.asarray(written.kv)[0, 0, :, 0].all()
