"""The body of `paged_decode`; see there for the picture."""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.options import MASKED, Options
from pallas_kernels.refs import Refs
from pallas_kernels.tpu.fetch import Fetch, Interval
from pallas_kernels.tpu.heads import Heads
from pallas_kernels.tpu.scalars import divide, divide_up
from pallas_kernels.tpu.softmax import (
    begin,
    factor_rows,
    finish,
    fold,
    pick_rows,
    product,
    widen,
)
from pallas_kernels.tpu.work import block_of, row_of

PART_TOKENS = 256
"""Keys below which the latency of a tile of logits outweighs the keys that are not computed."""


@dataclass(frozen=True, kw_only=True)
class Shape:
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
        """Tiles of query rows."""
        return self.heads.pool_heads // self.heads_per_tile

    @property
    def part_blocks(self) -> int:
        """Blocks that are computed at once of an item that is not seen as a whole."""
        blocks = self.fetch.num_blocks
        while blocks % 2 == 0 and blocks * self.fetch.block_size >= 2 * PART_TOKENS:
            blocks //= 2
        return blocks


def decode_kernel(refs: Refs, *, shape: Shape) -> None:
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


def _seen(refs: Refs, shape: Shape, row: jax.Array, block: jax.Array) -> Interval:
    tokens = shape.fetch.tokens
    length, key = refs.lens[row], block * tokens
    low = 0
    if shape.options.sliding_window is not None:
        low = shape.options.first_seen(length - 1) - key
    return Interval(low=low, high=length - key, size=tokens)


def _start_item(refs: Refs, shape: Shape, x: Any, slot: Any, begin: Any, end: Any) -> None:
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


def _compute_item(refs: Refs, shape: Shape, x: Any, slot: Any, begin: Any) -> None:
    row, block = row_of(refs.items[x]), block_of(refs.items[x])
    first, seen = _is_first(refs, x, row, begin), _seen(refs, shape, row, block)
    pl.when(first)(lambda: _copy_queries(refs, row, slot).wait())
    shape.fetch.wait(refs, slot, seen)
    pl.when(first)(lambda: _start_row(refs, shape, slot))
    pl.when(seen.is_whole)(lambda: _attend(refs, shape, slot, 0, shape.fetch.num_blocks, None))
    pl.when(~seen.is_whole)(lambda: _attend_edge(refs, shape, slot, seen))
    pl.when(seen.high <= seen.size)(lambda: _finish_row(refs, shape, row))


def _copy_queries(refs: Refs, row: jax.Array, slot: Any) -> Any:
    return pltpu.make_async_copy(refs.q.at[row], refs.q_buf.at[slot], refs.arrived.at[slot])


def _start_row(refs: Refs, shape: Shape, slot: jax.Array) -> None:
    """Spreads the queries of a row over tiles and forgets the row before."""
    for tile in range(shape.num_tiles):
        q = refs.q_buf[slot, tile]
        for t in range(shape.heads_per_tile):
            own = pick_rows({t: q}, shape.heads.queries, q.shape)
            head = tile * shape.heads_per_tile + t
            refs.queries[head] = own.astype(shape.compute)
        begin(refs, tile)
        if "sinks" in refs:
            refs.maxima[tile] = refs.sinks[tile]


def _attend_edge(refs: Refs, shape: Shape, slot: jax.Array, seen: Interval) -> None:
    """Folds in what is seen of an item, in parts: a short row is less work than a whole item."""
    blocks = shape.part_blocks
    tokens = blocks * shape.fetch.block_size

    def attend(part: Any, _: None) -> None:
        low = seen.low if isinstance(seen.low, int) else seen.low - part * tokens
        inside = Interval(low=low, high=seen.high - part * tokens, size=tokens)
        _attend(refs, shape, slot, part * blocks, blocks, inside)

    first = divide(jnp.maximum(seen.low, 0), tokens)
    end = divide_up(jnp.minimum(seen.high, seen.size), tokens)
    jax.lax.fori_loop(first, end, attend, None)


def _attend(
    refs: Refs, shape: Shape, slot: Any, first_block: Any, num_blocks: int, seen: Interval | None
) -> None:
    """Folds blocks of an item in: the keys that are seen, or all of them."""
    tokens = num_blocks * shape.fetch.block_size
    rows, width = shape.tile_rows, shape.heads.width
    hp, queries = shape.heads_per_tile, shape.heads.queries

    def load(pool_row):
        block = refs.kv_buf[slot, pl.ds(first_block, num_blocks), pool_row]
        return block.reshape(tokens, width).astype(shape.compute)

    def hide(x, axis, instead):
        """Replaces what belongs to keys along `axis` that are not seen."""
        if seen is None:
            return x
        key = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(seen.has(key), x, jnp.asarray(instead, x.dtype))

    def scale(tile, which):
        """[rows, tokens]: the factor of each row's head."""
        per_tile = hp * shape.heads.per_row
        last = shape.heads.num_kv_heads - 1
        heads = [min(tile * per_tile + i, last) for i in range(per_tile)]
        pool_rows = [2 * head + which for head in heads]
        blocks = [first_block + i for i in range(num_blocks)]
        return factor_rows(refs.scale_buf, slot, blocks, pool_rows, shape.heads.group, rows)

    # Phases, so that the products of one head overlap the softmax of no other: measured.
    logits = []
    for tile in range(shape.num_tiles):
        heads = range(tile * hp, (tile + 1) * hp)
        parts = [product(refs.queries[h], load(2 * h), transposed=True) for h in heads]
        s = functools.reduce(operator.add, parts)
        if "scales" in refs:
            s = s * scale(tile, 0)
        s = shape.options.cap(s * jnp.float32(shape.options.factor))
        logits.append(hide(s, 1, MASKED))
    weights, decays = [], []
    for tile, s in enumerate(logits):
        p, decay = fold(refs, tile, s)
        if "scales" in refs:
            # The scale of a dead slot may be NaN too.
            p = hide(p * scale(tile, 1), 1, 0.0)
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


def _finish_row(refs: Refs, shape: Shape, row: jax.Array) -> None:
    """Divides by the sum and sends the row off; two rows may be on their way."""
    count = refs.num_finished[0]
    slot = jax.lax.rem(count, 2)

    @pl.when(count >= 2)
    def _():
        for copy in _store_copies(refs, slot, 0):
            copy.wait()

    for tile in range(shape.num_tiles):
        refs.out_buf[slot, tile], lse = finish(refs, tile)
        if "lse" in refs:
            refs.lse_buf[slot, tile] = lse
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
