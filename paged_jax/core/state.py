"""Block tables, reference counts and the free stack as one immutable value.

Every transition takes a `BlockState` and returns the next one; all of them run under `jit` and
are vectorised over rows. The order in which blocks are handed out and taken back is part of the
contract: `paged_jax.ledger` repeats it on the host and must reach the same ids. An entry that
breaks a rule sets a sticky bit in `faults` and is ignored; `paged_jax.core.checked` raises instead.

    free_blocks  [ N  N-1 ... 7  4 | 0  0  0 ]     a stack; entries at and above num_free are 0
                              top ^  ^ num_free
    block_tables [ 5  2  9  0  0 ]                 row: physical block of each logical block
    lengths      10 with P = 4                     blocks 5 and 2 are full, 9 holds two tokens

Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention", section 4.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Values = ArrayLike | Sequence[int] | Sequence[Sequence[int]]
"""Integers, as an array of any kind or as lists."""

FAULT_OUT_OF_RANGE = 1
"""A row, block, length or count outside its range."""
FAULT_OCCUPIED = 2
"""A fork or share onto a row that holds tokens."""
FAULT_FREE_BLOCK = 4
"""A share, retain or release of a block that nobody owns."""
FAULT_REPEATED = 8
"""A reindex that names a row twice, or a share that names a block twice for one row."""

REASON_OUT_OF_BLOCKS = 1
REASON_ROW_TOO_LONG = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockState:
    """Who owns which physical block. Block 0 is the null block and never handed out."""

    free_blocks: jax.Array  # i32[N+1], a stack
    num_free: jax.Array  # i32[]
    refcounts: jax.Array  # i32[N+1]
    block_tables: jax.Array  # i32[S, M]; 0 past the end of a row
    lengths: jax.Array  # i32[S], tokens per row
    faults: jax.Array  # i32[], sticky FAULT_* bits
    block_size: int = jax.tree.static()

    @property
    def num_blocks(self) -> int:
        """Usable blocks N, the null block not counted."""
        return self.free_blocks.shape[-1] - 1

    @property
    def max_seqs(self) -> int:
        """Rows S."""
        return self.block_tables.shape[-2]

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks per table row M."""
        return self.block_tables.shape[-1]


def create_block_state(
    num_blocks: int, block_size: int, max_seqs: int, max_blocks_per_seq: int
) -> BlockState:
    """Returns a state in which every block is free; block 1 is handed out first.

    Args:
      num_blocks: Usable blocks N; arrays hold one more, the null block.
      block_size: Token positions per block P.
      max_seqs: Rows S.
      max_blocks_per_seq: Blocks per table row M.
    Raises: ValueError for a size below 1; TypeError for one that is no integer.
    """
    sizes = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_seqs": max_seqs,
        "max_blocks_per_seq": max_blocks_per_seq,
    }
    for name, size in sizes.items():
        operator.index(size)
        if size < 1:
            raise ValueError(f"{name} ({size}) must be at least 1")
    return BlockState(
        free_blocks=jnp.arange(num_blocks, -1, -1, dtype=jnp.int32),
        num_free=jnp.int32(num_blocks),
        refcounts=jnp.zeros(num_blocks + 1, jnp.int32),
        block_tables=jnp.zeros((max_seqs, max_blocks_per_seq), jnp.int32),
        lengths=jnp.zeros(max_seqs, jnp.int32),
        faults=jnp.int32(0),
        block_size=block_size,
    )


def translate(
    state: BlockState, row: ArrayLike, position: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Logical to physical: the block that holds a position of a row, and the offset in it.

    `block = block_tables[row, position // P]`, `offset = position % P`. Arguments broadcast.

    Returns: (block, offset), i32; block 0 for a logical block that the row does not hold.
    """
    size, width = state.block_size, state.max_blocks_per_seq
    row, position = as_i32(row, "row"), as_i32(position, "position")
    logical = position // size
    is_valid = (row >= 0) & (row < state.max_seqs) & (logical >= 0) & (logical < width)
    block = state.block_tables[jnp.where(is_valid, row, 0), jnp.where(is_valid, logical, 0)]
    return jnp.where(is_valid, block, 0), position % size


def slot_mapping(state: BlockState, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Slots `block * P + offset` to write new tokens to.

    Args:
      rows: i32[T]; S is padding.
      positions: i32[T], absolute positions.
    Returns: i32[T]; slot 0 (in the null block) for padding and for positions at or past the
      length of the row, so that no such write can touch a live block.
    """
    rows, positions = as_i32(rows, "rows"), as_i32(positions, "positions")
    block, offset = translate(state, rows, positions)
    is_row = (rows >= 0) & (rows < state.max_seqs)
    length = jnp.where(is_row, state.lengths[jnp.where(is_row, rows, 0)], 0)
    is_live = (positions >= 0) & (positions < length)
    return jnp.where(is_live, block * state.block_size + offset, 0)


def as_i32(values: Values, name: str) -> jax.Array:
    """Integers of any width as i32, saturating: a wide one must not wrap into the valid range.

    Raises: ValueError when they are no integers.
    """
    limits = jnp.iinfo(jnp.int32)
    if not isinstance(values, jax.Array):
        host = np.asarray(values)
        if host.size and not np.issubdtype(host.dtype, np.integer):
            raise ValueError(f"{name} must be integers, not {host.dtype}")
        return jnp.asarray(np.clip(host, limits.min, limits.max).astype(np.int32))
    if values.dtype == jnp.int32:
        return values
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, not {values.dtype}")
    if values.dtype.itemsize < 4:
        return values.astype(jnp.int32)
    lowest = max(limits.min, jnp.iinfo(values.dtype).min)
    return jnp.clip(values, lowest, limits.max).astype(jnp.int32)


def per_row(state: BlockState, values: Values, name: str) -> jax.Array:
    """i32[S] from integers; ValueError for another shape."""
    array = as_i32(values, name)
    if array.shape != (state.max_seqs,):
        raise ValueError(
            f"{name} must have one entry per row ({state.max_seqs}), not {array.shape}"
        )
    return array


def as_lists(**lists: Values) -> tuple[jax.Array, ...]:
    """i32[F] lists of equal length; ValueError for others."""
    arrays = tuple(as_i32(values, name) for name, values in lists.items())
    shapes = {name: array.shape for name, array in zip(lists, arrays, strict=True)}
    if len(set(shapes.values())) > 1 or any(array.ndim != 1 for array in arrays):
        raise ValueError(f"lists must have one dimension and equal length, not {shapes}")
    return arrays


def count_to_last(is_real: jax.Array) -> jax.Array:
    """i32[], one past the last real entry of bool[F]: padding at the end costs nothing."""
    index = jnp.arange(1, is_real.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(is_real, index, 0), initial=0)
