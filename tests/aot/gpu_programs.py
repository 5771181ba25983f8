"""What is compiled of an entry for a GPU: a kernel in every layer, as a model's step calls it.

Layers are unrolled: XLA copies what a loop over layers slices, and no CUDA graph holds a loop.
Writes are XLA's own.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.core.kv import CacheSpec, KVCache, kv_shape, scales_shape, write
from paged_jax.shapes import ceil_div
from tests.aot.gpu_shapes import SHAPES, op_of
from tests.aot.programs import MIN_POOL_BYTES, Program
from tests.aot.shapes import NUM_LAYERS, NUM_TOKENS, Entry, Shape


def program(entry: Entry) -> Program:
    """Builds an entry's function and arguments; allocates nothing."""
    shape = SHAPES[entry.shape]
    cache = _cache(shape, entry.block_size, entry.pool)
    pools = (cache.kv, cache.scales) if cache.is_quantized else (cache.kv,)
    build = {"decode": _decode, "prefill": _prefill, "write": _write, "copy": _copy}
    fn, args, donate = build[op_of(entry.kernel)](entry.kernel, shape, cache)
    return Program(fn=fn, args=args, donate=donate, pools=pools)


def calls(entry: Entry) -> tuple[str, int]:
    """Name of the Pallas kernel of an entry's program, and how often it is called."""
    shape, op = SHAPES[entry.shape], op_of(entry.kernel)
    if op == "write":
        return "", 0
    if op == "copy":
        return "copy_blocks", 2 if jnp.dtype(entry.pool).itemsize == 1 else 1
    return f"paged_{op}", NUM_LAYERS * len(shape.windows)


def _cache(shape: Shape, block_size: int, pool: str) -> KVCache:
    spec = CacheSpec(
        num_layers=NUM_LAYERS, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim
    )
    dtype = jnp.dtype(pool)
    layout = "packed" if shape.is_packed else "split"
    one = _array(kv_shape(spec, 1, block_size, layout, "gpu"), dtype)
    num_blocks = ceil_div(MIN_POOL_BYTES, one.size * dtype.itemsize // 2)
    return KVCache(
        kv=_array(kv_shape(spec, num_blocks, block_size, layout, "gpu"), dtype),
        scales=_array(scales_shape(spec, num_blocks, block_size, dtype, "gpu"), jnp.float32),
        layout=layout,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )


def _decode(kernel: str, shape: Shape, cache: KVCache):
    paged_decode = _kernel(kernel)
    rows = shape.decode_rows
    q = _array((rows, shape.num_heads, shape.head_dim), _query_dtype(cache))
    context = (_table(shape, cache, rows), _i32(rows), _sinks(shape), _i32())

    def decode(q, cache, block_tables, context_lens, sinks, num_rows):
        lse = None
        for layer in range(NUM_LAYERS):
            for window in shape.windows:
                options = _options(shape, cache, window, sinks, num_rows)
                q, lse = paged_decode(q, cache.kv, layer, block_tables, context_lens, **options)
        return q, lse

    return decode, (q, cache, *context), ()


def _prefill(kernel: str, shape: Shape, cache: KVCache):
    paged_prefill = _kernel(kernel)
    rows = shape.prefill_rows
    q = _array((NUM_TOKENS, shape.num_heads, shape.head_dim), _query_dtype(cache))
    context = (_table(shape, cache, rows), _i32(rows), _i32(rows + 1), _sinks(shape), _i32())

    def prefill(q, cache, block_tables, context_lens, query_starts, sinks, num_rows):
        rows = (block_tables, context_lens, query_starts)
        lse = None
        for layer in range(NUM_LAYERS):
            for window in shape.windows:
                options = _options(shape, cache, window, sinks, num_rows)
                q, lse = paged_prefill(q, cache.kv, layer, *rows, **options)
        return q, lse

    return prefill, (q, cache, *context), ()


def _write(kernel: str, shape: Shape, cache: KVCache):
    heads = _array((NUM_TOKENS, shape.num_kv_heads, shape.head_dim), _query_dtype(cache))

    def write_layers(cache, keys, values, slots):
        for layer in range(NUM_LAYERS):
            cache = write(cache, layer, keys, values, slots)
        return cache

    return write_layers, (cache, heads, heads, _i32(NUM_TOKENS)), (0,)


def _copy(kernel: str, shape: Shape, cache: KVCache):
    pools = (cache.kv, cache.scales) if cache.is_quantized else (cache.kv,)
    pairs = _i32(shape.decode_rows)
    return _kernel(kernel), (pools, pairs, pairs), (0,)


def _kernel(kernel: str) -> Callable:
    """The function of a backend's module, which is called as the kernel is."""
    op = op_of(kernel)
    module = import_module(f"pallas_kernels.gpu.{kernel}")
    return getattr(module, "copy_blocks" if op == "copy" else f"paged_{op}")


def _options(shape: Shape, cache: KVCache, window: int | None, sinks, num_rows) -> dict[str, Any]:
    return {
        "sm_scale": shape.head_dim**-0.5,
        "num_kv_heads": shape.num_kv_heads,
        "scales": cache.scales if cache.is_quantized else None,
        "sliding_window": window,
        "soft_cap": shape.soft_cap,
        "sinks": sinks,
        "num_rows": num_rows,
        "return_lse": shape.return_lse,
    }


def _table(shape: Shape, cache: KVCache, rows: int) -> jax.ShapeDtypeStruct:
    return _i32(rows, ceil_div(shape.context_len, cache.block_size))


def _sinks(shape: Shape) -> jax.ShapeDtypeStruct | None:
    return _array((shape.num_heads,), jnp.float32) if shape.has_sinks else None


def _query_dtype(cache: KVCache) -> Any:
    return cache.kv.dtype if cache.kv.dtype in (jnp.float32, jnp.float16) else jnp.bfloat16


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return _array(shape, jnp.int32)


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
