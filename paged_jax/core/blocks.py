"""Block tables, reference counts and the free stack as one immutable value.

Every transition takes a `BlockState` and returns the next one; all of them run under `jit` and
are vectorised over rows. The order in which blocks are handed out and taken back is part of the
contract: `paged_jax.ledger` repeats it on the host and must reach the same ids.

    free_blocks  [ N  N-1 ... 7  4 | 0  0  0 ]     a stack; entries at and above num_free are 0
                              top ^  ^ num_free
    block_tables [ 5  2  9  0  0 ]                 row: physical block of each logical block
    lengths      10 with P = 4                     blocks 5 and 2 are full, 9 holds two tokens

Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention", section 4.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from paged_jax.shapes import ceil_div

FAULT_OUT_OF_RANGE = 1
"""A row, block or count outside its range; the entry was ignored."""
FAULT_OCCUPIED = 2
"""A fork onto a row that holds tokens; the entry was ignored."""

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What `allocate` did, or why it did nothing."""

    ok: jax.Array  # bool[]
    reason: jax.Array  # i32[]: 0 none, 1 out of blocks, 2 row too long
    copy_src: jax.Array  # i32[S]; 0, 0 = no copy
    copy_dst: jax.Array  # i32[S]
    num_new: jax.Array  # i32[], blocks taken from the stack, copies included


def create_block_state(
    num_blocks: int, block_size: int, max_seqs: int, max_blocks_per_seq: int
) -> BlockState:
    """Returns a state in which every block is free; block 1 is handed out first.

    Args:
      num_blocks: Usable blocks N; arrays hold one more, the null block.
      block_size: Token positions per block P.
      max_seqs: Rows S.
      max_blocks_per_seq: Blocks per table row M.
    Raises: ValueError for a size below 1.
    """
    sizes = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_seqs": max_seqs,
        "max_blocks_per_seq": max_blocks_per_seq,
    }
    for name, size in sizes.items():
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


def needed(state: BlockState, new_tokens: jax.Array) -> jax.Array:
    """Blocks that each row would take if all rows got `new_tokens` in one call.

    Args:
      new_tokens: i32[S], tokens to append per row; 0 for rows that take no part.
    Returns: i32[S], growth blocks plus one for a row that must copy the block it writes into.
    """
    new_tokens = _clip_tokens(state, new_tokens)
    return _growth(state, new_tokens) + _copies(state, new_tokens).astype(jnp.int32)


def fit(state: BlockState, new_tokens: jax.Array) -> jax.Array:
    """Says which rows fit when blocks are given out in ascending row order while they last.

    A row that does not fit is passed over and the rows after it are still tried, so `allocate`
    succeeds for `jnp.where(fit(state, new_tokens), new_tokens, 0)`. A row that would grow past
    its table never fits.

    Args:
      new_tokens: i32[S].
    Returns: bool[S]; True for rows with `new_tokens` 0.
    """
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
    """
    num_blocks, size = state.num_blocks, state.block_size
    max_seqs = state.max_seqs
    bound = num_blocks if max_new_blocks is None else min(max_new_blocks, num_blocks)
    too_long = jnp.any(new_tokens > _room(state))
    tokens = _clip_tokens(state, new_tokens)

    # One list of blocks to take, [growth of rows 0..S-1, copies of rows 0..S-1]; entry j of it
    # gets stack entry num_free - 1 - j.
    counts = jnp.concatenate([_growth(state, tokens), _copies(state, tokens).astype(jnp.int32)])
    # Sums over small triangles: XLA compiles and runs them faster than scans of this size.
    is_before = jnp.tri(counts.shape[0], dtype=bool)
    ends = jnp.sum(jnp.where(is_before, counts[None, :], 0), axis=1, dtype=jnp.int32)
    total = ends[-1]
    short = total > jnp.minimum(state.num_free, bound)
    ok = ~(too_long | short)
    reason = jnp.where(too_long, REASON_ROW_TOO_LONG, jnp.where(short, REASON_OUT_OF_BLOCKS, 0))
    taken = jnp.where(ok, total, 0)

    entry = jnp.arange(bound, dtype=jnp.int32)
    is_real = entry < taken
    source = jnp.sum(ends[None, :] <= entry[:, None], axis=1, dtype=jnp.int32)
    source = jnp.minimum(source, 2 * max_seqs - 1)
    is_copy = is_real & (source >= max_seqs)
    row = source % max_seqs
    offset = entry - (ends - counts)[source]
    length = state.lengths[row]
    logical = jnp.where(is_copy, length // size, ceil_div(length, size) + offset)
    logical = jnp.where(is_real, logical, 0)
    stack_index = state.num_free - 1 - entry
    block = state.free_blocks[jnp.where(is_real, stack_index, 0)]
    shared = state.block_tables[row, logical]

    # Dropped updates carry an index past the end, never -1, which would wrap.
    refcounts = state.refcounts.at[jnp.where(is_real, block, num_blocks + 1)].set(1, mode="drop")
    refcounts = refcounts.at[jnp.where(is_copy, shared, num_blocks + 1)].add(-1, mode="drop")
    copy_row = jnp.where(is_copy, row, max_seqs)
    no_copy = jnp.zeros(max_seqs, jnp.int32)
    allocation = Allocation(
        ok=ok,
        reason=reason.astype(jnp.int32),
        copy_src=no_copy.at[copy_row].set(shared, mode="drop"),
        copy_dst=no_copy.at[copy_row].set(block, mode="drop"),
        num_new=taken,
    )
    state = dataclasses.replace(
        state,
        free_blocks=state.free_blocks.at[jnp.where(is_real, stack_index, num_blocks + 1)].set(
            0, mode="drop"
        ),
        num_free=state.num_free - taken,
        refcounts=refcounts,
        block_tables=state.block_tables.at[jnp.where(is_real, row, max_seqs), logical].set(
            block, mode="drop"
        ),
        lengths=state.lengths + jnp.where(ok, tokens, 0),
        faults=state.faults | jnp.where(jnp.any(new_tokens < 0), FAULT_OUT_OF_RANGE, 0),
    )
    return state, allocation


def free(state: BlockState, rows: jax.Array) -> BlockState:
    """Drops rows; blocks whose count reaches 0 go back to the stack.

    Freed ids are pushed in ascending row, then ascending logical order.

    Args:
      rows: bool[S], True for rows to drop; empty rows may be named.
    """
    return _shorten(state, jnp.where(rows, 0, state.lengths))


def truncate(state: BlockState, lengths: jax.Array) -> BlockState:
    """Shortens rows to `lengths` where that is less than now; emptied blocks are released.

    Args:
      lengths: i32[S], tokens to keep per row (a negative one sets a fault bit and is ignored).
    """
    is_valid = lengths >= 0
    faults = state.faults | jnp.where(jnp.all(is_valid), 0, FAULT_OUT_OF_RANGE)
    state = dataclasses.replace(state, faults=faults)
    kept = jnp.minimum(lengths.astype(jnp.int32), state.lengths)
    return _shorten(state, jnp.where(is_valid, kept, state.lengths))


def fork(state: BlockState, parents: jax.Array, children: jax.Array) -> BlockState:
    """Lets each child, an empty row, share all blocks of its parent.

    Pairs are applied in order, so a child may be the parent of a later pair.

    Args:
      parents: i32[F], rows to share from; S is padding.
      children: i32[F], empty rows; S is padding. An occupied child sets a fault bit.
    """
    max_seqs, out = state.max_seqs, state.num_blocks + 1
    is_padding = (parents == max_seqs) | (children == max_seqs)
    count = jnp.max(jnp.where(is_padding, 0, jnp.arange(1, parents.shape[0] + 1)), initial=0)

    def body(i, state: BlockState) -> BlockState:
        parent, child = parents[i], children[i]
        is_valid = (parent >= 0) & (parent < max_seqs) & (child >= 0) & (child < max_seqs)
        source = jnp.where(is_valid, parent, 0)
        is_free = state.lengths[jnp.where(is_valid, child, 0)] == 0
        go = is_valid & is_free
        target = jnp.where(go, child, max_seqs)
        ids, length = state.block_tables[source], state.lengths[source]
        fault = jnp.where(is_valid, jnp.where(is_free, 0, FAULT_OCCUPIED), FAULT_OUT_OF_RANGE)
        return dataclasses.replace(
            state,
            refcounts=state.refcounts.at[jnp.where(go & (ids > 0), ids, out)].add(1, mode="drop"),
            block_tables=state.block_tables.at[target].set(ids, mode="drop"),
            lengths=state.lengths.at[target].set(length, mode="drop"),
            faults=state.faults | jnp.where(is_padding[i], 0, fault),
        )

    return jax.lax.fori_loop(0, count, body, state)


def translate(
    state: BlockState, row: jax.Array | int, position: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Logical to physical: the block that holds a position of a row, and the offset in it.

    `block = block_tables[row, position // P]`, `offset = position % P`. Arguments broadcast.

    Returns: (block, offset), i32; block 0 for a logical block that the row does not hold.
    """
    size, width = state.block_size, state.max_blocks_per_seq
    row = jnp.asarray(row, jnp.int32)
    position = jnp.asarray(position, jnp.int32)
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
    block, offset = translate(state, rows, positions)
    is_row = (rows >= 0) & (rows < state.max_seqs)
    length = jnp.where(is_row, state.lengths[jnp.where(is_row, rows, 0)], 0)
    is_live = (positions >= 0) & (positions < length)
    return jnp.where(is_live, block * state.block_size + offset, 0)


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


def _copies(state: BlockState, new_tokens: jax.Array) -> jax.Array:
    """bool[S], rows that must copy the block they write into."""
    writes, last = _written_blocks(state, new_tokens)
    # same[i, j]: rows i and j write into one block.
    same = (last[:, None] == last[None, :]) & writes[:, None] & writes[None, :]
    writers = jnp.sum(same, axis=1, dtype=jnp.int32)
    is_lowest = jnp.argmax(same, axis=1) == jnp.arange(state.max_seqs)
    owners = state.refcounts[last]
    return writes & (owners > 1) & ~((owners == writers) & is_lowest)


def _shorten(state: BlockState, lengths: jax.Array) -> BlockState:
    """Sets lengths[S] (none above the present one) and releases the blocks past them."""
    keep = ceil_div(lengths, state.block_size)
    concerned = keep < ceil_div(state.lengths, state.block_size)
    out = state.num_blocks + 1
    logical = jnp.arange(state.max_blocks_per_seq, dtype=jnp.int32)

    def body(carry):
        concerned, free_blocks, num_free, refcounts, block_tables = carry
        row = jnp.argmax(concerned)  # the lowest
        ids = block_tables[row]
        dropped = (logical >= keep[row]) & (ids > 0)
        refcounts = refcounts.at[jnp.where(dropped, ids, out)].add(-1, mode="drop")
        freed = dropped & (refcounts[ids] == 0)
        rank = jnp.cumsum(freed, dtype=jnp.int32)
        place = jnp.where(freed, num_free + rank - 1, out)
        free_blocks = free_blocks.at[place].set(ids, mode="drop")
        block_tables = block_tables.at[row].set(jnp.where(dropped, 0, ids))
        concerned = concerned.at[row].set(False)
        return concerned, free_blocks, num_free + rank[-1], refcounts, block_tables

    carry = (concerned, state.free_blocks, state.num_free, state.refcounts, state.block_tables)
    carry = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), body, carry)
    _, free_blocks, num_free, refcounts, block_tables = carry
    return dataclasses.replace(
        state,
        free_blocks=free_blocks,
        num_free=num_free,
        refcounts=refcounts,
        block_tables=block_tables,
        lengths=lengths,
    )
