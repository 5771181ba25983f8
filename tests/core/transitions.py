"""Compiled transitions on one pool shape, and states to start from.

The tests of a block state share N = 12, P = 4, S = 5, M = 4, so that each transition is compiled
once.
"""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import core
from paged_jax.core import BlockState
from paged_jax.ledger import Ledger

N, P, S, M = 12, 4, 5, 4
ENTRIES = 3  # of fork, share and reindex
IDS = 6  # of retain and release

TRACES = Counter()


def jitted(function, **options):
    @functools.wraps(function)
    def traced(*args, **kwargs):
        TRACES[function.__name__] += 1
        return function(*args, **kwargs)

    return jax.jit(traced, **options)


allocate = jitted(core.allocate, static_argnames="max_new_blocks")
free_rows = jitted(core.free)
fork_rows = jitted(core.fork)
share_rows = jitted(core.share)
reindex_rows = jitted(core.reindex)
retain_ids = jitted(core.retain)
release_ids = jitted(core.release)
truncate_rows = jitted(core.truncate)
COMPILED = {
    "allocate": allocate,
    "free": free_rows,
    "fork": fork_rows,
    "share": share_rows,
    "reindex": reindex_rows,
    "retain": retain_ids,
    "release": release_ids,
    "truncate": truncate_rows,
}
needed = jitted(core.needed)
fit = jitted(core.fit)
slot_mapping = jitted(core.slot_mapping)
translate = jitted(core.translate)


def fresh() -> BlockState:
    return core.create_block_state(N, P, S, M)


def grow(state: BlockState, *new_tokens: int) -> BlockState:
    """Allocates for the first rows and expects success."""
    state, allocation = allocate(state, per_row(new_tokens))
    assert allocation.ok
    return state


def per_row(values, fill: int = 0) -> np.ndarray:
    return padded(values, S, fill)


def fork(state: BlockState, *pairs: tuple[int, int]) -> BlockState:
    """Forks up to three (parent, child) pairs; the others are padding."""
    return fork_rows(state, *columns(pairs))


def reindex(state: BlockState, *pairs: tuple[int, int]) -> BlockState:
    """Reindexes up to three (row, source) pairs; the others are padding."""
    return reindex_rows(state, *columns(pairs))


def share(state: BlockState, *entries: tuple[int, list[int], int]) -> BlockState:
    """Shares up to three (row, block ids, tokens); the others are padding."""
    return share_rows(state, *share_arrays(*entries))


def share_arrays(*entries: tuple[int, list[int], int]) -> tuple[np.ndarray, ...]:
    rows, num_tokens = np.full(ENTRIES, S, np.int32), np.zeros(ENTRIES, np.int32)
    block_ids = np.zeros((ENTRIES, M), np.int32)
    for i, (row, ids, count) in enumerate(entries):
        rows[i], num_tokens[i] = row, count
        block_ids[i, : len(ids)] = ids
    return rows, block_ids, num_tokens


def retain(state: BlockState, *block_ids: int) -> BlockState:
    return retain_ids(state, padded(block_ids, IDS, 0))


def release(state: BlockState, *block_ids: int) -> BlockState:
    return release_ids(state, padded(block_ids, IDS, 0))


def padded(values, size: int, fill: int) -> np.ndarray:
    return np.array([*values, *[fill] * (size - len(values))], np.int32)


def columns(pairs) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.array([*pairs, *[(S, S)] * (ENTRIES - len(pairs))], np.int32).T
    return first, second


def free(state: BlockState, *rows: int) -> BlockState:
    return free_rows(state, np.isin(np.arange(S), rows))


def truncate(state: BlockState, **lengths: int) -> BlockState:
    """Truncates rows named r0, r1, ...; the others keep all they have."""
    kept = np.full(S, 1000, np.int32)
    for row, length in lengths.items():
        kept[int(row[1:])] = length
    return truncate_rows(state, kept)


def external(*retained: int) -> np.ndarray:
    """References of owners that are not rows, as audit wants them."""
    return np.bincount(np.array(retained, int), minlength=N + 1)


def tables(state: BlockState, *retained: int) -> list[list[int]]:
    """Tables without the zeros past the end of each row, which audit checks."""
    core.audit(state, external(*retained))
    return [[int(block) for block in row if block] for row in np.asarray(state.block_tables)]


def stack(state: BlockState) -> list[int]:
    """Free ids in the order in which they will be handed out."""
    return np.asarray(state.free_blocks)[: int(state.num_free)][::-1].tolist()


def counts(state: BlockState) -> dict[int, int]:
    refcounts = np.asarray(state.refcounts)
    return {block: int(refcounts[block]) for block in np.flatnonzero(refcounts)}


def assert_same(state: BlockState, other: BlockState) -> None:
    for field in dataclasses.fields(BlockState):
        np.testing.assert_array_equal(
            getattr(state, field.name), getattr(other, field.name), err_msg=field.name
        )


def random_state(rng: np.random.Generator) -> BlockState:
    """A few random transitions, so that blocks are shared and the stack is shuffled."""
    state = fresh()
    for _ in range(4):
        state, _ = allocate(state, rng.integers(0, 7, S, dtype=np.int32) * rng.integers(0, 2, S))
        state = fork(state, (int(rng.integers(S)), int(rng.integers(S))))
        lengths = rng.integers(0, M * P + 1, S, dtype=np.int32)
        state = truncate_rows(state, np.where(rng.random(S) < 0.3, lengths, 1000).astype(np.int32))
    return dataclasses.replace(state, faults=jnp.int32(0))


def retained_state(rng: np.random.Generator) -> tuple[BlockState, list[int]]:
    """A random state and the ids that it retains; some of them are of no row any more."""
    state = random_state(rng)
    owned = list(counts(state))
    retained = [int(rng.choice(owned)) for _ in range(3)] if owned else []
    row = int(rng.integers(S))
    state = free(retain(state, *retained), row)
    return reindex(state, tuple(rng.integers(0, S, 2).tolist())), retained


def ledger_of(state: BlockState) -> Ledger:
    ledger = Ledger(state.num_blocks, state.block_size, state.max_seqs, state.max_blocks_per_seq)
    ledger.free_blocks = stack(state)[::-1]
    ledger.refcounts = np.asarray(state.refcounts).tolist()
    ledger.tables = [[block for block in row if block] for row in state.block_tables.tolist()]
    ledger.lengths = np.asarray(state.lengths).tolist()
    return ledger


def state_of(ledger: Ledger) -> BlockState:
    """The same state with its arrays on the host."""
    width = ledger.max_blocks_per_seq
    return BlockState(
        free_blocks=padded(ledger.free_blocks, ledger.num_blocks + 1, 0),
        num_free=np.int32(ledger.num_free),
        refcounts=np.array(ledger.refcounts, np.int32),
        block_tables=np.array([padded(row, width, 0) for row in ledger.tables]),
        lengths=np.array(ledger.lengths, np.int32),
        faults=np.int32(0),
        block_size=ledger.block_size,
    )


def shared_state() -> BlockState:
    """Rows 0 and 1 share [1, 2] (6 tokens); row 2 holds blocks 3 to 6; 6 blocks are free."""
    return fork(grow(fresh(), 6, 0, 16), (0, 1))
