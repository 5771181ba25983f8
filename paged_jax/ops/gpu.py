"""The GPU kernels behind the operations: from a KVCache to arrays.

The functions are jitted so that the layers of a model trace a kernel once. Writes are XLA's
(`core.write`).
"""

import dataclasses
import functools
from typing import Any

import jax

from paged_jax.core import KVCache
from paged_jax.ops.xla import Attention

_STATIC = ("backend", "attention", "interpret")


@functools.partial(jax.jit, static_argnames=_STATIC, inline=True)
def paged_decode(
    q: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    sinks: jax.Array | None,
    num_rows: jax.Array,
    *,
    backend: str,
    attention: Attention,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """See `paged_jax.ops.paged_decode`."""
    if backend == "mosaic_gpu":
        from pallas_kernels.gpu.mosaic_limits import check_jax

        check_jax()
        from pallas_kernels.gpu.mosaic_decode import paged_decode
    else:
        from pallas_kernels.gpu.triton_decode import paged_decode

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


@functools.partial(jax.jit, static_argnames=_STATIC, inline=True)
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
    backend: str,
    attention: Attention,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """See `paged_jax.ops.paged_prefill`."""
    if backend == "mosaic_gpu":
        from pallas_kernels.gpu.mosaic_limits import check_jax

        check_jax()
        from pallas_kernels.gpu.mosaic_prefill import paged_prefill
    else:
        from pallas_kernels.gpu.triton_prefill import paged_prefill

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
def copy_kv(cache: KVCache, src: jax.Array, dst: jax.Array, *, interpret: Any = False) -> KVCache:
    """See `paged_jax.ops.copy_kv`; tags are small and not in the kernel."""
    from pallas_kernels.gpu.triton_copy import copy_blocks

    pools = (cache.kv, cache.scales) if cache.is_quantized else (cache.kv,)
    kv, *scales = copy_blocks(pools, src, dst, interpret=interpret)
    return dataclasses.replace(cache, kv=kv, scales=scales[0] if scales else cache.scales)
