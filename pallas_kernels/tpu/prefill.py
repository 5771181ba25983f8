"""Paged prefill on TPU: causal attention of chunks of rows over what the pool holds of them.

    packed tokens   row 1 ......|row 2 ...|row 3 ..............|row 4 .....
    q tiles         |   0   |   1   |   2   |   3   |   4   |   5   |
    items (tile,row) 0,1 1,1 1,2 2,2 2,3 3,3 4,3 4,4 5,4            in this order

An item computes a whole tile against the keys of one row and merges its own tokens into the output
tile, which stays in VMEM while consecutive items name it. The grid is (groups of pool heads, items)
and the number of items is data. While the last chunk of keys of an item is computed, the first one
of the next item comes in.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat
from pallas_kernels.options import Options, base2_sinks
from pallas_kernels.refs import Refs
from pallas_kernels.tpu.config import PrefillConfig, check_divides, prefill_config
from pallas_kernels.tpu.fetch import Fetch
from pallas_kernels.tpu.hbm import HBM, in_hbm
from pallas_kernels.tpu.heads import (
    LANES,
    compute_dtype,
    from_pool_heads,
    heads_of,
    per_head,
    to_pool_heads,
)
from pallas_kernels.tpu.prefill_kernel import Shape, prefill_kernel
from pallas_kernels.tpu.tables import table_of
from pallas_kernels.tpu.work import block_of, prefill_work


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
    config: PrefillConfig | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attends several new tokens per row, causally, to the cached prefix and to each other.

    Args:
      q: [T, H, D]; row r owns tokens [query_starts[r], query_starts[r + 1]), the last of its
        `context_lens[r]` positions. Keys and values of these tokens must already be in the pool.
      kv: [L, N+1, R, P, C], see `paged_decode`.
      layer: Layer to read.
      block_tables: i32[R, M]; entries past the length are never used.
      context_lens: i32[R], tokens readable per row, the new ones included.
      query_starts: i32[R+1], prefix sum of new tokens per row.
      sm_scale: Factor on the logits.
      num_kv_heads: K.
      scales: f32[L, N+1, 2K, P], factors of an 8-bit pool.
      sliding_window: Keys that a query sees at most, itself included.
      soft_cap: Logits become `soft_cap * tanh(logits / soft_cap)`.
      sinks: f32[H], logit of a key with value zero that everybody sees.
      first_row: Rows [first_row, num_rows) are computed.
      num_rows: See `first_row`; None: all.
      return_lse: Also return the log of the sum of `exp(logits)`, sinks included.
      config: Tile and chunk sizes; None: from a table or from the shapes.
      interpret: As in `pallas_call`.
    Returns: outputs [T, H, D] in q's dtype, zero for tokens of rows that are not computed, and
      log-sum-exp f32[T, H], -inf for those tokens, or None.
    Raises: NotImplementedError for a shape that the kernel cannot serve.
    """
    heads = heads_of(q.shape[1:], kv, num_kv_heads, scales)
    total, block_size = q.shape[0], kv.shape[3]
    max_tokens = block_tables.shape[1] * block_size
    if not q.size or not block_tables.size:
        lse = jnp.full(q.shape[:2], -jnp.inf, jnp.float32) if return_lse else None
        return jnp.zeros_like(q), lse
    if config is None:
        config = prefill_config(heads, kv, q.dtype, num_tokens=total, max_tokens=max_tokens)
    tile, steps = config.tile_tokens, config.heads_per_step
    check_divides("heads_per_step", steps, "pool heads", heads.pool_heads)
    check_divides("block_size", block_size, "chunk_tokens", config.chunk_tokens)
    shape = Shape(
        heads=heads,
        options=Options(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap),
        compute=compute_dtype(q, kv),
        fetch=Fetch(
            num_blocks=config.chunk_tokens // block_size,
            block_size=block_size,
            table=table_of(block_tables),
            pool_rows=None if steps == heads.pool_heads else 2 * steps,
        ),
        heads_per_step=steps,
        tile=tile,
    )
    num_rows = block_tables.shape[0] if num_rows is None else num_rows
    padded = total + -total % tile
    work = prefill_work(
        query_starts,
        first_row,
        num_rows,
        tile,
        max_items=padded // tile + block_tables.shape[0],
    )
    # Scaled here and not in the tile, where a factor costs three bundles in a hundred; a bfloat16
    # query is rounded a second time by it.
    queries = q.astype(jnp.float32) * shape.options.factor
    queries = to_pool_heads(queries.astype(shape.compute), heads)
    queries = jnp.pad(queries, ((0, padded - total), (0, 0), (0, 0), (0, 0)))
    queries = queries.transpose(1, 2, 0, 3)  # [J, r * G, T, C]
    sink_lanes = None
    if sinks is not None:
        sink_lanes = per_head(base2_sinks(sinks), heads)[..., None]
        sink_lanes = jnp.broadcast_to(sink_lanes, (*sink_lanes.shape[:2], LANES))
    lens = jnp.clip(context_lens, 0, max_tokens)
    # Kernels do not store float16.
    out_dtype = jnp.float32 if q.dtype == jnp.float16 else q.dtype
    out, lse = _call(
        shape, config, work, lens, query_starts, layer, queries, kv, scales, sink_lanes,
        out_dtype, return_lse, interpret,
    )  # fmt: skip
    out = out.astype(q.dtype)
    token = jnp.arange(total)
    is_computed = (token >= query_starts[first_row]) & (token < query_starts[num_rows])
    out = from_pool_heads(out.transpose(2, 0, 1, 3)[:total], heads)
    out = jnp.where(is_computed[:, None, None], out, jnp.zeros((), q.dtype))
    if lse is None:
        return out, None
    flat = lse[..., 0].transpose(2, 0, 1)[:total].reshape(total, -1)[:, : heads.num_heads]
    return out, jnp.where(is_computed[:, None], flat, -jnp.inf)


def _call(
    shape: Shape,
    config: PrefillConfig,
    work: tuple[jax.Array, jax.Array],
    lens: jax.Array,
    query_starts: jax.Array,
    layer: jax.Array | int,
    queries: jax.Array,
    kv: jax.Array,
    scales: jax.Array | None,
    sinks: jax.Array | None,
    out_dtype: Any,
    has_lse: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """The pallas_call: outputs [J, r * G, T, C] and, on request, log-sum-exp in 128 lanes."""
    pool_heads, num_queries, _, width = queries.shape
    steps, tile, f32 = shape.heads_per_step, shape.tile, jnp.float32
    items, num_items = work
    scalars = {
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "num_items": num_items.reshape(1),
        "items": items,
        "lens": lens,
        "starts": query_starts,
        **shape.fetch.table.scalars(),
    }

    def tiles(lanes: int) -> pl.BlockSpec:
        def index(j: Any, i: Any, *scalar_refs: Any) -> tuple[Any, ...]:
            return j, 0, block_of(scalar_refs[2][i]), 0

        return pl.BlockSpec((steps, num_queries, tile, lanes), index)

    inputs = {
        "q": (queries, tiles(width)),
        "kv": (in_hbm(kv, interpret), HBM),
        **shape.fetch.table.inputs(),
    }
    if scales is not None:
        inputs["scales"] = (in_hbm(scales, interpret), HBM)
    if sinks is not None:
        spec = pl.BlockSpec((steps, num_queries, LANES), lambda j, *_: (j, 0, 0))
        inputs["sinks"] = (sinks, spec)
    outputs = {"out": (queries.shape, out_dtype, tiles(width))}
    if has_lse:
        outputs["lse"] = ((*queries.shape[:3], LANES), f32, tiles(LANES))
    block = (2 * steps, *kv.shape[3:])
    scratch = {
        "kv_buf": pltpu.VMEM((2, shape.fetch.num_blocks, *block), kv.dtype),
        "maxima": pltpu.VMEM((steps, shape.rows, LANES), f32),
        "sums": pltpu.VMEM((steps, shape.rows, LANES), f32),
        "sum_v": pltpu.VMEM((steps, shape.rows, width), f32),
        "arrived": pltpu.SemaphoreType.DMA((2,)),
        "ahead": pltpu.SMEM((2,), jnp.int32),
        **shape.fetch.table.scratch(),
    }
    if scales is not None:
        scale_block = (2, shape.fetch.num_blocks, *scales.shape[2:])
        scratch["scale_buf"] = pltpu.VMEM(scale_block, f32)
    names = (*scalars, *inputs, *outputs, *scratch)

    def body(*refs: Any) -> None:
        prefill_kernel(Refs(names, refs), shape=shape)

    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            # A list of none is one item of no tokens, rather than a grid of no steps.
            grid=(pool_heads // steps, jnp.maximum(num_items, 1)),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for *_, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[jax.ShapeDtypeStruct(s, dtype) for s, dtype, _ in outputs.values()],
        compiler_params=compat.tpu_compiler_params(
            ("parallel", "arbitrary"), config.vmem_limit_bytes, is_checked=bool(interpret)
        ),
        interpret=interpret,
        name="paged_prefill",
    )(*scalars.values(), *(array for array, _ in inputs.values()))
    return out[0], out[1] if has_lse else None
