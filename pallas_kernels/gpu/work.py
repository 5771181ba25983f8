"""Work lists of the kernels, in jnp; they depend on lengths alone, so all layers share one.

Nothing here is a loop on the device: a step stays one CUDA graph.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeWork:
    """Ranges of keys, row after row; slot w is one program per KV head."""

    rows: jax.Array
    """i32[W]."""
    begins: jax.Array
    """i32[W], first key."""
    ends: jax.Array
    """i32[W], end of the keys; `begins` in slots that are not used."""
    offsets: jax.Array
    """i32[S+1], row r has the slots [offsets[r], offsets[r + 1])."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefillWork:
    """Tiles of query tokens, each of one row; they cover the packed axis, padding included."""

    rows: jax.Array
    """i32[W]."""
    begins: jax.Array
    """i32[W], first token."""
    ends: jax.Array
    """i32[W], end of the tokens; `begins` in slots that are not used."""
    positions: jax.Array
    """i32[W], position of the first token; such that no key is seen by tokens of no row."""


def decode_work(
    lens: jax.Array, unit: int, sliding_window: int | None, *, num_slots: int, align: int = 1
) -> DecodeWork:
    """Splits the keys that rows see into ranges of about the same length.

    Args:
      lens: i32[S], readable tokens per row; 0 for rows to leave out.
      unit: Keys that a program computes at once; ranges are whole units but for a row's last.
      sliding_window: Keys before the window are left out.
      num_slots: W, more than S: rows with keys take one slot each, the rest is for splits.
      align: Ranges but for a row's first begin at multiples of this, a divisor of `unit`.
    """
    num_rows = lens.shape[0]
    low = jnp.zeros_like(lens)
    if sliding_window is not None:
        low = jnp.maximum(lens - sliding_window, 0)
    start = low // align * align
    units = _divide_up(lens - start, unit)
    # With at most this many units a slot, ceil(units / most) of all rows fit: at most one a row is
    # not full.
    most = jnp.maximum(_divide_up(jnp.sum(units), num_slots - num_rows), 1)
    counts = _divide_up(units, most)
    size = _divide_up(units, jnp.maximum(counts, 1)) * unit  # a row's ranges are of one length
    row, offsets, index = _spread(counts, num_slots)
    begins = start[row] + index * size[row]
    is_used = jnp.arange(num_slots, dtype=jnp.int32) < offsets[-1]
    ends = jnp.minimum(begins + size[row], lens[row])
    begins = jnp.maximum(begins, low[row])
    return DecodeWork(
        rows=row,
        begins=jnp.where(is_used, begins, 0),
        ends=jnp.where(is_used, ends, 0),
        offsets=offsets,
    )


def prefill_work(
    lens: jax.Array,
    query_starts: jax.Array,
    first_row: jax.Array | int,
    num_rows: jax.Array | int,
    tile: int,
    *,
    num_tokens: int,
) -> PrefillWork:
    """Cuts the tokens of rows [first_row, num_rows) into tiles, and so those of none.

    Args:
      lens: i32[R], readable tokens per row, the new ones included.
      query_starts: i32[R+1], where each row's tokens begin on the packed axis.
      first_row: First row to compute.
      num_rows: End of the rows to compute.
      tile: Tokens per tile.
      num_tokens: T.
    """
    row = jnp.arange(lens.shape[0], dtype=jnp.int32)
    query_starts = jnp.minimum(query_starts, num_tokens)
    starts, ends = query_starts[:-1], query_starts[1:]
    is_own = (row >= first_row) & (row < num_rows)
    # The tokens in front of the rows and behind them are two rows more, without keys.
    before, after = query_starts[first_row], query_starts[jnp.maximum(num_rows, first_row)]
    begin = jnp.concatenate([jnp.zeros(1, jnp.int32), starts, after[None]])
    end = jnp.where(is_own, ends, starts)
    end = jnp.concatenate([before[None], end, jnp.full(1, num_tokens, jnp.int32)])
    tiles = _divide_up(jnp.maximum(end - begin, 0), tile)
    num_slots = -(-num_tokens // tile) + lens.shape[0] + 2
    which, offsets, index = _spread(tiles, num_slots)
    first = begin[which] + index * tile
    last = jnp.minimum(first + tile, end[which])
    is_used = jnp.arange(num_slots, dtype=jnp.int32) < offsets[-1]
    first, last = jnp.where(is_used, first, 0), jnp.where(is_used, last, 0)
    own = jnp.clip(which - 1, 0, lens.shape[0] - 1)
    is_row = (which > 0) & (which <= lens.shape[0])
    return PrefillWork(
        rows=own,
        begins=first,
        ends=last,
        positions=jnp.where(is_row, lens[own] - ends[own] + first, first - last),
    )


def _divide_up(a: jax.Array, b: jax.Array | int) -> jax.Array:
    return (a + (b - 1)) // b


def _spread(counts: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Slots one after another: (whose i32[W], offsets i32[n+1], index i32[W] among its own)."""
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    # Comparing all pairs is one small kernel; a binary search would be a loop.
    whose = jnp.sum(offsets[None, 1:] <= slot[:, None], axis=1, dtype=jnp.int32)
    whose = jnp.minimum(whose, counts.shape[0] - 1)
    return whose, offsets, slot - offsets[whose]
