"""Room for new tokens: which blocks a call takes from the stack, and whether they are there."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from paged_jax.core.state import (
    FAULT_OUT_OF_RANGE,
    REASON_OUT_OF_BLOCKS,
    REASON_ROW_TOO_LONG,
    BlockState,
    per_row,
)
from paged_jax.shapes import ceil_div

_GROUP = 32  # of the prefix sum


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What `allocate` did, or why it did nothing."""

    ok: jax.Array  # bool[]
    reason: jax.Array  # i32[]: 0 none, 1 out of blocks, 2 row too long
    copy_src: jax.Array  # i32[S]; 0, 0 = no copy
    copy_dst: jax.Array  # i32[S]
    num_new: jax.Array  # i32[], blocks taken from the stack, copies included


def needed(state: BlockState, new_tokens: jax.Array) -> jax.Array:
    """Blocks that each row would take if all rows got `new_tokens` in one call.

    Args:
      new_tokens: i32[S], tokens to append per row; 0 for rows that take no part.
    Returns: i32[S], growth blocks plus one for a row that must copy the block it writes into.
    """
    new_tokens = _clip_tokens(state, per_row(state, new_tokens, "new_tokens"))
    return _growth(state, new_tokens) + _copies(state, new_tokens)[0].astype(jnp.int32)


def fit(state: BlockState, new_tokens: jax.Array) -> jax.Array:
    """Says which rows fit when blocks are given out in ascending row order while they last.

    A row that does not fit is passed over and the rows after it are still tried, so `allocate`
    succeeds for `jnp.where(fit(state, new_tokens), new_tokens, 0)`. A row that would grow past
    its table never fits.

    Args:
      new_tokens: i32[S].
    Returns: bool[S]; True for rows with `new_tokens` 0.
    """
    new_tokens = per_row(state, new_tokens, "new_tokens")
    short_enough = new_tokens <= _room(state)
    tokens = jnp.where(short_enough, _clip_tokens(state, new_tokens), 0)
    everything_fits = jnp.sum(needed(state, tokens), dtype=jnp.int32) <= state.num_free

    def one_by_one() -> jax.Array:
        # Copies of a block written by w of its c owners: min(w, c - 1), whichever rows they are.
        growth = _growth(state, tokens)
        writes, last = _written_blocks(state, tokens)

        def body(row, carry):
            fits, left = carry
            earlier = jnp.sum(fits & writes & (last == last[row]), dtype=jnp.int32)
            copies = writes[row] & (earlier < state.refcounts[last[row]] - 1)
            cost = growth[row] + copies.astype(jnp.int32)
            row_fits = cost <= left
            return fits.at[row].set(row_fits), left - jnp.where(row_fits, cost, 0)

        start = (jnp.zeros_like(short_enough), state.num_free)
        return jax.lax.fori_loop(0, state.max_seqs, body, start)[0]

    fits = jax.lax.cond(everything_fits, lambda: jnp.ones_like(short_enough), one_by_one)
    return fits & short_enough


def allocate(
    state: BlockState, new_tokens: jax.Array, *, max_new_blocks: int | None = None
) -> tuple[BlockState, Allocation]:
    """Makes room for `new_tokens` more tokens per row, for all rows or for none.

    Growth blocks are taken first, in ascending row and then logical order, then copy-on-write
    blocks in ascending row order, each from the top of the stack. A row writes into a block when
    it appends and its length is not a multiple of P. It copies that block when others own it too,
    except that when every owner is a row that writes into it in this call, the lowest keeps it.
    The caller copies `copy_src` to `copy_dst` (see `copy_blocks`) before it writes any KV.

    Args:
      new_tokens: i32[S], at least 0 (a negative count sets a fault bit and counts as 0).
      max_new_blocks: Most blocks this call may take; bounds its work. None: N.
    Returns: The next state and an `Allocation`. With `ok` False the state equals the given one.
    Raises: ValueError for another shape than [S] or a negative `max_new_blocks`.
    """
    if max_new_blocks is not None and max_new_blocks < 0:
        raise ValueError(f"max_new_blocks ({max_new_blocks}) must be at least 0")
    new_tokens = per_row(state, new_tokens, "new_tokens")
    num_blocks, size = state.num_blocks, state.block_size
    max_seqs = state.max_seqs
    bound = min(num_blocks, max_seqs * (state.max_blocks_per_seq + 1))
    bound = bound if max_new_blocks is None else min(max_new_blocks, bound)
    tokens = _clip_tokens(state, new_tokens)
    too_long = jnp.any(tokens > _room(state))
    copies, last = _copies(state, tokens)

    # One list of blocks to take, [growth of rows 0..S-1, copies of rows 0..S-1]; entry j of it
    # gets stack entry num_free - 1 - j.
    counts = jnp.concatenate([_growth(state, tokens), copies.astype(jnp.int32)])
    ends = _prefix_sum(counts)
    total = ends[-1]
    short = total > jnp.minimum(state.num_free, bound)
    ok = ~(too_long | short)
    reason = jnp.where(too_long, REASON_ROW_TOO_LONG, jnp.where(short, REASON_OUT_OF_BLOCKS, 0))
    taken = jnp.where(ok, total, 0)

    entry = jnp.arange(bound, dtype=jnp.int32)
    is_real = entry < taken
    # The row of the list that entry j belongs to: how many rows end at or before j.
    source = _prefix_sum(jnp.zeros(bound, jnp.int32).at[ends].add(1, mode="drop"))
    source = jnp.minimum(source, 2 * max_seqs - 1)
    row = source % max_seqs
    length = state.lengths[row]
    first = jnp.where(source < max_seqs, ceil_div(length, size), length // size)
    logical = first + entry - (ends - counts)[source]
    block, free_blocks = _pop(state, entry, taken)

    # Dropped updates carry an index past the end, never -1, which would wrap.
    out = num_blocks + 1
    is_copied = copies & ok
    copy_dst = block[jnp.minimum(ends[max_seqs:] - 1, bound - 1)] if bound else jnp.zeros_like(last)
    refcounts = state.refcounts.at[jnp.where(is_real, block, out)].add(1, mode="drop")
    allocation = Allocation(
        ok=ok,
        reason=reason.astype(jnp.int32),
        copy_src=jnp.where(is_copied, last, 0),
        copy_dst=jnp.where(is_copied, copy_dst, 0),
        num_new=taken,
    )
    state = dataclasses.replace(
        state,
        free_blocks=free_blocks,
        num_free=state.num_free - taken,
        refcounts=refcounts.at[jnp.where(is_copied, last, out)].add(-1, mode="drop"),
        block_tables=state.block_tables.at[jnp.where(is_real, row, max_seqs), logical].set(
            block, mode="drop"
        ),
        lengths=state.lengths + jnp.where(ok, tokens, 0),
        faults=state.faults | jnp.where(ok & jnp.any(new_tokens < 0), FAULT_OUT_OF_RANGE, 0),
    )
    return state, allocation


def _pop(state: BlockState, entry: jax.Array, taken: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The `taken` topmost ids, topmost first and zero-padded to entry's size; the stack left."""
    place = jnp.maximum(state.num_free - 1 - entry, 0)
    top = jnp.where(entry < taken, state.free_blocks[place], 0)
    # Cleared where an id was read, ids being above 0: a write that does not wait for the read
    # makes XLA copy the whole stack.
    place = jnp.where(top > 0, place, state.num_blocks + 1)
    return top, state.free_blocks.at[place].set(0, mode="drop")


def _prefix_sum(counts: jax.Array) -> jax.Array:
    """Inclusive sums by small triangles of sums: XLA:CPU's own scan is far slower."""
    size = counts.shape[0]
    if size <= _GROUP:
        return _triangle(counts[None, :])[0]
    within = _triangle(jnp.pad(counts, (0, -size % _GROUP)).reshape(-1, _GROUP))
    before = _prefix_sum(within[:, -1]) - within[:, -1]
    return (within + before[:, None]).reshape(-1)[:size]


def _triangle(values: jax.Array) -> jax.Array:
    """Inclusive sums over the last axis of [A, B] in B x B additions."""
    is_before = jnp.tri(values.shape[1], dtype=bool)
    return jnp.sum(jnp.where(is_before[None], values[:, None, :], 0), axis=-1, dtype=jnp.int32)


def _room(state: BlockState) -> jax.Array:
    """i32[S], tokens that each row can still take."""
    return state.max_blocks_per_seq * state.block_size - state.lengths


def _clip_tokens(state: BlockState, new_tokens: jax.Array) -> jax.Array:
    # Clipped so that sums cannot overflow; allocate refuses a row that is too long anyway.
    return jnp.clip(new_tokens, 0, _room(state) + 1).astype(jnp.int32)


def _growth(state: BlockState, new_tokens: jax.Array) -> jax.Array:
    size = state.block_size
    return ceil_div(state.lengths + new_tokens, size) - ceil_div(state.lengths, size)


def _written_blocks(state: BlockState, new_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[S] rows that write into a block they already hold, i32[S] that block (else 0)."""
    writes = (new_tokens > 0) & (state.lengths % state.block_size != 0)
    logical = jnp.where(writes, state.lengths // state.block_size, 0)
    last = state.block_tables[jnp.arange(state.max_seqs), logical]
    return writes, jnp.where(writes, last, 0)


def _copies(state: BlockState, new_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[S] rows that must copy the block they write into, i32[S] that block (else 0)."""
    writes, last = _written_blocks(state, new_tokens)
    owners = state.refcounts[last]
    is_shared = writes & (owners > 1)

    def compare() -> jax.Array:
        # Rows that write nothing have block 0 here, and no row writes into block 0.
        row = jnp.arange(state.max_seqs)
        same = last[:, None] == last[None, :]
        writers = jnp.sum(same, axis=1, dtype=jnp.int32)
        is_lowest = ~jnp.any(same & (row[None, :] < row[:, None]), axis=1)
        return is_shared & ~((owners == writers) & is_lowest)

    # The S x S comparison costs more than the rest of `allocate` and most calls share nothing.
    return jax.lax.cond(jnp.any(is_shared), compare, lambda: is_shared), last
