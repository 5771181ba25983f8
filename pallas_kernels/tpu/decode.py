"""Paged decode on TPU: one query per row over a flat list of (row, block of keys) items.

    items    row 0: 0 1 2 | row 2: 0 | row 3: 0 1 ...       empty rows are not in the list
    copies          ^ x + 1 ... x + num_buffers - 1 on the way from HBM
    compute       ^ x: all QK products of the item, then all softmaxes, then all PV products

Each block is copied with all its KV heads by one descriptor. Heads with few queries share a tile of
eight rows: the query of head t is zero outside its own rows of the tile, so that the products of
the heads can be added.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat
from pallas_kernels.tpu.config import DecodeConfig, decode_config
from pallas_kernels.tpu.fetch import Fetch, Interval
from pallas_kernels.tpu.hbm import HBM, in_hbm
from pallas_kernels.tpu.heads import (
    LANES,
    Heads,
    compute_dtype,
    from_pool_heads,
    heads_of,
    per_head,
    to_pool_heads,
)
from pallas_kernels.tpu.refs import Refs, divide_up
from pallas_kernels.tpu.softmax import (
    LOG2E,
    MASKED,
    Options,
    base2_sinks,
    lane_sums,
    pick_rows,
    product,
    widen,
)
from pallas_kernels.tpu.tables import table_of
from pallas_kernels.tpu.work import block_of, decode_work, row_of


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What the body unrolls over."""

    heads: Heads
    options: Options
    compute: Any  # dtype of products
    fetch: Fetch
    heads_per_tile: int
    tile_rows: int
    num_buffers: int

    @property
    def num_tiles(self) -> int:
        return self.heads.pool_heads // self.heads_per_tile


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
    options = Options(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap)
    if config is None:
        config = decode_config(heads, kv, max_tokens=block_tables.shape[1] * kv.shape[3])
    table = table_of(block_tables)
    shape = _Shape(
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
    lens = jnp.minimum(context_lens, block_tables.shape[1] * kv.shape[3])
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


def _to_tiles(x: jax.Array, shape: _Shape) -> jax.Array:
    """[S, J, r * G, n] as [S, tiles, tile rows, n], zero in rows that no head uses."""
    rows = shape.heads_per_tile * shape.heads.queries
    x = x.reshape(x.shape[0], shape.num_tiles, rows, x.shape[3])
    return jnp.pad(x, [(0, 0), (0, 0), (0, shape.tile_rows - rows), (0, 0)])


def _from_tiles(x: jax.Array, shape: _Shape) -> jax.Array:
    rows = shape.heads_per_tile * shape.heads.queries
    x = x[:, :, :rows]
    return x.reshape(x.shape[0], shape.heads.pool_heads, shape.heads.queries, x.shape[3])


def _call(
    shape: _Shape,
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
        _decode_kernel(Refs(names, refs), shape=shape)

    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(config.num_cores,),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[HBM] * len(outputs),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[compat.out_struct(s, f32, like=kv) for s in outputs.values()],
        compiler_params=compat.tpu_compiler_params(
            ("parallel",), config.vmem_limit_bytes, is_checked=bool(interpret)
        ),
        interpret=interpret,
        name="paged_decode",
    )(*scalars.values(), *(array for array, _ in inputs.values()))
    return out[0], out[1] if has_lse else None


def _decode_kernel(refs: Refs, *, shape: _Shape) -> None:
    core = pl.program_id(0)
    begin, end = refs.bounds[core], refs.bounds[core + 1]
    ahead = shape.num_buffers - 1
    refs.num_finished[0] = 0
    shape.fetch.table.begin(refs, row_of(refs.items[begin]), if_=begin < end)

    def step(x, slot):
        before = jax.lax.select(slot == 0, ahead, slot - 1)
        pl.when(x + ahead < end)(lambda: _start_item(refs, shape, x + ahead, before, begin, end))
        # The first steps have nothing to compute yet.
        pl.when(x >= begin)(lambda: _compute_item(refs, shape, x, slot, begin))
        return jax.lax.select(slot == ahead, 0, slot + 1)

    # Item `begin` comes into slot 0.
    first_slot = jnp.int32(shape.num_buffers - ahead if ahead else 0)
    jax.lax.fori_loop(begin - ahead, end, step, first_slot)
    _drain(refs)


def _is_first(refs: Refs, x: Any, row: jax.Array, begin: jax.Array) -> jax.Array:
    return (x == begin) | (row_of(refs.items[jnp.maximum(x - 1, 0)]) != row)


def _seen(refs: Refs, shape: _Shape, row: jax.Array, block: jax.Array) -> Interval:
    tokens = shape.fetch.tokens
    length, key = refs.lens[row], block * tokens
    low = 0
    if shape.options.sliding_window is not None:
        low = shape.options.first_seen(length - 1) - key
    return Interval(low=low, high=length - key, size=tokens)


def _start_item(refs: Refs, shape: _Shape, x: Any, slot: Any, begin: Any, end: Any) -> None:
    """Starts the copies of item x, and of the queries of its row with the row's first item."""
    row, block = row_of(refs.items[x]), block_of(refs.items[x])
    first = _is_first(refs, x, row, begin)
    following = x + divide_up(refs.lens[row], shape.fetch.tokens) - block
    shape.fetch.table.enter(
        refs,
        row,
        if_=first,
        then=row_of(refs.items[jnp.minimum(following, end - 1)]),
        has_next=following < end,
    )
    pl.when(first)(lambda: _copy_queries(refs, row, slot).start())
    shape.fetch.start(refs, slot, row, block, _seen(refs, shape, row, block))


def _compute_item(refs: Refs, shape: _Shape, x: Any, slot: Any, begin: Any) -> None:
    row, block = row_of(refs.items[x]), block_of(refs.items[x])
    first, seen = _is_first(refs, x, row, begin), _seen(refs, shape, row, block)
    pl.when(first)(lambda: _copy_queries(refs, row, slot).wait())
    shape.fetch.wait(refs, slot, seen)
    pl.when(first)(lambda: _start_row(refs, shape, slot))
    pl.when(~seen.is_whole)(lambda: _attend(refs, shape, slot, seen))
    pl.when(seen.is_whole)(lambda: _attend(refs, shape, slot, None))
    pl.when(seen.high <= seen.size)(lambda: _finish_row(refs, shape, row))


def _copy_queries(refs: Refs, row: jax.Array, slot: Any) -> Any:
    return pltpu.make_async_copy(refs.q.at[row], refs.q_buf.at[slot], refs.arrived.at[slot])


def _start_row(refs: Refs, shape: _Shape, slot: jax.Array) -> None:
    """Spreads the queries of a row over tiles and forgets the row before."""
    lane = jax.lax.broadcasted_iota(jnp.int32, refs.maxima.shape[1:], 1)
    for tile in range(shape.num_tiles):
        q = refs.q_buf[slot, tile]
        for t in range(shape.heads_per_tile):
            own = pick_rows({t: q}, shape.heads.queries, q.shape)
            head = tile * shape.heads_per_tile + t
            refs.queries[head] = own.astype(shape.compute)
        has_sinks = "sinks" in refs
        refs.maxima[tile] = refs.sinks[tile] if has_sinks else jnp.full(lane.shape, MASKED)
        # A sink is a key of weight 1 relative to the maximum, counted in one lane.
        refs.sums[tile] = jnp.where(lane == 0, float(has_sinks), 0.0)
        refs.sum_v[tile] = jnp.zeros(refs.sum_v.shape[1:], jnp.float32)


def _attend(refs: Refs, shape: _Shape, slot: jax.Array, seen: Interval | None) -> None:
    """Folds the keys of one item in: those that are seen, or all of them."""
    tokens, rows, width = shape.fetch.tokens, shape.tile_rows, shape.heads.width
    hp, queries = shape.heads_per_tile, shape.heads.queries

    def load(pool_row):
        block = refs.kv_buf[slot, :, pool_row].reshape(tokens, width)
        return block.astype(shape.compute)

    def hide(x, axis, instead):
        """Replaces what belongs to keys along `axis` that are not seen."""
        if seen is None:
            return x
        key = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(seen.has(key), x, jnp.asarray(instead, x.dtype))

    def scale_rows(tile, which):
        """[rows, tokens]: the factor of each row's head."""
        per_tile = hp * shape.heads.per_row
        first = tile * per_tile
        found = {}
        for t in range(per_tile):
            head = min(first + t, shape.heads.num_kv_heads - 1)
            row = slice(2 * head + which, 2 * head + which + 1)
            parts = [refs.scale_buf[slot, i, row] for i in range(shape.fetch.num_blocks)]
            found[t] = jnp.broadcast_to(jnp.concatenate(parts, axis=1), (rows, tokens))
        return pick_rows(found, shape.heads.group, (rows, tokens))

    # Phases, so that the products of one head overlap the softmax of no other: measured.
    logits = []
    for tile in range(shape.num_tiles):
        s = None
        for head in range(tile * hp, (tile + 1) * hp):
            part = product(refs.queries[head], load(2 * head), transposed=True)
            s = part if s is None else s + part
        if "scales" in refs:
            s = s * scale_rows(tile, 0)
        s = shape.options.cap(s * jnp.float32(shape.options.factor))
        logits.append(hide(s, 1, MASKED))
    weights, decays = [], []
    for tile, s in enumerate(logits):
        old = refs.maxima[tile]
        new = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
        decay = jnp.exp2(old - new)
        p = jnp.exp2(s - widen(new, tokens))
        refs.maxima[tile] = new
        refs.sums[tile] = refs.sums[tile] * decay + lane_sums(p)
        if "scales" in refs:
            # The scale of a dead slot may be NaN too.
            p = hide(p * scale_rows(tile, 1), 1, 0.0)
        weights.append(p.astype(shape.compute))
        decays.append(decay)
    for tile, p in enumerate(weights):
        found = {}
        for t in range(hp):
            # Dead slots may hold NaN, and 0 * NaN is NaN.
            found[t] = product(p, hide(load(2 * (tile * hp + t) + 1), 0, 0.0))
        total = pick_rows(found, queries, (rows, width))
        refs.sum_v[tile] = refs.sum_v[tile] * widen(decays[tile], width) + total


def _store_copies(refs: Refs, slot: Any, row: Any) -> list[Any]:
    names = [("out_buf", "out"), ("lse_buf", "lse")][: 1 + ("lse" in refs)]
    return [
        pltpu.make_async_copy(refs[buf].at[slot], refs[out].at[row], refs.stored.at[slot])
        for buf, out in names
    ]


def _finish_row(refs: Refs, shape: _Shape, row: jax.Array) -> None:
    """Divides by the sum and sends the row off; two rows may be on their way."""
    count = refs.num_finished[0]
    slot = jax.lax.rem(count, 2)

    @pl.when(count >= 2)
    def _():
        for copy in _store_copies(refs, slot, 0):
            copy.wait()

    for tile in range(shape.num_tiles):
        total = jnp.sum(refs.sums[tile], axis=1, keepdims=True)
        total = jnp.where(total > 0.0, total, 1.0)
        refs.out_buf[slot, tile] = refs.sum_v[tile] / total
        if "lse" in refs:
            refs.lse_buf[slot, tile] = (refs.maxima[tile] + jnp.log2(total)) * (1 / LOG2E)
    for copy in _store_copies(refs, slot, row):
        copy.start()
    refs.num_finished[0] = count + 1


def _drain(refs: Refs) -> None:
    count = refs.num_finished[0]
    for back in (1, 2):

        @pl.when(count >= back)
        def _(back=back):
            for copy in _store_copies(refs, jax.lax.rem(count - back, 2), 0):
                copy.wait()
