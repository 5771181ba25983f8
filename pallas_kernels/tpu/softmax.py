"""Arithmetic of one tile of logits, shared by decode and prefill; base-2 exponents throughout."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.options import LOG2E, MASKED
from pallas_kernels.refs import Refs
from pallas_kernels.tpu.heads import LANES


def begin(refs: Refs, at: Any) -> None:
    """Empties the accumulators of a tile; with sinks, the caller sets the maxima to them."""
    rows = refs.maxima.shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    refs.maxima[at] = jnp.full((rows, LANES), MASKED, jnp.float32)
    # A sink is a key of weight 1 relative to the maximum, counted in one lane.
    refs.sums[at] = jnp.where(lane == 0, float("sinks" in refs), 0.0)
    refs.sum_v[at] = jnp.zeros(refs.sum_v.shape[1:], jnp.float32)


def fold(refs: Refs, at: Any, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Folds logits into the maxima and sums of a tile: their weights, and the factor on `sum_v`."""
    old = refs.maxima[at]
    new = jnp.maximum(old, jnp.max(logits, axis=1, keepdims=True))
    decay = jnp.exp2(old - new)
    weights = jnp.exp2(logits - widen(new, logits.shape[1]))
    refs.maxima[at] = new
    refs.sums[at] = refs.sums[at] * decay + lane_sums(weights)
    return weights, decay


def finish(refs: Refs, at: Any) -> tuple[jax.Array, jax.Array]:
    """The outputs of a tile, zero where it saw nothing, and the log-sum-exp in 128 lanes."""
    total = jnp.sum(refs.sums[at], axis=1, keepdims=True)
    total = jnp.where(total > 0.0, total, 1.0)
    return refs.sum_v[at] / total, (refs.maxima[at] + jnp.log2(total)) * (1 / LOG2E)


def factor_rows(
    buf: Any, slot: Any, blocks: Sequence[Any], pool_rows: Sequence[Any], group: int, rows: int
) -> jax.Array:
    """Scales of 8-bit keys or values as [rows, keys]: `pool_rows[i]` serves `group` rows each.

    Args:
      buf: f32[slots, blocks, pool rows, P].
      slot: Buffer to read.
      blocks: Indices of the blocks in the buffer.
      pool_rows: Row of the scales of each KV head of the tile.
      group: Rows of the tile per KV head.
      rows: Rows of the tile.
    """
    found = {}
    for i, pool_row in enumerate(pool_rows):
        line = jnp.concatenate([buf[slot, b, pl.ds(pool_row, 1)] for b in blocks], axis=1)
        found[i] = jnp.broadcast_to(line, (rows, line.shape[1]))
    return pick_rows(found, group, found[0].shape)


def widen(x: jax.Array, width: int) -> jax.Array:
    """[rows, 128] whose lanes are all alike as [rows, width]; free where width % 128 == 0."""
    if width % LANES:
        return jnp.broadcast_to(x[:, :1], (x.shape[0], width))
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def lane_sums(x: jax.Array) -> jax.Array:
    """[rows, n] as [rows, 128] with the same sum: adds whole registers and crosses no lanes."""
    rows, width = x.shape
    if width % LANES:
        lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
        return jnp.where(lane == 0, jnp.sum(x, axis=1, keepdims=True), 0.0)
    parts = [x[:, i : i + LANES] for i in range(0, width, LANES)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + (
            parts[-1:] if len(parts) % 2 else []
        )
    return parts[0]


def product(a: jax.Array, b: jax.Array, *, transposed: bool = False) -> jax.Array:
    """a @ b, or a @ b.T, in float32; float32 inputs are not rounded to bfloat16."""
    exact = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def pick_rows(found: dict[int, jax.Array], height: int, shape: tuple[int, ...]) -> jax.Array:
    """Rows [i * height, (i + 1) * height) of `found[i]`, one array of the given shape.

    Rows that belong to none are zero if one array is given, else arbitrary.
    """
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    if len(found) == 1:
        ((i, only),) = found.items()
        if i == 0 and height >= shape[0]:
            return only
        return jnp.where((row >= i * height) & (row < (i + 1) * height), only, 0.0)
    result = None
    for i, array in sorted(found.items()):
        result = array if result is None else jnp.where(row < i * height, result, array)
    assert result is not None
    return result
