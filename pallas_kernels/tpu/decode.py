"""Paged decode on TPU: one query per row over a flat list of (row, block of keys) items.

    items    row 0: 0 1 2 | row 2: 0 | row 3: 0 1 ...       empty rows are not in the list
    copies          ^ x + 1 ... x + num_buffers - 1 on the way from HBM
    compute       ^ x: all QK products of the item, then all softmaxes, then all PV products

Each block is copied with all its KV heads by one descriptor. Heads with few queries share a tile of
eight rows: the query of head t is zero outside its own rows of the tile, so that the products of
the heads can be added.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat
from pallas_kernels.options import Options, base2_sinks
from pallas_kernels.refs import Refs
from pallas_kernels.tpu.config import DecodeConfig, check_divides, decode_config
from pallas_kernels.tpu.decode_kernel import Shape, decode_kernel
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
from pallas_kernels.tpu.tables import table_of
from pallas_kernels.tpu.work import decode_work


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
    config: DecodeConfig | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attends one new token per row to the keys and values that a paged pool holds for the row.

    Args:
      q: [S, H, D]; keys and values of these tokens must already be in the pool.
      kv: [L, N+1, R, P, C]: row 2j keys and row 2j + 1 values of head j, or of C // D heads side by
        side; C is a multiple of 128, P of 8.
      layer: Layer to read.
      block_tables: i32[S, M]; entries past the length are never used.
      context_lens: i32[S], tokens readable per row; 0 for padding rows.
      sm_scale: Factor on the logits.
      num_kv_heads: K.
      scales: f32[L, N+1, 2K, P], factors of an 8-bit pool; P is then a multiple of 128.
      sliding_window: Keys that a query sees at most, itself included.
      soft_cap: Logits become `soft_cap * tanh(logits / soft_cap)`.
      sinks: f32[H], logit of a key with value zero that everybody sees.
      num_rows: Rows [0, num_rows) are computed; None: all.
      return_lse: Also return the log of the sum of `exp(logits)`, sinks included.
      config: Tile and buffer sizes; None: from a table or from the shapes.
      interpret: As in `pallas_call`.
    Returns: outputs [S, H, D] in q's dtype, zero in rows without tokens, and f32[S, H] or None.
    Raises: NotImplementedError for a shape that the kernel cannot serve.
    """
    heads = heads_of(q.shape[1:], kv, num_kv_heads, scales)
    num_seqs = q.shape[0]
    if not block_tables.size:
        lse = jnp.full(q.shape[:2], -jnp.inf, jnp.float32) if return_lse else None
        return jnp.zeros_like(q), lse
    options = Options(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap)
    if config is None:
        config = decode_config(
            heads,
            kv,
            q.dtype,
            num_rows=num_seqs,
            max_tokens=block_tables.shape[1] * kv.shape[3],
        )
    check_divides("heads_per_tile", config.heads_per_tile, "pool heads", heads.pool_heads)
    check_divides("block_size", kv.shape[3], "block_tokens", config.block_tokens)
    table = table_of(block_tables)
    shape = Shape(
        heads=heads,
        options=options,
        compute=compute_dtype(q, kv),
        fetch=Fetch(
            num_blocks=config.block_tokens // kv.shape[3], block_size=kv.shape[3], table=table
        ),
        heads_per_tile=config.heads_per_tile,
        tile_rows=-(-config.heads_per_tile * heads.queries // 8) * 8,
        num_buffers=config.num_buffers,
    )
    lens = jnp.clip(context_lens, 0, block_tables.shape[1] * kv.shape[3])
    if num_rows is not None:
        lens = jnp.where(jnp.arange(num_seqs) < num_rows, lens, 0)
    work = decode_work(
        lens,
        shape.fetch.tokens,
        sliding_window,
        max_items=num_seqs * -(-table.width * kv.shape[3] // shape.fetch.tokens),
        num_cores=config.num_cores,
    )
    tiles = _to_tiles(to_pool_heads(q.astype(jnp.float32), heads), shape)
    sink_tiles = None
    if sinks is not None:
        sink_tiles = _to_tiles(per_head(base2_sinks(sinks), heads)[None, ..., None], shape)[0]
        sink_tiles = jnp.broadcast_to(sink_tiles, (*sink_tiles.shape[:2], LANES))
    out, lse = _call(
        shape, config, work, lens, layer, tiles, kv, scales, sink_tiles, return_lse, interpret
    )
    live = lens > 0
    out = from_pool_heads(_from_tiles(out, shape), heads)
    out = jnp.where(live[:, None, None], out, 0.0).astype(q.dtype)
    if lse is None:
        return out, None
    flat = _from_tiles(lse, shape)[..., 0].reshape(num_seqs, -1)[:, : heads.num_heads]
    empty = jnp.float32(-jnp.inf)
    if sinks is not None:  # a row without tokens still sees the sink
        has_row = jnp.arange(num_seqs) < (num_seqs if num_rows is None else num_rows)
        empty = jnp.where(has_row[:, None], jnp.asarray(sinks, jnp.float32)[None], empty)
    return out, jnp.where(live[:, None], flat, empty)


def _to_tiles(x: jax.Array, shape: Shape) -> jax.Array:
    """[S, J, r * G, n] as [S, tiles, tile rows, n], zero in rows that no head uses."""
    rows = shape.heads_per_tile * shape.heads.queries
    x = x.reshape(x.shape[0], shape.num_tiles, rows, x.shape[3])
    return jnp.pad(x, [(0, 0), (0, 0), (0, shape.tile_rows - rows), (0, 0)])


def _from_tiles(x: jax.Array, shape: Shape) -> jax.Array:
    rows = shape.heads_per_tile * shape.heads.queries
    x = x[:, :, :rows]
    return x.reshape(x.shape[0], shape.heads.pool_heads, shape.heads.queries, x.shape[3])


def _call(
    shape: Shape,
    config: DecodeConfig,
    work: tuple[jax.Array, jax.Array],
    lens: jax.Array,
    layer: jax.Array | int,
    tiles: jax.Array,
    kv: jax.Array,
    scales: jax.Array | None,
    sinks: jax.Array | None,
    has_lse: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """The pallas_call: f32[S, tiles, tile rows, C] and, on request, log-sum-exp in 128 lanes."""
    num_seqs, num_tiles, tile_rows, width = tiles.shape
    items, bounds = work
    f32 = jnp.float32
    scalars = {
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "bounds": bounds,
        "items": items,
        "lens": lens,
        **shape.fetch.table.scalars(),
    }
    inputs = {"q": (tiles, HBM), "kv": (in_hbm(kv, interpret), HBM), **shape.fetch.table.inputs()}
    if scales is not None:
        inputs["scales"] = (in_hbm(scales, interpret), HBM)
    if sinks is not None:
        inputs["sinks"] = (sinks, pl.BlockSpec(memory_space=pltpu.VMEM))
    outputs = {"out": (num_seqs, num_tiles, tile_rows, width)}
    buffers = shape.num_buffers
    row = (num_tiles, tile_rows)
    scratch = {
        "kv_buf": pltpu.VMEM((buffers, shape.fetch.num_blocks, *kv.shape[2:]), kv.dtype),
        "q_buf": pltpu.VMEM((buffers, *row, width), f32),
        # A tile of queries per pool head, zero outside the rows of the head.
        "queries": pltpu.VMEM((shape.heads.pool_heads, tile_rows, width), shape.compute),
        "maxima": pltpu.VMEM((*row, LANES), f32),
        "sums": pltpu.VMEM((*row, LANES), f32),
        "sum_v": pltpu.VMEM((*row, width), f32),
        "out_buf": pltpu.VMEM((2, *row, width), f32),
        "arrived": pltpu.SemaphoreType.DMA((buffers,)),
        "stored": pltpu.SemaphoreType.DMA((2,)),
        "num_finished": pltpu.SMEM((1,), jnp.int32),
        **shape.fetch.table.scratch(),
    }
    if scales is not None:
        scratch["scale_buf"] = pltpu.VMEM((buffers, shape.fetch.num_blocks, *scales.shape[2:]), f32)
    if has_lse:
        outputs["lse"] = (num_seqs, num_tiles, tile_rows, LANES)
        scratch["lse_buf"] = pltpu.VMEM((2, *row, LANES), f32)
    names = (*scalars, *inputs, *outputs, *scratch)

    def body(*refs):
        decode_kernel(Refs(names, refs), shape=shape)

    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(config.num_cores,),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[HBM] * len(outputs),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[jax.ShapeDtypeStruct(s, f32) for s in outputs.values()],
        compiler_params=compat.tpu_compiler_params(
            ("parallel",), config.vmem_limit_bytes, is_checked=bool(interpret)
        ),
        interpret=interpret,
        name="paged_decode",
    )(*scalars.values(), *(array for array, _ in inputs.values()))
    return out[0], out[1] if has_lse else None
