"""The Pallas kernels behind the operations, by name of backend: from a KVCache to arrays.

The functions are jitted so that the layers of a model trace a kernel once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from paged_jax.core import KVCache
from paged_jax.ops.dispatch import BACKENDS, Backend, Kernels
from paged_jax.ops.xla import Attention

Attend = Callable[..., tuple[jax.Array, jax.Array | None]]

_STATIC = ("backend", "attention", "interpret")


def by_backend(function: Callable[..., Any], **options: Any) -> Kernels:
    """One of the functions below for every backend that has kernels, with its options."""
    return {
        name: functools.partial(function, backend=name, **options)
        for name in BACKENDS
        if name != "xla"
    }


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
    backend: Backend,
    attention: Attention,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """See `paged_jax.ops.paged_decode`."""
    attend, _ = _attention_of(backend)
    return attend(
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
    backend: Backend,
    attention: Attention,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """See `paged_jax.ops.paged_prefill`."""
    _, attend = _attention_of(backend)
    return attend(
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


@functools.partial(jax.jit, static_argnames=("backend", "interpret"), inline=True)
def copy_kv(
    cache: KVCache, src: jax.Array, dst: jax.Array, *, backend: Backend, interpret: Any = False
) -> KVCache:
    """See `paged_jax.ops.copy_kv`; tags are small and not in the kernel."""
    if backend == "pallas_tpu":
        from pallas_kernels.tpu.copy import copy_blocks
    else:
        from pallas_kernels.gpu.triton_copy import copy_blocks

        # The name may be Mosaic GPU's, whose options Triton's interpreter does not take.
        interpret = bool(interpret)
    pools = (cache.kv, cache.scales) if cache.is_quantized else (cache.kv,)
    kv, *scales = copy_blocks(pools, src, dst, interpret=interpret)
    return dataclasses.replace(cache, kv=kv, scales=scales[0] if scales else cache.scales)


def _attention_of(backend: Backend) -> tuple[Attend, Attend]:
    """Decode and prefill of a backend; their modules are imported here and nowhere earlier."""
    if backend == "pallas_tpu":
        from pallas_kernels.tpu.decode import paged_decode
        from pallas_kernels.tpu.prefill import paged_prefill
    elif backend == "mosaic_gpu":
        from pallas_kernels.gpu.mosaic_limits import check_jax

        check_jax()
        from pallas_kernels.gpu.mosaic_decode import paged_decode
        from pallas_kernels.gpu.mosaic_prefill import paged_prefill
    else:
        from pallas_kernels.gpu.triton_decode import paged_decode
        from pallas_kernels.gpu.triton_prefill import paged_prefill
    return paged_decode, paged_prefill
