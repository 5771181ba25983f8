"""Paged prefill on TPU: causal attention of chunks of rows over what the pool holds of them.

    packed tokens   row 1 ......|row 2 ...|row 3 ..............|row 4 .....
    q tiles         |   0   |   1   |   2   |   3   |   4   |   5   |
    items (tile,row) 0,1 1,1 1,2 2,2 2,3 3,3 4,3 4,4 5,4            in this order

An item computes a whole tile against the keys of one row and merges its own tokens into the output
tile, which stays in VMEM while consecutive items name it. The grid is (groups of pool heads, items)
and the number of items is data. While the last chunk of keys of an item is computed, the first one
of the next item comes in.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat
from pallas_kernels.tpu.config import PrefillConfig, prefill_config
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
from pallas_kernels.tpu.refs import Refs, divide, divide_up
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
from pallas_kernels.tpu.work import block_of, prefill_work, row_of


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What the body unrolls over."""

    heads: Heads
    options: Options
    compute: Any  # dtype of products
    fetch: Fetch
    heads_per_step: int  # pool heads
    tile: int  # tokens

    @property
    def rows(self) -> int:
        """Rows of a tile of logits: every query head of a pool head, token after token."""
        return self.heads.queries * self.tile


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
    if config is None:
        config = prefill_config(heads, kv, num_tokens=total, max_tokens=max_tokens)
    tile, steps = config.tile_tokens, config.heads_per_step
    shape = _Shape(
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
    lens = jnp.minimum(context_lens, max_tokens)
    out, lse = _call(
        shape, config, work, lens, query_starts, layer, queries, kv, scales, sink_lanes,
        q.dtype, return_lse, interpret,
    )  # fmt: skip
    token = jnp.arange(total)
    is_computed = (token >= query_starts[first_row]) & (token < query_starts[num_rows])
    out = from_pool_heads(out.transpose(2, 0, 1, 3)[:total], heads)
    out = jnp.where(is_computed[:, None, None], out, jnp.zeros((), q.dtype))
    if lse is None:
        return out, None
    flat = lse[..., 0].transpose(2, 0, 1)[:total].reshape(total, -1)[:, : heads.num_heads]
    return out, jnp.where(is_computed[:, None], flat, -jnp.inf)


def _call(
    shape: _Shape,
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
        _prefill_kernel(Refs(names, refs), shape=shape)

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
        out_shape=[compat.out_struct(s, dtype, like=kv) for s, dtype, _ in outputs.values()],
        compiler_params=compat.tpu_compiler_params(
            ("parallel", "arbitrary"), config.vmem_limit_bytes, is_checked=bool(interpret)
        ),
        interpret=interpret,
        name="paged_prefill",
    )(*scalars.values(), *(array for array, _ in inputs.values()))
    return out[0], out[1] if has_lse else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Item:
    """The tokens [begin, end) of a tile that belong to a row, and the keys that they see."""

    row: Any
    first: Any  # token of the tile
    begin: Any
    end: Any
    offset: Any  # position of a token minus its place on the packed axis
    first_chunk: Any
    end_chunk: Any

    @property
    def num_chunks(self) -> Any:
        return self.end_chunk - self.first_chunk


def _item(refs: Refs, shape: _Shape, index: Any) -> _Item:
    packed = refs.items[index]
    row, first = row_of(packed), block_of(packed) * shape.tile
    begin = jnp.maximum(refs.starts[row], first)
    end = jnp.minimum(refs.starts[row + 1], first + shape.tile)
    end = jnp.where(index < refs.num_items[0], end, begin)
    offset = refs.lens[row] - refs.starts[row + 1]
    tokens = shape.fetch.tokens
    num_keys = jnp.where(end > begin, end + offset, 0)
    low = shape.options.first_seen(begin + offset) if shape.options.sliding_window else 0
    return _Item(
        row=row,
        first=first,
        begin=begin,
        end=end,
        offset=offset,
        first_chunk=divide(low, tokens),
        end_chunk=divide_up(num_keys, tokens),
    )


def _keys(shape: _Shape, item: _Item, chunk: Any) -> Interval:
    """The keys of a chunk that some token of the item sees."""
    key, low = chunk * shape.fetch.tokens, 0
    if shape.options.sliding_window is not None:
        low = shape.options.first_seen(item.begin + item.offset) - key
    return Interval(low=low, high=item.end + item.offset - key, size=shape.fetch.tokens)


def _prefill_kernel(refs: Refs, *, shape: _Shape) -> None:
    group, index = pl.program_id(0), pl.program_id(1)
    last = jnp.maximum(refs.num_items[0], 1) - 1
    item = _item(refs, shape, index)
    following = _item(refs, shape, jnp.minimum(index + 1, last))
    first_row = 2 * shape.heads_per_step * group

    def start(which: _Item, at: Any, chunk: Any, slot: Any) -> None:
        _enter_row(refs, shape, which, at, chunk, last)
        seen = _keys(shape, which, chunk)
        shape.fetch.start(refs, slot, which.row, chunk, seen, first_row=first_row)

    @pl.when(index == 0)
    def _():
        refs.ahead[0] = 0  # slot of the first chunk
        refs.ahead[1] = 0  # whether it is on its way
        shape.fetch.table.begin(refs, item.row, if_=item.num_chunks > 0)

    slot = refs.ahead[0]
    pl.when((refs.ahead[1] == 0) & (item.num_chunks > 0))(
        lambda: start(item, index, item.first_chunk, slot)
    )
    _start_item(refs, shape)
    has_next = (index < last) & (following.num_chunks > 0)

    def step(chunk, slot):
        is_last = chunk + 1 == item.end_chunk
        then = jax.tree.map(lambda a, b: jnp.where(is_last, a, b), following, item)
        at = jnp.where(is_last, index + 1, index)
        next_chunk = jnp.where(is_last, following.first_chunk, chunk + 1)
        pl.when(~is_last | has_next)(lambda: start(then, at, next_chunk, 1 - slot))
        seen = _keys(shape, item, chunk)
        shape.fetch.wait(refs, slot, seen)
        # Whole: the first token sees the last key, and the last token the first.
        first = item.begin + item.offset - chunk * shape.fetch.tokens
        is_whole = first + 1 >= shape.fetch.tokens
        if shape.options.sliding_window is not None:
            is_whole &= item.end + item.offset - shape.options.sliding_window <= (
                chunk * shape.fetch.tokens
            )
        pl.when(is_whole)(lambda: _attend_heads(refs, shape, slot, group, None))
        pl.when(~is_whole)(
            lambda: _attend_heads(
                refs, shape, slot, group, _Edge(item=item, chunk=chunk, keys=seen)
            )
        )
        return 1 - slot

    slot = jax.lax.fori_loop(item.first_chunk, item.end_chunk, step, slot)
    refs.ahead[0] = slot
    refs.ahead[1] = (has_next & (item.num_chunks > 0)).astype(jnp.int32)
    _finish_item(refs, shape, item)


def _enter_row(refs: Refs, shape: _Shape, item: _Item, at: Any, chunk: Any, last: Any) -> None:
    """Makes the block table of an item's row readable before its first chunk."""
    tile = shape.tile
    tiles = divide_up(refs.starts[item.row + 1], tile) - divide(refs.starts[item.row], tile)
    is_first = (at == 0) | (row_of(refs.items[jnp.maximum(at - 1, 0)]) != item.row)
    following = at + tiles
    shape.fetch.table.enter(
        refs,
        item.row,
        if_=is_first & (chunk == item.first_chunk),
        then=row_of(refs.items[jnp.minimum(following, last)]),
        has_next=following <= last,
    )


@dataclass(frozen=True, kw_only=True)
class _Edge:
    """What decides which query of a tile sees which key of a chunk."""

    item: _Item
    chunk: Any
    keys: Interval


def _each_head(shape: _Shape, act: Any) -> None:
    """Calls `act(t)` for the pool heads of a step; a loop, as a body is thousands of bundles."""
    if shape.heads_per_step == 1:
        act(0)
    else:
        jax.lax.fori_loop(0, shape.heads_per_step, lambda t, _: act(t), None)


def _start_item(refs: Refs, shape: _Shape) -> None:
    def start(t: Any) -> None:
        lane = jax.lax.broadcasted_iota(jnp.int32, (shape.rows, LANES), 1)
        if "sinks" in refs:
            for query in range(shape.heads.queries):
                part = slice(query * shape.tile, (query + 1) * shape.tile)
                sink = refs.sinks[t, query : query + 1]
                refs.maxima[t, part] = jnp.broadcast_to(sink, (shape.tile, LANES))
        else:
            refs.maxima[t] = jnp.full(lane.shape, MASKED, jnp.float32)
        # A sink is a key of weight 1 relative to the maximum, counted in one lane.
        refs.sums[t] = jnp.where(lane == 0, float("sinks" in refs), 0.0)
        refs.sum_v[t] = jnp.zeros(refs.sum_v.shape[1:], jnp.float32)

    _each_head(shape, start)


def _attend_heads(refs: Refs, shape: _Shape, slot: Any, group: Any, edge: _Edge | None) -> None:
    _each_head(
        shape, lambda t: _attend(refs, shape, slot, t, group * shape.heads_per_step + t, edge)
    )


def _attend(refs: Refs, shape: _Shape, slot: Any, t: Any, head: Any, edge: _Edge | None) -> None:
    """Folds a chunk of keys of one pool head in: what the edge allows, or all of it."""
    tokens, rows, width = shape.fetch.tokens, shape.rows, shape.heads.width

    def load(pool_row: Any) -> jax.Array:
        return refs.kv_buf[slot, :, pool_row].reshape(tokens, width).astype(shape.compute)

    def scale_rows(which: int) -> jax.Array:
        """[rows, tokens]: the factor of each row's KV head."""
        found = {}
        for i in range(shape.heads.per_row):
            kv_head = jnp.minimum(head * shape.heads.per_row + i, shape.heads.num_kv_heads - 1)
            row = pl.ds(2 * kv_head + which, 1)
            parts = [refs.scale_buf[slot, b, row] for b in range(shape.fetch.num_blocks)]
            found[i] = jnp.broadcast_to(jnp.concatenate(parts, axis=1), (rows, tokens))
        return pick_rows(found, shape.heads.group * shape.tile, (rows, tokens))

    s = product(refs.q[t].reshape(rows, width), load(2 * t), transposed=True)
    if "scales" in refs:
        s = s * scale_rows(0)
    s = shape.options.cap(s)
    seen = None
    if edge is not None:
        seen = _seen(shape, edge, s.shape)
        s = jnp.where(seen, s, MASKED)
    old = refs.maxima[t]
    new = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
    decay = jnp.exp2(old - new)
    p = jnp.exp2(s - widen(new, tokens))
    refs.maxima[t] = new
    refs.sums[t] = refs.sums[t] * decay + lane_sums(p)
    if "scales" in refs:
        p = p * scale_rows(1)
        # The scale of a dead slot may be NaN too.
        p = p if seen is None else jnp.where(seen, p, 0.0)
    values = load(2 * t + 1)
    if edge is not None:
        # Dead slots may hold NaN, and 0 * NaN is NaN.
        key = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
        values = jnp.where(edge.keys.has(key), values, jnp.zeros((), values.dtype))
    update = product(p.astype(shape.compute), values)
    refs.sum_v[t] = refs.sum_v[t] * widen(decay, width) + update


def _seen(shape: _Shape, edge: _Edge, tile: tuple[int, ...]) -> jax.Array:
    """bool[rows, tokens], which query sees which key. Queries of other rows see anything."""
    row = jax.lax.broadcasted_iota(jnp.int32, tile, 0)
    key = jax.lax.broadcasted_iota(jnp.int32, tile, 1)
    place = edge.item.first + (row & (shape.tile - 1))
    position = place + edge.item.offset - edge.chunk * shape.fetch.tokens
    seen = key <= position
    if shape.options.sliding_window is None:
        return seen
    return seen & (key > position - shape.options.sliding_window)


def _finish_item(refs: Refs, shape: _Shape, item: _Item) -> None:
    """Merges the item's tokens into the output tile, which may hold those of other rows."""
    place = item.first + jax.lax.broadcasted_iota(jnp.int32, (1, shape.tile, 1), 1)
    own = (place >= item.begin) & (place < item.end)

    def merge(ref: Any, t: Any, x: jax.Array) -> None:
        x = x.reshape(ref.shape[1:]).astype(ref.dtype)
        ref[t] = jnp.where(jnp.broadcast_to(own, x.shape), x, ref[t])

    def finish(t: Any) -> None:
        total = jnp.sum(refs.sums[t], axis=1, keepdims=True)
        total = jnp.where(total > 0.0, total, 1.0)
        merge(refs.out, t, refs.sum_v[t] / total)
        if "lse" in refs:
            merge(refs.lse, t, (refs.maxima[t] + jnp.log2(total)) * (1 / LOG2E))

    _each_head(shape, finish)
