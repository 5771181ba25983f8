"""Arithmetic of a tile of logits in Triton, shared by decode and prefill."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.heads import Heads
from pallas_kernels.options import MASKED, Options


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a body is specialised for."""

    heads: Heads
    options: Options
    compute: tuple[Any, Any]
    """Dtypes of the products with keys and with values."""
    block_size: int
    rows: int
    """Query rows of a program, a power of two."""
    block_k: int
    """Keys that are computed at once, a power of two."""


def empty(shape: Shape) -> tuple[Any, ...]:
    """Maxima, sums and, per piece of a head, sums of values."""
    rows = shape.rows
    return (
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        *(jnp.zeros((rows, width), jnp.float32) for _, width in shape.heads.pieces),
    )


def load_queries(ref: Any, tokens: Any, heads: Any, shape: Shape) -> list[jax.Array]:
    """[rows, lanes] per piece."""
    return [
        ref[tokens, heads, lanes(piece)[None, :]].astype(shape.compute[0])
        for piece in shape.heads.pieces
    ]


def lanes(piece: tuple[int, int]) -> jax.Array:
    first, width = piece
    return first + jnp.arange(width, dtype=jnp.int32)


def attend(
    refs: Any,
    shape: Shape,
    queries: list[jax.Array],
    row: Any,
    kv_head: Any,
    tokens: jax.Array,
    seen: jax.Array | None,
    state: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Folds keys in.

    Args:
      refs: `tables`, `kv`, `scales` of an 8-bit pool, `layer`.
      queries: From `load_queries`.
      row: Row of the block table.
      kv_head: KV head.
      tokens: i32[block_k], positions that are all live: those past the end repeat the last one,
        because a dead slot may hold NaN and 0 * NaN is NaN.
      seen: bool, broadcasts to [rows, block_k]; None: all.
      state: Maxima, sums, sums of values.
    """
    layer = refs.layer[0]
    block, offset = refs.tables[row, tokens // shape.block_size], tokens % shape.block_size
    pool_row, lane = shape.heads.place(kv_head)

    def load(half: int, piece: tuple[int, int], dtype: Any) -> jax.Array:
        column = lane + lanes(piece)
        index = layer, block[:, None], pool_row + half, offset[:, None], column[None, :]
        return _cast(refs.kv[index], dtype)

    def scale(half: int) -> jax.Array:
        return refs.scales[layer, block, 2 * kv_head + half, offset][None, :]

    pieces = shape.heads.pieces
    s = None
    for q, piece in zip(queries, pieces, strict=True):
        part = product(q, load(0, piece, shape.compute[0]).T)
        s = part if s is None else s + part
    assert s is not None
    if "scales" in refs:
        s = s * scale(0)
    # Queries that were scaled before would be rounded once more.
    s = shape.options.cap(s * jnp.float32(shape.options.factor))
    if seen is not None:
        s = jnp.where(seen, s, MASKED)
    maxima, sums, *values = state
    new = jnp.maximum(maxima, jnp.max(s, axis=1))
    decay = jnp.exp2(maxima - new)
    p = jnp.exp2(s - new[:, None])
    sums = sums * decay + jnp.sum(p, axis=1)
    if "scales" in refs:
        p = p * scale(1)
    p = p.astype(shape.compute[1])
    values = [
        v * decay[:, None] + product(p, load(1, piece, shape.compute[1]))
        for v, piece in zip(values, pieces, strict=True)
    ]
    return new, sums, *values


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b in float32; float32 inputs are not rounded to tf32."""
    exact = a.dtype == jnp.float32
    return jax.lax.dot(
        a,
        b,
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    # There is no instruction from 8-bit floats to bfloat16.
    if x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.float32)
    return x.astype(dtype)
