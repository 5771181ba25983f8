"""What is compiled of an entry: a kernel in a loop over the layers, as a model's step calls it.

The loop carries the whole pool, and a copy of it in every layer is what the tests look for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.core.kv import CacheSpec, kv_shape, scales_shape
from paged_jax.shapes import ceil_div
from tests.aot.shapes import NUM_LAYERS, NUM_TOKENS, SHAPES, Entry, Shape

MIN_POOL_BYTES = (256 << 20) + 1
"""More than any target's vector memory holds: a smaller pool may be copied there unseen."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function, its arguments' shapes, and the arrays that it must leave where they are."""

    fn: Callable
    args: tuple[Any, ...]
    donate: tuple[int, ...]
    pools: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def donated_bytes(self) -> int:
        """Bytes of the arrays that the function must update in place."""
        return sum(_num_bytes(x) for i in self.donate for x in jax.tree.leaves(self.args[i]))

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return _num_bytes(self.pools[0])

    @property
    def most_temp_bytes(self) -> int:
        """Working memory that tells of a copy of the pool: as much as the pool and the tokens.

        Queries and outputs of many heads in float32 are alone about the size of these small pools.
        """
        arrays = jax.tree.leaves(self.args)
        return self.pool_bytes + sum(_num_bytes(x) for x in arrays if x.ndim == 3)


def program(entry: Entry) -> Program:
    """Builds an entry's function and arguments; allocates nothing."""
    shape = SHAPES[entry.shape]
    kv, scales = _pool(shape, entry.block_size, entry.pool)
    pools = (kv,) if scales is None else (kv, scales)
    build = {"decode": _decode, "prefill": _prefill, "write": _write, "copy": _copy}
    fn, args, donate = build[entry.kernel](shape, kv, scales)
    return Program(fn=fn, args=args, donate=donate, pools=pools)


def _pool(shape: Shape, block_size: int, pool: str):
    spec = CacheSpec(
        num_layers=NUM_LAYERS, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim
    )
    dtype = jnp.dtype(pool)
    one = _array(kv_shape(spec, 1, block_size, shape.layout, "tpu"), dtype)
    num_blocks = ceil_div(MIN_POOL_BYTES, _num_bytes(one) // 2)
    kv = _array(kv_shape(spec, num_blocks, block_size, shape.layout, "tpu"), dtype)
    scales = scales_shape(spec, num_blocks, block_size, dtype, "tpu")
    return kv, _array(scales, jnp.float32) if dtype.itemsize == 1 else None


def _decode(shape: Shape, kv, scales):
    from pallas_kernels.tpu.decode import paged_decode

    rows = shape.decode_rows
    q = _array((rows, shape.num_heads, shape.head_dim), _query_dtype(kv))
    context = (_table(shape, kv, rows), _i32(rows), _sinks(shape), _i32())

    def decode(q, kv, scales, block_tables, context_lens, sinks, num_rows):
        def layer(index, q):
            for window in shape.windows:
                q, _ = paged_decode(
                    q,
                    kv,
                    index,
                    block_tables,
                    context_lens,
                    sm_scale=shape.head_dim**-0.5,
                    num_kv_heads=shape.num_kv_heads,
                    scales=scales,
                    sliding_window=window,
                    soft_cap=shape.soft_cap,
                    sinks=sinks,
                    num_rows=num_rows,
                )
            return q

        return jax.lax.fori_loop(0, NUM_LAYERS, layer, q)

    return decode, (q, kv, scales, *context), ()


def _prefill(shape: Shape, kv, scales):
    from pallas_kernels.tpu.prefill import paged_prefill

    rows = shape.prefill_rows
    q = _array((NUM_TOKENS, shape.num_heads, shape.head_dim), _query_dtype(kv))
    context = (_table(shape, kv, rows), _i32(rows), _i32(rows + 1), _sinks(shape), _i32())

    def prefill(q, kv, scales, block_tables, context_lens, query_starts, sinks, num_rows):
        def layer(index, q):
            for window in shape.windows:
                q, _ = paged_prefill(
                    q,
                    kv,
                    index,
                    block_tables,
                    context_lens,
                    query_starts,
                    sm_scale=shape.head_dim**-0.5,
                    num_kv_heads=shape.num_kv_heads,
                    scales=scales,
                    sliding_window=window,
                    soft_cap=shape.soft_cap,
                    sinks=sinks,
                    num_rows=num_rows,
                )
            return q

        return jax.lax.fori_loop(0, NUM_LAYERS, layer, q)

    return prefill, (q, kv, scales, *context), ()


def _write(shape: Shape, kv, scales):
    from pallas_kernels.tpu.write import write_rows, write_scales

    rows = _array((NUM_TOKENS, kv.shape[2], kv.shape[4]), kv.dtype)
    new = None if scales is None else _array((NUM_TOKENS, scales.shape[2]), scales.dtype)

    def write(kv, scales, rows, new, slots, num_tokens):
        def layer(index, pools):
            kv, scales = pools
            kv = write_rows(kv, index, rows, slots, num_tokens=num_tokens)
            if scales is not None:
                scales = write_scales(scales, index, new, slots, num_tokens=num_tokens)
            return kv, scales

        return jax.lax.fori_loop(0, NUM_LAYERS, layer, (kv, scales))

    return write, (kv, scales, rows, new, _i32(NUM_TOKENS), _i32()), (0, 1)


def _copy(shape: Shape, kv, scales):
    from pallas_kernels.tpu.copy import copy_blocks

    pools = (kv,) if scales is None else (kv, scales)
    pairs = _i32(shape.decode_rows)
    return copy_blocks, (pools, pairs, pairs), (0,)


def _table(shape: Shape, kv, rows: int):
    return _i32(rows, ceil_div(shape.context_len, kv.shape[3]))


def _sinks(shape: Shape):
    return _array((shape.num_heads,), jnp.float32) if shape.has_sinks else None


def _query_dtype(kv):
    return jnp.float32 if kv.dtype == jnp.float32 else jnp.bfloat16


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return _array(shape, jnp.int32)


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _num_bytes(array: jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize
