"""What decode and prefill share in Mosaic GPU: the pipeline of keys, and a fold of one stage.

    GMEM   pool ── TMA, whole blocks or parts of one ──> SMEM stage 0 | 1 | 2
    regs   queries x keys.T -> logits -> weights ──> SMEM weights x values -> sums of values

The warpgroup that computes also starts the copies, `num_stages - 1` ahead; a stage has one barrier.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.gpu.heads import Heads
from pallas_kernels.options import MASKED, Options

plgpu = compat.mosaic_gpu()


LANES = 128
"""8-bit lanes that are widened at once, a swizzled line: all 256 of a head spill registers."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a body is specialised for."""

    heads: Heads
    options: Options
    compute: tuple[Any, Any]
    """Dtypes of the products with keys and with values."""
    pool_dtype: Any
    block_size: int
    rows: int
    """Query rows of a program."""
    block_k: int
    """Keys of a stage."""
    num_stages: int
    is_interpreted: bool = False

    @property
    def has_scales(self) -> bool:
        """Whether the pool holds numbers of 8 bits."""
        return self.pool_dtype.itemsize == 1

    @property
    def copy(self) -> int:
        """Keys of one copy, a block or a part of one."""
        return min(self.block_size, self.block_k)


def buffers(shape: Shape) -> dict[str, Any]:
    """Shared memory by name."""
    block_k, width = shape.block_k, shape.heads.head_dim
    staged = shape.num_stages, block_k
    found = {
        "queries": _tiled((shape.rows, width), shape.compute[0]),
        "weights": _tiled((shape.rows, block_k), shape.compute[1]),
        "keys": _tiled((*staged, width), shape.pool_dtype),
        "values": _tiled((*staged, width), shape.pool_dtype),
        "asked": plgpu.Barrier(),
        "full": plgpu.Barrier(num_arrivals=_copies(shape), num_barriers=shape.num_stages),
    }
    if shape.has_scales:
        # Tensor cores take no 8-bit operand beside one of 16 bits.
        found |= {
            "key_scales": plgpu.SMEM(staged, jnp.float32),
            "value_scales": plgpu.SMEM(staged, jnp.float32),
            "wide_keys": _tiled((block_k, width), shape.compute[0]),
            "wide_values": _tiled((block_k, width), shape.compute[1]),
        }
    return found


def _tiled(dims: tuple[int, ...], dtype: Any) -> Any:
    """A buffer whose rows are spread over all banks."""
    swizzle = min(dims[-1] * jnp.dtype(dtype).itemsize, 128)
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(dims, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _copies(shape: Shape) -> int:
    return shape.block_k // shape.copy * (4 if shape.has_scales else 2)


def fetch(refs: Any, shape: Shape, row: Any, kv_head: Any, first: Any, end: Any, stage: Any):
    """Starts the copies of keys from `first` on, a multiple of `copy`, into a stage.

    Copies that begin at `end` or later are of the last live block instead: the table's entries past
    the length are not to be used, and a barrier waits for the same bytes every time.
    """
    layer, copy, width = refs.layer[0], shape.copy, shape.heads.head_dim
    pool_row, lane = shape.heads.place(kv_head)
    # A row of the pool may be wider than a head, or hold several.
    lanes = () if refs.kv.shape[-1] == width else (pl.ds(lane, width),)
    for begin in range(0, shape.block_k, copy):
        token = jnp.minimum(first + begin, (end - 1) // copy * copy)
        block = refs.tables[row, token // shape.block_size]
        tokens = pl.ds(token % shape.block_size, copy)
        to = pl.ds(begin, copy)
        for half, (numbers, scales) in enumerate(
            (("keys", "key_scales"), ("values", "value_scales"))
        ):
            source = refs.kv.at[layer, block, pool_row + half, tokens, *lanes]
            plgpu.copy_gmem_to_smem(source, refs[numbers].at[stage, to], refs.full.at[stage])
            if shape.has_scales:
                source = refs.scales.at[layer, block, 2 * kv_head + half, tokens]
                plgpu.copy_gmem_to_smem(source, refs[scales].at[stage, to], refs.full.at[stage])


def for_each_stage(
    refs: Any,
    shape: Shape,
    row: Any,
    kv_head: Any,
    keys: tuple[Any, Any],
    fold: Callable[[Any, Any, Any], Any],
    state: Any,
) -> Any:
    """Folds keys [begin, end) of a row: `fold(first key, stage, state)` for one stage at a time.

    Args:
      refs: `layer`, `tables`, `kv`, `scales` of an 8-bit pool, and `buffers`.
      row: Row of the block table.
      kv_head: KV head.
      keys: `begin`, a multiple of `copy`, and `end`.
      fold: Returns the new state; what it writes to shared memory it commits.
      state: Of the first fold.
    """
    begin, end = keys
    steps = pl.cdiv(end - begin, shape.block_k)
    ahead = shape.num_stages - 1

    def start(step: Any) -> None:
        @pl.when(step < steps)
        def _():
            first = begin + step * shape.block_k
            fetch(refs, shape, row, kv_head, first, end, step % shape.num_stages)

    for step in range(ahead):
        start(jnp.int32(step))

    def body(step: Any, state: Any) -> Any:
        # Into the stage that the last step was done with.
        start(step + ahead)
        stage = step % shape.num_stages
        plgpu.barrier_wait(refs.full.at[stage])
        state = fold(begin + step * shape.block_k, stage, state)
        plgpu.commit_smem()  # reads by registers come before the next copy into this stage
        return state

    return jax.lax.fori_loop(0, steps, body, state)


def operands(refs: Any, shape: Shape, stage: Any, live: tuple[Any, Any]) -> tuple[Any, Any]:
    """Keys and values of a stage in shared memory, ready for the tensor cores.

    Values in front of key `live[0]` of the stage and from `live[1]` on become zero: they may be
    NaN, and 0 * NaN is NaN. The logits of such keys are for the caller to mask.
    """
    begin, end = live
    keys, values = refs.keys.at[stage], refs.values.at[stage]

    def clean(numbers: jax.Array) -> jax.Array:
        key = jax.lax.broadcasted_iota(jnp.int32, numbers.shape, 0)
        return jnp.where((key >= begin) & (key < end), numbers, jnp.zeros((), numbers.dtype))

    if shape.has_scales:
        width = min(LANES, shape.heads.head_dim)
        for lane in range(0, shape.heads.head_dim, width):
            lanes = pl.ds(lane, width)
            refs.wide_keys[:, lanes] = _widen(keys[:, lanes], shape.compute[0])
            refs.wide_values[:, lanes] = clean(_widen(values[:, lanes], shape.compute[1]))
        plgpu.commit_smem()
        return refs.wide_keys, refs.wide_values

    @pl.when((begin > 0) | (end < shape.block_k))
    def _():
        values[...] = clean(values[...])
        plgpu.commit_smem()

    return keys, values


def _widen(numbers: jax.Array, dtype: Any) -> jax.Array:
    # There is no instruction from 8-bit floats to bfloat16.
    if jnp.issubdtype(numbers.dtype, jnp.floating):
        numbers = numbers.astype(jnp.float32)
    return numbers.astype(dtype)


def weigh(
    refs: Any, shape: Shape, stage: Any, products: jax.Array, seen: jax.Array, maxima: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes the weights of a stage's values to shared memory.

    Args:
      refs: `weights` and, of an 8-bit pool, the scales.
      shape: See `Shape`.
      stage: Where the scales are.
      products: f32[rows, block_k] of queries and keys.
      seen: bool like `products`.
      maxima: f32[rows] of the logits before.
    Returns: maxima f32[rows]; factor on all sums before f32[rows]; weights as the sum of weights
      counts them f32[rows, block_k].
    """

    def scale(name: str) -> jax.Array:
        return jax.lax.broadcast_in_dim(refs[name][stage], products.shape, (1,))

    if shape.has_scales:
        products = products * scale("key_scales")
    s = shape.options.cap(products * jnp.float32(shape.options.factor))
    s = jnp.where(seen, s, MASKED)
    new = jnp.maximum(maxima, jnp.max(s, axis=1))
    decay = jnp.exp2(maxima - new)
    p = jnp.exp2(s - per_row(new, s))
    scaled = p
    if shape.has_scales:
        scaled = jnp.where(seen, p * scale("value_scales"), 0.0)  # a dead scale may be NaN
    refs.weights[...] = scaled.astype(shape.compute[1])
    plgpu.commit_smem()
    return new, decay, p


def per_row(x: jax.Array, like: jax.Array) -> jax.Array:
    """[rows] as [rows, n]."""
    return jax.lax.broadcast_in_dim(x, like.shape, (0,))
