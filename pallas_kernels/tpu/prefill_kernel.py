"""The body of `paged_prefill`; see there for the picture."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.options import MASKED, Options
from pallas_kernels.refs import Refs
from pallas_kernels.tpu.fetch import Fetch, Interval
from pallas_kernels.tpu.heads import LANES, Heads
from pallas_kernels.tpu.scalars import divide, divide_up
from pallas_kernels.tpu.softmax import begin, factor_rows, finish, fold, product, widen
from pallas_kernels.tpu.work import block_of, row_of


@dataclass(frozen=True, kw_only=True)
class Shape:
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


def _item(refs: Refs, shape: Shape, index: Any) -> _Item:
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


def _keys(shape: Shape, item: _Item, chunk: Any) -> Interval:
    """The keys of a chunk that some token of the item sees."""
    key, low = chunk * shape.fetch.tokens, 0
    if shape.options.sliding_window is not None:
        low = shape.options.first_seen(item.begin + item.offset) - key
    return Interval(low=low, high=item.end + item.offset - key, size=shape.fetch.tokens)


def prefill_kernel(refs: Refs, *, shape: Shape) -> None:
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


def _enter_row(refs: Refs, shape: Shape, item: _Item, at: Any, chunk: Any, last: Any) -> None:
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


def _each_head(shape: Shape, act: Any) -> None:
    """Calls `act(t)` for the pool heads of a step; a loop, as a body is thousands of bundles."""
    if shape.heads_per_step == 1:
        act(0)
    else:
        jax.lax.fori_loop(0, shape.heads_per_step, lambda t, _: act(t), None)


def _start_item(refs: Refs, shape: Shape) -> None:
    def start(t: Any) -> None:
        begin(refs, t)
        if "sinks" in refs:
            for query in range(shape.heads.queries):
                part = slice(query * shape.tile, (query + 1) * shape.tile)
                sink = refs.sinks[t, query : query + 1]
                refs.maxima[t, part] = jnp.broadcast_to(sink, (shape.tile, LANES))

    _each_head(shape, start)


def _attend_heads(refs: Refs, shape: Shape, slot: Any, group: Any, edge: _Edge | None) -> None:
    _each_head(
        shape, lambda t: _attend(refs, shape, slot, t, group * shape.heads_per_step + t, edge)
    )


def _attend(refs: Refs, shape: Shape, slot: Any, t: Any, head: Any, edge: _Edge | None) -> None:
    """Folds a chunk of keys of one pool head in: what the edge allows, or all of it."""
    tokens, rows, width = shape.fetch.tokens, shape.rows, shape.heads.width

    def load(pool_row: Any) -> jax.Array:
        return refs.kv_buf[slot, :, pool_row].reshape(tokens, width).astype(shape.compute)

    def scale(which: int) -> jax.Array:
        """[rows, tokens]: the factor of each row's KV head."""
        first, last = head * shape.heads.per_row, shape.heads.num_kv_heads - 1
        heads = [jnp.minimum(first + i, last) for i in range(shape.heads.per_row)]
        pool_rows = [2 * kv_head + which for kv_head in heads]
        blocks = range(shape.fetch.num_blocks)
        group = shape.heads.group * shape.tile
        return factor_rows(refs.scale_buf, slot, blocks, pool_rows, group, rows)

    s = product(refs.q[t].reshape(rows, width), load(2 * t), transposed=True)
    if "scales" in refs:
        s = s * scale(0)
    s = shape.options.cap(s)
    seen = None
    if edge is not None:
        seen = _seen(shape, edge, s.shape)
        s = jnp.where(seen, s, MASKED)
    p, decay = fold(refs, t, s)
    if "scales" in refs:
        p = p * scale(1)
        # The scale of a dead slot may be NaN too.
        p = p if seen is None else jnp.where(seen, p, 0.0)
    values = load(2 * t + 1)
    if edge is not None:
        # Dead slots may hold NaN, and 0 * NaN is NaN.
        key = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
        values = jnp.where(edge.keys.has(key), values, jnp.zeros((), values.dtype))
    update = product(p.astype(shape.compute), values)
    refs.sum_v[t] = refs.sum_v[t] * widen(decay, width) + update


def _seen(shape: Shape, edge: _Edge, tile: tuple[int, ...]) -> jax.Array:
    """bool[rows, tokens], which query sees which key. Queries of other rows see anything."""
    row = jax.lax.broadcasted_iota(jnp.int32, tile, 0)
    key = jax.lax.broadcasted_iota(jnp.int32, tile, 1)
    place = edge.item.first + (row & (shape.tile - 1))
    position = place + edge.item.offset - edge.chunk * shape.fetch.tokens
    seen = key <= position
    if shape.options.sliding_window is None:
        return seen
    return seen & (key > position - shape.options.sliding_window)


def _finish_item(refs: Refs, shape: Shape, item: _Item) -> None:
    """Merges the item's tokens into the output tile, which may hold those of other rows."""
    place = item.first + jax.lax.broadcasted_iota(jnp.int32, (1, shape.tile, 1), 1)
    own = (place >= item.begin) & (place < item.end)

    def merge(ref: Any, t: Any, x: jax.Array) -> None:
        x = x.reshape(ref.shape[1:]).astype(ref.dtype)
        ref[t] = jnp.where(jnp.broadcast_to(own, x.shape), x, ref[t])

    def merge_head(t: Any) -> None:
        out, lse = finish(refs, t)
        merge(refs.out, t, out)
        if "lse" in refs:
            merge(refs.lse, t, lse)

    _each_head(shape, merge_head)
