"""Pools of multi-head latent attention: one row per token that is key and value in one."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core, ops
from paged_jax.core import CacheSpec

SPEC = CacheSpec(num_layers=2, num_kv_heads=1, head_dim=12, latent_dim=8)
N, P, HEADS, LENGTH = 8, 4, 4, 11
TABLE = np.asarray([5, 2, 7], np.int32)
TOLERANCE = {"float32": 1e-5, "int8": 2e-2, "float8_e4m3fn": 1e-1}


def written(rng, dtype="float32", platform=None):
    """A pool full of NaN but for one row in layer 1, and the heads of that row [T, 1, D]."""
    heads = jnp.asarray(rng.normal(size=(LENGTH, 1, SPEC.head_dim)), jnp.float32)
    cache = core.create_kv_cache(SPEC, N, P, dtype, platform=platform)
    if not cache.is_quantized:
        cache = dataclasses.replace(cache, kv=jnp.full_like(cache.kv, jnp.nan))
    positions = np.arange(LENGTH)
    slots = jnp.asarray(TABLE[positions // P] * P + positions % P)
    return ops.write_kv(cache, 1, heads, heads, slots), np.asarray(heads)


def test_a_token_takes_one_row():
    cache = core.create_kv_cache(SPEC, N, P, "bfloat16")
    assert cache.layout == "latent"
    assert cache.kv.shape == (2, N + 1, 1, P, 12)
    assert cache.token_bytes == 2 * 12 * 2
    assert core.kv_shape(SPEC, N, P, platform="tpu") == (2, N + 1, 1, P, 128)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_what_is_written_is_gathered_copied_and_swapped(rng, dtype, platform):
    cache, heads = written(rng, dtype, platform)
    atol = TOLERANCE[dtype] * np.abs(heads).max()

    def check(cache, table):
        keys, values = core.gather(cache, 1, jnp.asarray(table), LENGTH)
        np.testing.assert_allclose(keys[:LENGTH], heads, atol=atol)
        np.testing.assert_array_equal(keys, values)

    check(cache, TABLE)
    moved = ops.copy_kv(cache, jnp.asarray(TABLE), jnp.asarray([1, 3, 4], jnp.int32))
    check(moved, [1, 3, 4])
    image = core.swap_out(cache, TABLE)
    fresh = core.create_kv_cache(SPEC, N, P, dtype, platform=platform)
    check(core.swap_in(fresh, np.asarray([6, 8, 1]), image), [6, 8, 1])


def test_a_saved_pool_is_restored(rng, tmp_path):
    cache, heads = written(rng)
    blocks, _ = core.allocate(core.create_block_state(N, P, 1, 3), jnp.asarray([LENGTH]))
    used = np.asarray(blocks.block_tables[0])
    cache = ops.copy_kv(cache, jnp.asarray(TABLE), jnp.asarray(used))
    core.save_cache(tmp_path / "cache", core.PagedCache(blocks=blocks, kv=cache))
    restored = core.restore_cache(tmp_path / "cache")
    keys, _ = core.gather(restored.kv, 1, restored.blocks.block_tables[0], LENGTH)
    assert restored.kv.layout == "latent"
    np.testing.assert_array_equal(keys[:LENGTH], heads)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_attention_reads_the_row_as_key_and_as_value(rng, dtype):
    cache, heads = written(rng, dtype)
    q = jnp.asarray(rng.normal(size=(3, HEADS, SPEC.head_dim)), jnp.float32)
    row = heads[:, 0]

    def attend(query, length):
        logits = query @ row[:length].T * 0.3
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ row[:length]

    tables = jnp.asarray(TABLE)[None]
    lens = jnp.asarray([LENGTH], jnp.int32)
    decoded = ops.paged_decode(q[:1], cache, 1, tables, lens, sm_scale=0.3)
    want = np.stack([attend(np.asarray(q)[i], LENGTH - 2 + i) for i in range(3)])
    np.testing.assert_allclose(decoded[0], attend(np.asarray(q)[0], LENGTH), atol=TOLERANCE[dtype])
    starts = jnp.asarray([0, 3], jnp.int32)
    filled = ops.paged_prefill(q, cache, 1, tables, lens, starts, sm_scale=0.3)
    np.testing.assert_allclose(filled, want, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", ["pallas_tpu", "pallas_triton", "mosaic_gpu"])
def test_kernels_refuse_it_by_name(rng, backend):
    cache, _ = written(rng)
    q = jnp.zeros((1, HEADS, SPEC.head_dim))
    lens = jnp.asarray([LENGTH], jnp.int32)
    with pytest.raises(NotImplementedError, match="does not serve layout 'latent'"):
        ops.paged_decode(q, cache, 1, jnp.asarray(TABLE)[None], lens, sm_scale=1.0, backend=backend)
