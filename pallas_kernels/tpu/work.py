"""Work lists of the kernels, in jnp; they depend on lengths alone, so all layers share one."""

import jax
import jax.numpy as jnp

MAX_ITEM_BLOCKS = 1 << 16
"""An item is row * 2^16 + block."""


def decode_work(
    lens: jax.Array, tokens: int, sliding_window: int | None, *, max_items: int, num_cores: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Every block of keys that some row sees, row after row.

    Args:
      lens: i32[S], readable tokens per row; 0 for rows to leave out.
      tokens: Keys per item.
      sliding_window: Blocks that lie wholly before the window are left out.
      max_items: Length of the list.
      num_cores: Cores that share the list, split between rows.
    Returns: (items i32[max_items], row * 2^16 + block, zero past their number; bounds
      i32[num_cores + 1], core c works on [bounds[c], bounds[c + 1])).
    """
    last = (lens + tokens - 1) // tokens
    first = jnp.zeros_like(lens)
    if sliding_window is not None:
        first = jnp.maximum(lens - sliding_window, 0) // tokens
    items, ends = _spread(first, last - first, max_items)
    total = ends[-1]
    shares = [total * core // num_cores for core in range(1, num_cores)]
    inner = [jnp.max(jnp.where(ends <= share, ends, 0)) for share in shares]
    return items, jnp.stack([jnp.int32(0), *inner, total]).astype(jnp.int32)


def prefill_work(
    query_starts: jax.Array,
    first_row: jax.Array | int,
    num_rows: jax.Array | int,
    tile: int,
    *,
    max_items: int,
) -> tuple[jax.Array, jax.Array]:
    """Every pair of a row and a tile of the packed token axis that share a token.

    Args:
      query_starts: i32[R+1].
      first_row: Rows [first_row, num_rows) count.
      num_rows: See `first_row`.
      tile: Tokens per tile.
      max_items: Length of the list; T / tile + R are always enough.
    Returns: (items i32[max_items], row * 2^16 + tile, their number i32[]).
    """
    starts, ends = query_starts[:-1], query_starts[1:]
    row = jnp.arange(starts.shape[0], dtype=jnp.int32)
    has_token = (row >= first_row) & (row < num_rows) & (ends > starts)
    first = starts // tile
    items, ends = _spread(first, jnp.where(has_token, (ends - 1) // tile + 1 - first, 0), max_items)
    return items, ends[-1]


def row_of(item: jax.Array) -> jax.Array:
    """The row of an item."""
    return item >> 16


def block_of(item: jax.Array) -> jax.Array:
    """The block of keys, or tile of queries, of an item."""
    return item & (MAX_ITEM_BLOCKS - 1)


def _spread(first: jax.Array, counts: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Items (r, first[r]) ... (r, first[r] + counts[r] - 1) of all rows r, and where each ends."""
    rows = first.shape[0]
    if rows >= 1 << 15:
        raise NotImplementedError(f"{rows} rows; a work list holds at most 32767")
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    x = jnp.arange(size, dtype=jnp.int32)
    # Item x belongs to the first row that ends after x: count the rows that end at or before it.
    row = jnp.cumsum(jnp.zeros(size, jnp.int32).at[ends].add(1, mode="drop"), dtype=jnp.int32)
    row = jnp.minimum(row, rows - 1)
    block = x - (ends - counts)[row] + first[row]
    return jnp.where(x < ends[-1], row * MAX_ITEM_BLOCKS + block, 0), ends
