"""`PagedAttention` in its two forms: with blocks, and dense for training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.core import CacheSpec, PagedCache
from paged_jax.models.attention import PagedAttention

D = 8
LENGTHS = (7, 1, 5)
CHUNKS = ((4, 1, 2), (3, 0, 3))  # new tokens per row and step; then two decode steps
STEPS = 2


def heads(rng, count: int, num_heads: int) -> np.ndarray:
    return rng.standard_normal((count, num_heads, D), dtype=np.float32)


@functools.cache
def paged_step(num_heads: int, num_kv_heads: int):
    attend = PagedAttention(num_heads, num_kv_heads, D)

    @jax.jit
    def step(cache, q, k, v, counts, row_ids, num_decode):
        blocks, _ = core.allocate(cache.blocks, counts)
        batch = core.make_batch(
            blocks,
            tokens=jnp.zeros(q.shape[0], jnp.int32),
            row_ids=row_ids,
            query_lens=counts[row_ids],
            num_decode=num_decode,
        )
        cache = PagedCache(blocks=blocks, kv=cache.kv)
        return attend(q, k, v, layer=1, batch=batch, cache=cache)

    return step


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "block_size"),
    [pytest.param(4, 2, 2, marks=pytest.mark.exhaustive), (3, 1, 1)],
)
def test_dense_and_paged_agree(num_heads, num_kv_heads, block_size, rng):
    total = [length + STEPS for length in LENGTHS]
    q = [heads(rng, count, num_heads) for count in total]
    k, v = ([heads(rng, count, num_kv_heads) for count in total] for _ in range(2))
    spec = CacheSpec(num_layers=2, num_kv_heads=num_kv_heads, head_dim=D)
    kv = core.create_kv_cache(spec, 24, block_size, "float32", "split")
    kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), kv)
    cache = PagedCache(blocks=core.create_block_state(24, block_size, 3, 12), kv=kv)
    done = [0, 0, 0]
    paged = [np.zeros_like(x) for x in q]
    for counts in (*CHUNKS, (1, 1, 1), (1, 1, 1)):
        packed = []
        for x in (q, k, v):
            rows = [x[r][done[r] : done[r] + counts[r]] for r in range(3)]
            padding = np.zeros((8 - sum(counts), *x[0].shape[1:]), np.float32)
            packed.append(np.concatenate([*rows, padding]))
        out, cache = paged_step(num_heads, num_kv_heads)(
            cache, *packed, np.array(counts, np.int32), np.arange(3), np.int32(0)
        )
        start = 0
        for r in range(3):
            paged[r][done[r] : done[r] + counts[r]] = out[start : start + counts[r]]
            start += counts[r]
            done[r] += counts[r]
    core.audit(cache.blocks)
    attend = PagedAttention(num_heads, num_kv_heads, D)
    for r in range(3):
        dense, none = attend(q[r][None], k[r][None], v[r][None], layer=1)
        assert none is None
        np.testing.assert_allclose(paged[r], dense[0], atol=1e-5, rtol=0)


def test_the_dense_form_is_differentiable(rng):
    attend = PagedAttention(4, 2, D)
    q, k, v = heads(rng, 5, 4)[None], heads(rng, 5, 2)[None], heads(rng, 5, 2)[None]
    weights = heads(rng, 5, 4)[None]

    @jax.jit
    def value(q, k, v):
        return jnp.sum(attend(q, k, v, layer=0)[0] * weights)

    grads = jax.grad(value, argnums=(0, 1, 2))(q, k, v)
    for which, (x, grad) in enumerate(zip((q, k, v), grads, strict=True)):
        direction = rng.standard_normal(x.shape, dtype=np.float32)
        step = 1e-2 * direction

        def moved(sign, which=which, step=step):
            inputs = [q, k, v]
            inputs[which] = inputs[which] + np.float32(sign) * step
            return float(value(*inputs))

        slope = (moved(1) - moved(-1)) / 2
        np.testing.assert_allclose(slope, float(jnp.sum(grad * step)), rtol=2e-2, atol=1e-5)
    # A token sees nothing after it.
    leak = jax.grad(lambda k: jnp.sum(attend(q, k, v, layer=0)[0][:, :3]))(k)
    assert not leak[:, 3:].any()
    assert leak[:, :3].any()


def test_a_batch_is_needed_with_a_cache(rng):
    attend = PagedAttention(2, 1, D)
    spec = CacheSpec(num_layers=1, num_kv_heads=1, head_dim=D)
    cache = PagedCache(
        blocks=core.create_block_state(4, 4, 1, 4),
        kv=core.create_kv_cache(spec, 4, 4, "float32"),
    )
    with pytest.raises(ValueError, match="batch must be given with a cache"):
        attend(heads(rng, 1, 2), heads(rng, 1, 1), heads(rng, 1, 1), layer=0, cache=cache)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"num_heads \(3\) must be a multiple of num_kv_heads \(2"):
        PagedAttention(3, 2, D)
