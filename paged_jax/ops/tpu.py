"""The TPU's kernels for writes: from a KVCache to arrays. On GPU XLA writes (`core.write`).

Jitted, as those of `paged_jax.ops.kernels`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax import core
from paged_jax.core import KVCache

LONG_STEP = 512
"""From this many tokens on, a step is mostly prefill, whose runs fill larger tiles."""


@functools.partial(jax.jit, static_argnames=("interpret",), inline=True)
def write_kv(
    cache: KVCache,
    layer: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slots: jax.Array,
    *,
    interpret: Any = False,
) -> KVCache:
    """See `paged_jax.ops.write_kv`."""
    from pallas_kernels.tpu.write import write_rows, write_scales

    rows, scales = core.to_pool(cache, keys, values)
    tile = 32 if slots.shape[0] >= LONG_STEP and cache.block_size % 32 == 0 else None
    kv = write_rows(cache.kv, layer, rows, slots, tile=tile, interpret=interpret)
    if scales is None:
        return dataclasses.replace(cache, kv=kv)
    scales = jnp.pad(scales, ((0, 0), (0, cache.scales.shape[2] - scales.shape[1])))
    scales = write_scales(cache.scales, layer, scales, slots, interpret=interpret)
    return dataclasses.replace(cache, kv=kv, scales=scales)
