"""Paged prefill in Mosaic GPU: one warpgroup per tile of a row's new tokens and KV head.

    XLA    gathers the queries of a tile: [tile, KV head, 64 rows = tokens x query heads, D]
    grid   (tile, KV head): copies whole blocks by TMA, 64 keys a stage, a stage ahead; wgmma
    XLA    gathers the outputs of the packed tokens

Hopper only: Blackwell has no wgmma. Tokens of no row are tiles without keys.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.gpu.config import MosaicPrefillConfig
from pallas_kernels.gpu.heads import compute_dtypes
from pallas_kernels.gpu.mosaic_limits import HOPPER, check
from pallas_kernels.gpu.mosaic_softmax import (
    Shape,
    buffers,
    for_each_stage,
    operands,
    per_row,
    weigh,
)
from pallas_kernels.gpu.work import PrefillWork, prefill_work
from pallas_kernels.options import LOG2E, MASKED, Options, base2_sinks
from pallas_kernels.refs import Refs

plgpu = compat.mosaic_gpu()

TILE_ROWS = 64
"""Rows that the tensor cores of a warpgroup multiply at once."""
ACCUMULATED = 128
"""Lanes of values that are accumulated at once, half as many where the sums are wider: products
take registers beside the sums."""


def paged_prefill(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array | int,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    *,
    sm_scale: float,
    num_kv_heads: int,
    scales: jax.Array | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    first_row: jax.Array | int = 0,
    num_rows: jax.Array | int | None = None,
    return_lse: bool = False,
    config: MosaicPrefillConfig | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """As `triton_prefill.paged_prefill`, for Hopper and JAX from 0.12 on.

    Args: as there, but `interpret`: True or `mosaic_gpu.InterpretGPUParams`, to run on CPU.
    Raises: NotImplementedError for what `mosaic_limits.check` refuses.
    """
    heads = check(q.shape[1:], q.dtype, kv, num_kv_heads, scales, HOPPER)
    if not block_tables.size or not q.size:
        lse = jnp.full(q.shape[:2], -jnp.inf, jnp.float32) if return_lse else None
        return jnp.zeros_like(q), lse
    if config is None:
        config = MosaicPrefillConfig()
    shape = Shape(
        heads=heads,
        options=Options(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap),
        compute=compute_dtypes(q, kv),
        pool_dtype=kv.dtype,
        block_size=kv.shape[3],
        rows=TILE_ROWS,
        block_k=config.block_k,
        num_stages=config.num_stages,
    )
    tile = TILE_ROWS // heads.group
    work = prefill_work(
        jnp.clip(context_lens, 0, block_tables.shape[1] * kv.shape[3]),
        query_starts,
        first_row,
        jnp.asarray(block_tables.shape[0] if num_rows is None else num_rows, jnp.int32),
        tile,
        num_tokens=q.shape[0],
    )
    inputs = {
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "rows": work.rows,
        "begins": work.begins,
        "ends": work.ends,
        "positions": work.positions,
        "tables": block_tables,
        "q": _tiles(q, work, shape, tile),
        "kv": kv,
    }
    if scales is not None:
        inputs["scales"] = scales
    if sinks is not None:
        of_row = jnp.arange(TILE_ROWS) % heads.group
        inputs["sinks"] = base2_sinks(sinks).reshape(num_kv_heads, heads.group)[:, of_row]
    out, lse = _attend(shape, inputs, interpret)
    return _packed(out, lse, q, work, shape, return_lse)


def _tiles(q: jax.Array, work: PrefillWork, shape: Shape, tile: int) -> jax.Array:
    """Queries [W, K, 64, D]; rows that no token has repeat one, and are not read back."""
    heads = shape.heads
    token = jnp.minimum(work.begins[:, None] + jnp.arange(tile)[None], q.shape[0] - 1)
    tiles = q[token].reshape(-1, tile, heads.num_kv_heads, heads.group, heads.head_dim)
    tiles = tiles.swapaxes(1, 2).reshape(-1, heads.num_kv_heads, tile * heads.group, heads.head_dim)
    return jnp.pad(tiles, [(0, 0), (0, 0), (0, TILE_ROWS - tile * heads.group), (0, 0)])


def _packed(
    out: jax.Array, lse: jax.Array, q: jax.Array, work: PrefillWork, shape: Shape, has_lse: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Outputs [T, H, D] and, on request, log-sum-exp f32[T, H] of tiles."""
    group, (num_tokens, num_heads, _) = shape.heads.group, q.shape
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # Tiles lie one behind the other; comparing all pairs is one small kernel.
    is_before = (work.ends > work.begins)[None] & (work.ends[None] <= token[:, None])
    slot = jnp.minimum(jnp.sum(is_before, axis=1, dtype=jnp.int32), work.rows.shape[0] - 1)
    head = jnp.arange(num_heads, dtype=jnp.int32)[None]
    row = (token - work.begins[slot])[:, None] * group + head % group
    at = slot[:, None], head // group, row
    is_seen = ((work.positions + work.ends - work.begins)[slot] > 0)[:, None]
    out = jnp.where(is_seen[..., None], out[at], jnp.zeros((), out.dtype))
    return out, jnp.where(is_seen, lse[at], -jnp.inf) if has_lse else None


def _attend(
    shape: Shape, inputs: dict[str, jax.Array], interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Outputs like `inputs["q"]` and log-sum-exp of its rows; not written in tiles without keys."""
    q, scratch = inputs["q"], buffers(shape)
    outputs = {
        "out": jax.ShapeDtypeStruct(q.shape, q.dtype),
        "lse": jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
    }

    def paged_prefill(*refs: Any) -> None:
        _kernel(Refs((*inputs, *outputs, *scratch), refs), shape)

    with compat.mosaic_interpret(interpret):
        out, lse = plgpu.kernel(
            paged_prefill,
            out_type=list(outputs.values()),
            scratch_types=list(scratch.values()),
            grid=q.shape[:2],
            grid_names=("tile", "kv_head"),
        )(*inputs.values())
    return out, lse


def _kernel(refs: Refs, shape: Shape) -> None:
    tile, kv_head = jax.lax.axis_index("tile"), jax.lax.axis_index("kv_head")
    first = refs.positions[tile]
    end = first + refs.ends[tile] - refs.begins[tile]
    pl.when(end > 0)(lambda: _compute(refs, shape, tile, kv_head, first, end))


def _compute(refs: Refs, shape: Shape, tile: Any, kv_head: Any, first: Any, end: Any) -> None:
    """Tokens at positions [first, end) attend to keys [0, end)."""
    row, group, window = refs.rows[tile], shape.heads.group, shape.options.sliding_window
    width = shape.heads.head_dim
    width = width if width <= ACCUMULATED else ACCUMULATED // 2
    pieces = range(0, shape.heads.head_dim, width)
    plgpu.copy_gmem_to_smem(refs.q.at[tile, kv_head], refs.queries, refs.asked)
    plgpu.barrier_wait(refs.asked)
    low = shape.options.first_seen(first)

    def fold(key: Any, stage: Any, state: Any) -> Any:
        maxima, sums, *values = state
        keys, numbers = operands(refs, shape, stage, (low - key, end - key))
        products = _product(refs.queries, keys.T, shape.block_k)
        key = key + jax.lax.broadcasted_iota(jnp.int32, products.shape, 1)
        token = jax.lax.broadcasted_iota(jnp.int32, products.shape, 0)
        position = first + jax.lax.div(token, jnp.int32(group))
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        maxima, decay, weights = weigh(refs, shape, stage, products, seen, maxima)
        sums = sums * decay + jnp.sum(weights, axis=1)
        values = [
            value * per_row(decay, value)
            + _product(refs.weights, numbers.at[:, pl.ds(lane, width)], width)
            for value, lane in zip(values, pieces, strict=True)
        ]
        return maxima, sums, *values

    maxima, sums = jnp.full((TILE_ROWS,), MASKED), jnp.zeros((TILE_ROWS,), jnp.float32)
    if "sinks" in refs:
        # A sink is a key of weight 1 relative to the maximum.
        maxima = plgpu.load(refs.sinks.at[kv_head], optimized=False)
        sums = jnp.ones((TILE_ROWS,), jnp.float32)
    state = maxima, sums, *(jnp.zeros((TILE_ROWS, width), jnp.float32) for _ in pieces)
    keys = low // shape.copy * shape.copy, end
    maxima, sums, *values = for_each_stage(refs, shape, row, kv_head, keys, fold, state)
    divisor = jnp.where(sums > 0.0, sums, 1.0)
    # Nobody reads the queries any more.
    for value, lane in zip(values, pieces, strict=True):
        out = value / per_row(divisor, value)
        refs.queries[:, pl.ds(lane, width)] = out.astype(refs.out.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.queries, refs.out.at[tile, kv_head])
    lse = (maxima + jnp.log2(divisor)) * (1 / LOG2E)
    plgpu.store(refs.lse.at[tile, kv_head], lse, optimized=False)
    plgpu.wait_smem_to_gmem(0)


def _product(a: Any, b: Any, width: int) -> jax.Array:
    """a @ b of shared memory, in float32 registers."""

    def multiply(sums: Any) -> jax.Array:
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(multiply, plgpu.ACC((TILE_ROWS, width), jnp.float32))
