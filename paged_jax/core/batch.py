"""The tokens of one step on one packed axis, and where each of them reads and writes.

t            0   1   2 | 3   4   5   6 | 7   8   9 | 10  11
             decode    | prefill row   | prefill   | padding
row index    0   1   2 | 3             | 4         |
num_decode = 3, num_rows = 5, query_starts = [0 1 2 3 7 10 10 ...]
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from paged_jax.core.state import BlockState, as_i32, count_to_last, slot_mapping


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a model needs to know about the tokens of a step; T and R are bucket sizes.

    Decode rows come first and have one token each, so token i belongs to decode row i; prefill
    rows follow, then padding. How many there are is data and compiles nothing new.
    """

    tokens: jax.Array  # i32[T], 0 in padding
    positions: jax.Array  # i32[T], absolute; 0 in padding
    rows: jax.Array  # i32[T], row of the BlockState; S in padding
    slots: jax.Array  # i32[T], where KV is written; 0 in padding
    row_ids: jax.Array  # i32[R], row of the BlockState; S in padding
    query_starts: jax.Array  # i32[R+1], prefix sum of new tokens
    context_lens: jax.Array  # i32[R], tokens readable after this step's write; 0 in padding
    num_decode: jax.Array  # i32[]
    num_rows: jax.Array  # i32[], one past the last row that is not padding
    is_decode_only: bool = jax.tree.static(default=False)
    """Every row has one token and counts as decode: the program has no prefill attention."""

    @property
    def last_tokens(self) -> jax.Array:
        """i32[R], index on the token axis of each row's last token; 0 in padding."""
        has_token = self.query_starts[1:] > self.query_starts[:-1]
        return jnp.where(has_token, self.query_starts[1:] - 1, 0)


def make_batch(
    blocks: BlockState,
    *,
    tokens: ArrayLike,
    row_ids: ArrayLike,
    query_lens: ArrayLike,
    num_decode: ArrayLike | None = None,
) -> Batch:
    """Lays out a step whose blocks are already allocated.

    The new tokens of a row are the last `query_lens` of its length, so positions and slots follow
    from the block state alone.

    Args:
      blocks: State after `allocate`.
      tokens: i32[T], packed: decode tokens, prefill tokens row after row, padding.
      row_ids: i32[R], rows of the state, decode rows first; S is padding, which may stand anywhere
        but before a decode row when `num_decode` is given.
      query_lens: i32[R], new tokens per row; 1 for decode rows, 0 for padding.
      num_decode: Leading rows that decode; None: all, which compiles no prefill attention. Then T
        must be R.
    Raises: ValueError when `query_lens` and `row_ids` differ in length, or `num_decode` is None and
      T is not R.
    """
    tokens, row_ids = as_i32(tokens, "tokens"), as_i32(row_ids, "row_ids")
    query_lens = as_i32(query_lens, "query_lens")
    if query_lens.shape != row_ids.shape:
        raise ValueError(
            f"query_lens {query_lens.shape} must be as many as row_ids {row_ids.shape}"
        )
    is_decode_only = num_decode is None
    if is_decode_only and tokens.shape != row_ids.shape:
        raise ValueError(
            f"tokens ({tokens.shape[0]}) must be as many as row_ids ({row_ids.shape[0]}) "
            "when every row decodes"
        )
    max_seqs = blocks.max_seqs
    is_row = (row_ids >= 0) & (row_ids < max_seqs)
    row_ids = jnp.where(is_row, row_ids, max_seqs)
    query_lens = jnp.where(is_row, query_lens, 0)
    context_lens = jnp.where(is_row, blocks.lengths[jnp.where(is_row, row_ids, 0)], 0)
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    if is_decode_only:
        # Token i is row i, wherever padding stands.
        starts = jnp.arange(tokens.shape[0] + 1, dtype=jnp.int32)
        owner, is_real = index, query_lens > 0
        context_lens = jnp.where(is_real, context_lens, 0)
    else:
        ends = jnp.cumsum(query_lens, dtype=jnp.int32)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        is_real = index < starts[-1]
        owner = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        owner = jnp.where(is_real, owner, 0)
    num_rows = count_to_last(is_row)
    first = context_lens - query_lens
    positions = jnp.where(is_real, first[owner] + index - starts[owner], 0)
    rows = jnp.where(is_real, row_ids[owner], max_seqs)
    return Batch(
        tokens=jnp.where(is_real, tokens, 0),
        positions=positions,
        rows=rows,
        slots=slot_mapping(blocks, rows, positions),
        row_ids=row_ids,
        query_starts=starts,
        context_lens=context_lens,
        num_decode=num_rows if num_decode is None else jnp.asarray(num_decode, jnp.int32),
        num_rows=num_rows,
        is_decode_only=is_decode_only,
    )


def make_decode_batch(
    blocks: BlockState,
    *,
    tokens: jax.Array,
    positions: jax.Array,
    runs: jax.Array,
    row_ids: jax.Array | None = None,
) -> Batch:
    """Lays out one decode token for each row: token i is of row `row_ids[i]`.

    Args:
      blocks: Rows that run have room for their token.
      tokens: i32[R].
      positions: i32[R], of the tokens; a row may hold room for more after it.
      runs: bool[R]; the other rows read nothing and write to the null block.
      row_ids: i32[R], rows of the state, S in padding; None: all S rows in order.
    """
    max_seqs = blocks.max_seqs
    if row_ids is None:
        row_ids = jnp.arange(max_seqs, dtype=jnp.int32)
    count = row_ids.shape[0]
    rows = jnp.where(runs, row_ids, max_seqs)
    positions = jnp.where(runs, positions, 0)
    num_rows = count_to_last(rows < max_seqs)
    return Batch(
        tokens=jnp.where(runs, tokens, 0),
        positions=positions,
        rows=rows,
        slots=slot_mapping(blocks, rows, positions),
        row_ids=rows,
        query_starts=jnp.arange(count + 1, dtype=jnp.int32),
        context_lens=jnp.where(runs, positions + 1, 0),
        num_decode=num_rows,
        num_rows=num_rows,
        is_decode_only=True,
    )
