"""Paged decode in Mosaic GPU: programs over ranges of keys; XLA joins the ranges of a row.

    work   row 0: [0, 320) [320, 600)   row 2: [0, 17)   row 3: ...      one list for all layers
    grid   (range, KV head): copies whole blocks by TMA, 64 keys a stage, two stages ahead
           -> sums of values, maximum and sum of weights, per query head
    XLA    joins them, adds the sink, divides

The query heads of a KV head are the 16 rows of the smallest tile that tensor cores multiply, which
the four warps share by keys and by lanes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.gpu.config import MosaicDecodeConfig
from pallas_kernels.gpu.heads import MIN_ROWS, compute_dtypes
from pallas_kernels.gpu.mosaic_limits import check
from pallas_kernels.gpu.mosaic_softmax import (
    Shape,
    buffers,
    for_each_stage,
    operands,
    per_row,
    weigh,
)
from pallas_kernels.gpu.work import DecodeWork, decode_work
from pallas_kernels.options import LOG2E, MASKED, Options, base2_sinks
from pallas_kernels.refs import Refs

plgpu = compat.mosaic_gpu()


def paged_decode(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array | int,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    sm_scale: float,
    num_kv_heads: int,
    scales: jax.Array | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    num_rows: jax.Array | int | None = None,
    return_lse: bool = False,
    config: MosaicDecodeConfig | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """As `triton_decode.paged_decode`, for Hopper and Blackwell and JAX from 0.12 on.

    Args: as there, but `interpret`: True or `mosaic_gpu.InterpretGPUParams`, to run on CPU.
    Raises: NotImplementedError for what `mosaic_limits.check` refuses.
    """
    heads = check(q.shape[1:], q.dtype, kv, num_kv_heads, scales)
    num_seqs = q.shape[0]
    if not block_tables.size:
        lse = jnp.full(q.shape[:2], -jnp.inf, jnp.float32) if return_lse else None
        return jnp.zeros_like(q), lse
    if config is None:
        config = MosaicDecodeConfig(num_stages=2 if heads.head_dim > 128 else 3)
    shape = Shape(
        heads=heads,
        options=Options(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap),
        compute=compute_dtypes(q, kv),
        pool_dtype=kv.dtype,
        block_size=kv.shape[3],
        rows=MIN_ROWS,
        block_k=config.block_k,
        num_stages=config.num_stages,
        is_interpreted=bool(interpret),
    )
    rows = jnp.asarray(num_seqs if num_rows is None else num_rows, jnp.int32)
    is_row = jnp.arange(num_seqs) < rows
    lens = jnp.clip(context_lens, 0, block_tables.shape[1] * kv.shape[3])
    work = decode_work(
        jnp.where(is_row, lens, 0),
        config.block_k,
        sliding_window,
        num_slots=num_seqs + max(config.num_programs // num_kv_heads, 1),
        align=shape.copy,
    )
    parts = _attend(shape, work, layer, q, kv, scales, block_tables, interpret)
    out, lse = _join(work, parts, sinks, q)
    return out, jnp.where(is_row[:, None], lse, -jnp.inf) if return_lse else None


def _attend(
    shape: Shape,
    work: DecodeWork,
    layer: jax.Array | int,
    q: jax.Array,
    kv: jax.Array,
    scales: jax.Array | None,
    tables: jax.Array,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """Sums of values f32[W, H, D], maxima and sums f32[W, K, 16] of every range."""
    heads, num_slots = shape.heads, work.rows.shape[0]
    # Rows that no head uses are zero; the copy of queries is whole tiles.
    grouped = q.reshape(-1, heads.num_kv_heads, heads.group, heads.head_dim)
    grouped = jnp.pad(grouped, [(0, 0), (0, 0), (0, shape.rows - heads.group), (0, 0)])
    inputs = {
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "rows": work.rows,
        "begins": work.begins,
        "ends": work.ends,
        "tables": tables,
        "q": grouped,
        "kv": kv,
    }
    if scales is not None:
        inputs["scales"] = scales
    per_head = (num_slots, heads.num_kv_heads, shape.rows)
    outputs = {
        "sums_of_values": (num_slots, heads.num_heads, heads.head_dim),
        "maxima": per_head,
        "sums": per_head,
    }
    scratch = buffers(shape) | {"staged": plgpu.SMEM((shape.rows, heads.head_dim), jnp.float32)}

    def paged_decode(*refs: Any) -> None:
        _attend_kernel(Refs((*inputs, *outputs, *scratch), refs), shape)

    with compat.mosaic_interpret(interpret):
        parts = plgpu.kernel(
            paged_decode,
            out_type=[jax.ShapeDtypeStruct(s, jnp.float32) for s in outputs.values()],
            scratch_types=list(scratch.values()),
            grid=(num_slots, heads.num_kv_heads),
            grid_names=("slot", "kv_head"),
        )(*inputs.values())
    return tuple(parts)


def _attend_kernel(refs: Refs, shape: Shape) -> None:
    slot, kv_head = jax.lax.axis_index("slot"), jax.lax.axis_index("kv_head")
    begin, end = refs.begins[slot], refs.ends[slot]
    pl.when(end > begin)(lambda: _compute(refs, shape, slot, kv_head, begin, end))


def _compute(refs: Refs, shape: Shape, slot: Any, kv_head: Any, begin: Any, end: Any) -> None:
    row, group = refs.rows[slot], shape.heads.group
    plgpu.copy_gmem_to_smem(refs.q.at[row, kv_head], refs.queries, refs.asked)
    plgpu.barrier_wait(refs.asked)

    def fold(first: Any, stage: Any, state: Any) -> Any:
        maxima, sums, values = state
        keys, numbers = operands(refs, shape, stage, (begin - first, end - first))
        zeros = jnp.zeros((shape.rows, shape.block_k), jnp.float32)
        products = _product(shape, zeros, refs.queries[...], keys.T[...])
        key = first + jax.lax.broadcasted_iota(jnp.int32, products.shape, 1)
        seen = (key >= begin) & (key < end)
        maxima, decay, weights = weigh(refs, shape, stage, products, seen, maxima)
        # Sums stay apart per key of a stage: adding them up takes the warps together.
        sums = sums * per_row(decay, sums) + weights
        values = values * per_row(decay, values)
        return maxima, sums, _product(shape, values, refs.weights[...], numbers[...])

    keys = begin // shape.copy * shape.copy, end
    state = (
        jnp.full((shape.rows,), MASKED, jnp.float32),
        jnp.zeros((shape.rows, shape.block_k), jnp.float32),
        jnp.zeros((shape.rows, shape.heads.head_dim), jnp.float32),
    )
    maxima, sums, values = for_each_stage(refs, shape, row, kv_head, keys, fold, state)
    plgpu.store(refs.maxima.at[slot, kv_head], maxima, optimized=False)
    plgpu.store(refs.sums.at[slot, kv_head], jnp.sum(sums, axis=1), optimized=False)
    plgpu.store(refs.staged, values, optimized=False)  # once, into rows that one copy takes apart
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
        refs.staged.at[pl.ds(0, group)],
        refs.sums_of_values.at[slot, pl.ds(kv_head * group, group)],
    )
    plgpu.wait_smem_to_gmem(0)


def _product(shape: Shape, c: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """c + a @ b in float32."""
    if shape.is_interpreted:  # which has no rule for `mma`
        return c + jnp.dot(a, b, preferred_element_type=jnp.float32)
    return plgpu.mma(c, a, b)


def _join(
    work: DecodeWork, parts: tuple[jax.Array, ...], sinks: jax.Array | None, q: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Outputs [S, H, D] and log-sum-exp f32[S, H].

    A matrix of zeros and ones adds up the ranges of each row: the same sum every time, unlike
    atomic additions of a scatter.
    """
    num_slots, group = work.rows.shape[0], q.shape[1] // parts[1].shape[1]
    slot = jnp.arange(num_slots, dtype=jnp.int32)[None]
    is_used = slot[0] < work.offsets[-1]
    is_own = (work.offsets[:-1, None] <= slot) & (slot < work.offsets[1:, None])  # [S, W]
    values, maxima, sums = parts
    maxima, sums = (
        jnp.where(is_used[:, None], x[:, :, :group].reshape(num_slots, -1), empty)
        for x, empty in ((maxima, MASKED), (sums, 0.0))
    )
    top = jnp.max(jnp.where(is_own[..., None], maxima[None], MASKED), axis=1)  # [S, H]
    sink = None if sinks is None else base2_sinks(sinks)[None]
    if sink is not None:
        top = jnp.maximum(top, sink)
    weights = jnp.exp2(maxima - top[work.rows])  # [W, H]
    values = jnp.where(is_used[:, None, None], values * weights[..., None], 0.0)
    total = jnp.sum(jnp.where(is_own[..., None], (sums * weights)[None], 0.0), axis=1)
    if sink is not None:
        total = total + jnp.exp2(sink - top)
    divisor = jnp.where(total > 0.0, total, 1.0)
    out = jnp.dot(
        is_own.astype(jnp.float32),
        values.reshape(num_slots, -1),
        precision=jax.lax.Precision.HIGHEST,
    )
    out = (out.reshape(q.shape) / divisor[..., None]).astype(q.dtype)
    lse = (top + jnp.log2(divisor)) * (1 / LOG2E)
    # Nothing but a sink of -inf is nothing.
    return out, jnp.where((total > 0.0) & (top > MASKED), lse, -jnp.inf)
