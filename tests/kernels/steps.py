"""A step of every operation, and its operands, for tests of which backend runs it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import core, ops

ROWS, HEADS, KV_HEADS, WIDTH = 3, 4, 2, 128
SLOTS = np.array([9, 17, 26], np.int32)
TABLES = np.array([[1, 4], [2, 5], [3, 6]], np.int32)
LENS = np.array([2, 2, 3], np.int32)
STARTS = np.arange(ROWS + 1, dtype=np.int32)


def context():
    """Slots, block tables, context lengths and query starts."""
    return map(jnp.asarray, (SLOTS, TABLES, LENS, STARTS))


def step(cache, q, keys, values, *, backend=None, interpret=False):
    """Every operation once, in a loop over the layers where it is of a layer."""
    slots, tables, lens, starts = context()
    which = {"backend": backend, "interpret": interpret}

    def layer(index, carry):
        cache, q = carry
        cache = ops.write_kv(cache, index, keys, values, slots, **which)
        options = {"sm_scale": 0.1, **which}
        q += ops.paged_decode(q, cache, index, tables, lens, **options)
        q += ops.paged_prefill(q, cache, index, tables, lens, starts, **options)
        return cache, q

    cache = ops.copy_kv(cache, tables[:, 0], tables[:, 1], **which)
    return jax.lax.fori_loop(0, cache.num_layers, layer, (cache, q))


def make_operands(rng):
    """A pool of random tokens and arguments of `step`."""
    spec = core.CacheSpec(num_layers=2, num_kv_heads=KV_HEADS, head_dim=WIDTH)
    cache = core.create_kv_cache(spec, 6, 8, "float32")
    cache = dataclasses.replace(cache, kv=rng.standard_normal(cache.kv.shape, np.float32))
    q = rng.standard_normal((ROWS, HEADS, WIDTH), np.float32)
    keys, values = rng.standard_normal((2, ROWS, KV_HEADS, WIDTH), np.float32)
    return jax.tree.map(jnp.asarray, (cache, q, keys, values))
