"""The TPU kernels behind the operations: from a KVCache to arrays.

The functions are jitted so that the layers of a model trace a kernel once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax import core
from paged_jax.core import KVCache
from paged_jax.ops.xla import Attention

LONG_STEP = 512
"""From this many tokens on, a step is mostly prefill, whose runs fill larger tiles."""


@functools.partial(jax.jit, static_argnames=("attention", "interpret"), inline=True)
def paged_decode(
    q: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    sinks: jax.Array | None,
    num_rows: jax.Array,
    *,
    attention: Attention,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """See `paged_jax.ops.paged_decode`."""
    from pallas_kernels.tpu.decode import paged_decode

    return paged_decode(
        q,
        cache.kv,
        layer,
        block_tables,
        context_lens,
        sinks=sinks,
        num_rows=num_rows,
        interpret=interpret,
        **attention.kernel_options(cache),
    )


@functools.partial(jax.jit, static_argnames=("attention", "interpret"), inline=True)
def paged_prefill(
    q: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    sinks: jax.Array | None,
    first_row: jax.Array,
    num_rows: jax.Array,
    *,
    attention: Attention,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """See `paged_jax.ops.paged_prefill`."""
    from pallas_kernels.tpu.prefill import paged_prefill

    return paged_prefill(
        q,
        cache.kv,
        layer,
        block_tables,
        context_lens,
        query_starts,
        sinks=sinks,
        first_row=first_row,
        num_rows=num_rows,
        interpret=interpret,
        **attention.kernel_options(cache),
    )


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


@functools.partial(jax.jit, static_argnames=("interpret",), inline=True)
def copy_kv(cache: KVCache, src: jax.Array, dst: jax.Array, *, interpret: Any = False) -> KVCache:
    """See `paged_jax.ops.copy_kv`; tags are small and not in the kernel."""
    from pallas_kernels.tpu.copy import copy_blocks

    pools = (cache.kv, cache.scales) if cache.is_quantized else (cache.kv,)
    kv, *scales = copy_blocks(pools, src, dst, interpret=interpret)
    return dataclasses.replace(cache, kv=kv, scales=scales[0] if scales else cache.scales)
