"""Rows that end, shrink, share and change places, and owners that are not rows."""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax.core.state import (
    FAULT_FREE_BLOCK,
    FAULT_OCCUPIED,
    FAULT_OUT_OF_RANGE,
    FAULT_REPEATED,
    BlockState,
    as_i32,
    as_lists,
    count_to_last,
    per_row,
)
from paged_jax.shapes import ceil_div

_RELEASE_CHUNK = 128
"""Blocks released at a time: a short row in a wide table pays for its own blocks."""


def free(state: BlockState, rows: jax.Array) -> BlockState:
    """Drops rows; blocks whose count reaches 0 go back to the stack.

    Freed ids are pushed in ascending row, then ascending logical order.

    Args:
      rows: bool[S], True for rows to drop; empty rows may be named.
    Raises: ValueError for anything but bool[S]: ids would name other rows than they say.
    """
    rows = jnp.asarray(rows)
    if rows.dtype != bool or rows.shape != (state.max_seqs,):
        raise ValueError(f"rows must be bool[{state.max_seqs}], not {rows.dtype}{rows.shape}")
    return _shorten(state, jnp.where(rows, 0, state.lengths))


def truncate(state: BlockState, lengths: jax.Array) -> BlockState:
    """Shortens rows to `lengths` where that is less than now; emptied blocks are released.

    Args:
      lengths: i32[S], tokens to keep per row (a negative one sets a fault bit and is ignored).
    """
    lengths = per_row(state, lengths, "lengths")
    is_valid = lengths >= 0
    state = _fault(state, jnp.where(jnp.all(is_valid), 0, FAULT_OUT_OF_RANGE))
    kept = jnp.minimum(lengths, state.lengths)
    return _shorten(state, jnp.where(is_valid, kept, state.lengths))


def fork(state: BlockState, parents: jax.Array, children: jax.Array) -> BlockState:
    """Lets each child, an empty row, share all blocks of its parent.

    Pairs are applied in order, so a child may be the parent of a later pair. Faults: a row out of
    range, a child that holds tokens.

    Args:
      parents: i32[F], rows to share from; S is padding.
      children: i32[F], empty rows; S is padding.
    """
    max_seqs = state.max_seqs
    parents, children = as_lists(parents=parents, children=children)
    if not parents.shape[0]:
        return state

    def body(i, state: BlockState) -> BlockState:
        parent, child = parents[i], children[i]
        is_padding = (parent == max_seqs) | (child == max_seqs)
        is_valid = (parent >= 0) & (parent < max_seqs)
        source = jnp.where(is_valid, parent, 0)
        fault = jnp.where(is_valid, 0, FAULT_OUT_OF_RANGE)
        row = jnp.where(is_padding, max_seqs, child)
        return _adopt(state, row, state.block_tables[source], state.lengths[source], fault)

    is_padding = (parents == max_seqs) | (children == max_seqs)
    return jax.lax.fori_loop(0, count_to_last(~is_padding), body, state)


def share(
    state: BlockState, rows: jax.Array, block_ids: jax.Array, num_tokens: jax.Array
) -> BlockState:
    """Lets empty rows adopt blocks that others own, as the prefix cache hands them out.

    Faults: a row or block out of range, more tokens than a row holds, a row that holds tokens, a
    block that nobody owns, a block named twice for one row.

    Args:
      rows: i32[F], empty rows; S is padding.
      block_ids: i32[F, M], blocks in logical order; those past `ceil(num_tokens / P)` are ignored.
      num_tokens: i32[F], tokens that each row holds then.
    Raises: ValueError when `block_ids` is not [F, M].
    """
    size, width = state.block_size, state.max_blocks_per_seq
    rows, num_tokens = as_lists(rows=rows, num_tokens=num_tokens)
    block_ids = as_i32(block_ids, "block_ids")
    if block_ids.shape != (rows.shape[0], width):
        raise ValueError(f"block_ids {block_ids.shape} must have shape {(rows.shape[0], width)}")
    if not rows.shape[0]:
        return state
    logical = jnp.arange(width, dtype=jnp.int32)

    def body(i, state: BlockState) -> BlockState:
        length = num_tokens[i]
        used = logical < ceil_div(length, size)
        ids = jnp.where(used, block_ids[i], 0)
        in_range = (ids > 0) & (ids <= state.num_blocks)
        is_owned = state.refcounts[jnp.where(in_range, ids, 0)] > 0
        is_valid = jnp.all(in_range | ~used) & (length >= 0) & (length <= width * size)
        in_order = jnp.sort(ids)
        is_repeated = jnp.any((in_order[1:] == in_order[:-1]) & (in_order[1:] > 0))
        fault = jnp.where(jnp.all(is_owned | ~used), 0, FAULT_FREE_BLOCK)
        fault |= jnp.where(is_repeated, FAULT_REPEATED, 0)
        fault = jnp.where(is_valid, fault, FAULT_OUT_OF_RANGE)
        return _adopt(state, rows[i], ids, length, fault)

    return jax.lax.fori_loop(0, count_to_last(rows != state.max_seqs), body, state)


def reindex(state: BlockState, rows: jax.Array, sources: jax.Array) -> BlockState:
    """Gives each row the table that `sources` had before the call, as beam search reorders beams.

    Permutations and repeated sources are allowed; a row and its source may be the same. Blocks that
    nobody holds any more are freed in the order of `free`. Faults: a row or source out of range, a
    row named twice (its first entry counts).

    Args:
      rows: i32[F], rows to replace; S is padding.
      sources: i32[F], rows to take the table and length of; S is padding.
    """
    rows, sources = as_lists(rows=rows, sources=sources)
    if not rows.shape[0]:
        return state
    max_seqs = state.max_seqs
    is_padding = (rows == max_seqs) | (sources == max_seqs)
    in_range = (rows >= 0) & (rows < max_seqs) & (sources >= 0) & (sources < max_seqs)
    index = jnp.arange(rows.shape[0])
    earlier = (rows[None, :] == rows[:, None]) & (index[None, :] < index[:, None])
    is_repeated = jnp.any(earlier & (in_range & ~is_padding)[None, :], axis=1)
    wrong = jnp.where(in_range, jnp.where(is_repeated, FAULT_REPEATED, 0), FAULT_OUT_OF_RANGE)
    state = _fault(state, _union(jnp.where(is_padding, 0, wrong)))
    moves = in_range & ~is_padding & ~is_repeated & (rows != sources)
    row, source = jnp.where(moves, rows, max_seqs), jnp.where(moves, sources, 0)

    ids, lengths = state.block_tables[source], state.lengths[source]
    # All new references are taken before any old one is dropped, so that no block that is
    # still wanted passes through 0.
    out = state.num_blocks + 1
    order = jnp.nonzero(moves, size=rows.shape[0], fill_value=0)[0]

    def retain_row(i, refcounts):
        held = ids[order[i]]
        return refcounts.at[jnp.where(held > 0, held, out)].add(1, mode="drop")

    total = jnp.sum(moves, dtype=jnp.int32)
    refcounts = jax.lax.fori_loop(0, total, retain_row, state.refcounts)
    dropped = jnp.zeros(max_seqs, bool).at[row].set(True, mode="drop")
    emptied = free(dataclasses.replace(state, refcounts=refcounts), dropped)

    def fill_row(i, block_tables):
        return block_tables.at[row[order[i]]].set(ids[order[i]], mode="drop")

    return dataclasses.replace(
        emptied,
        block_tables=jax.lax.fori_loop(0, total, fill_row, emptied.block_tables),
        lengths=emptied.lengths.at[row].set(lengths, mode="drop"),
    )


def retain(state: BlockState, block_ids: jax.Array) -> BlockState:
    """Adds an owner that is not a row to each block, such as the prefix cache.

    Faults: a block out of range, a block that nobody owns.

    Args:
      block_ids: i32[B]; 0 is padding. An id named twice gains two owners.
    """
    ids, is_named, fault = _named_blocks(state, block_ids)
    is_owned = state.refcounts[ids] > 0
    fault |= jnp.where(jnp.any(is_named & ~is_owned), FAULT_FREE_BLOCK, 0)
    target = jnp.where(is_named & is_owned, ids, state.num_blocks + 1)
    state = _fault(state, fault)
    return dataclasses.replace(state, refcounts=state.refcounts.at[target].add(1, mode="drop"))


def release(state: BlockState, block_ids: jax.Array) -> BlockState:
    """Takes back what `retain` gave; blocks whose count reaches 0 are pushed in the given order.

    Faults: a block out of range, a block that nobody owns (so many times).

    Args:
      block_ids: i32[B]; 0 is padding. An id named twice loses two owners.
    """
    ids, is_named, fault = _named_blocks(state, block_ids)
    # Which naming of its block an entry is, from 1: its place among equal ids in stable order.
    order = jnp.argsort(ids, stable=True)
    in_order = ids[order]
    first = jnp.searchsorted(in_order, in_order, side="left").astype(jnp.int32)
    place = jnp.arange(ids.shape[0], dtype=jnp.int32) - first
    naming = jnp.zeros_like(ids).at[order].set(place) + 1
    count = state.refcounts[ids]
    fault |= jnp.where(jnp.any(is_named & (naming > count)), FAULT_FREE_BLOCK, 0)
    is_released = is_named & (naming <= count)
    is_freed = is_released & (naming == count)
    out = state.num_blocks + 1
    rank = jnp.cumsum(is_freed, dtype=jnp.int32)
    place = jnp.where(is_freed, state.num_free + rank - 1, out)
    state = _fault(state, fault)
    return dataclasses.replace(
        state,
        refcounts=state.refcounts.at[jnp.where(is_released, ids, out)].add(-1, mode="drop"),
        free_blocks=state.free_blocks.at[place].set(ids, mode="drop"),
        num_free=state.num_free + jnp.sum(is_freed, dtype=jnp.int32),
    )


def _fault(state: BlockState, bits: jax.Array) -> BlockState:
    return dataclasses.replace(state, faults=state.faults | bits.astype(jnp.int32))


def _union(bits: jax.Array) -> jax.Array:
    """i32[], all bits of i32[F]."""
    return jax.lax.reduce(bits.astype(jnp.int32), jnp.int32(0), jax.lax.bitwise_or, (0,))


def _named_blocks(
    state: BlockState, block_ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """i32[B] ids with 0 for what is not one, bool[B] which are, i32[] fault bits."""
    (block_ids,) = as_lists(block_ids=block_ids)
    in_range = (block_ids > 0) & (block_ids <= state.num_blocks)
    fault = jnp.where(jnp.any(~in_range & (block_ids != 0)), FAULT_OUT_OF_RANGE, 0)
    return jnp.where(in_range, block_ids, 0), in_range, fault


def _adopt(
    state: BlockState, row: jax.Array, ids: jax.Array, length: jax.Array, fault: jax.Array
) -> BlockState:
    """Gives blocks ids[M] to one empty row unless `fault` is set; row S is padding."""
    max_seqs, out = state.max_seqs, state.num_blocks + 1
    in_range = (row >= 0) & (row < max_seqs)
    is_empty = state.lengths[jnp.where(in_range, row, 0)] == 0
    fault |= jnp.where(in_range, jnp.where(is_empty, 0, FAULT_OCCUPIED), FAULT_OUT_OF_RANGE)
    fault = jnp.where(row == max_seqs, 0, fault)
    go = in_range & (fault == 0)
    target = jnp.where(go, row, max_seqs)
    state = _fault(state, fault)
    block_tables = state.block_tables.at[target].set(ids, mode="drop")
    # Read back from the row just written: ids may come from another row, and XLA copies the tables
    # when that one is read at two places.
    held = block_tables[jnp.where(go, row, 0)]
    return dataclasses.replace(
        state,
        refcounts=state.refcounts.at[jnp.where(go & (held > 0), held, out)].add(1, mode="drop"),
        block_tables=block_tables,
        lengths=state.lengths.at[target].set(length, mode="drop"),
    )


def _shorten(state: BlockState, lengths: jax.Array) -> BlockState:
    """Sets lengths[S] (none above the present one) and releases the blocks past them."""
    held = ceil_div(state.lengths, state.block_size)
    chunk = min(_RELEASE_CHUNK, state.max_blocks_per_seq)
    out = state.num_blocks + 1

    def chunk_at(row: jax.Array, begin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logical blocks [chunk] of a row from `begin`, and which of them it holds."""
        first = jnp.minimum(begin, state.max_blocks_per_seq - chunk)
        logical = first + jnp.arange(chunk, dtype=jnp.int32)
        return logical, (logical >= begin) & (logical < held[row])

    def release_chunk(carry):
        next_block, free_blocks, num_free, refcounts = carry
        row = jnp.argmax(next_block < held)  # the lowest with blocks to release
        logical, dropped = chunk_at(row, next_block[row])
        ids = jnp.where(dropped, state.block_tables[row, logical], 0)
        refcounts = refcounts.at[jnp.where(dropped, ids, out)].add(-1, mode="drop")
        freed = dropped & (refcounts[ids] == 0)
        rank = jnp.cumsum(freed, dtype=jnp.int32)
        place = jnp.where(freed, num_free + rank - 1, out)
        free_blocks = free_blocks.at[place].set(ids, mode="drop")
        return next_block.at[row].add(chunk), free_blocks, num_free + rank[-1], refcounts

    def clear_chunk(carry):
        next_block, block_tables = carry
        row = jnp.argmax(next_block > keep)
        logical, dropped = chunk_at(row, next_block[row] - chunk)
        target = jnp.where(dropped, logical, state.max_blocks_per_seq)
        block_tables = block_tables.at[row, target].set(0, mode="drop")
        return next_block.at[row].add(-chunk), block_tables

    def has_more(carry):
        return jnp.any(carry[0] < held)

    keep = ceil_div(lengths, state.block_size)
    carry = (keep, state.free_blocks, state.num_free, state.refcounts)
    end, free_blocks, num_free, refcounts = jax.lax.while_loop(has_more, release_chunk, carry)
    # A loop of its own: one that reads and writes the tables copies all of them at every turn. It
    # goes backwards from where the first ended, since XLA copies them once if it need not wait.
    carry = (end, state.block_tables)
    _, block_tables = jax.lax.while_loop(lambda carry: jnp.any(carry[0] > keep), clear_chunk, carry)
    return dataclasses.replace(
        state,
        free_blocks=free_blocks,
        num_free=num_free,
        refcounts=refcounts,
        block_tables=block_tables,
        lengths=lengths,
    )
