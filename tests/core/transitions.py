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
truncate_rows = jitted(core.truncate)
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
    return np.array([*values, *[fill] * (S - len(values))], np.int32)


def fork(state: BlockState, *pairs: tuple[int, int]) -> BlockState:
    """Forks up to three (parent, child) pairs; the others are padding."""
    pairs = [*pairs, *[(S, S)] * (3 - len(pairs))]
    parents, children = np.array(pairs, np.int32).T
    return fork_rows(state, parents, children)


def free(state: BlockState, *rows: int) -> BlockState:
    return free_rows(state, np.isin(np.arange(S), rows))


def truncate(state: BlockState, **lengths: int) -> BlockState:
    """Truncates rows named r0, r1, ...; the others keep all they have."""
    kept = np.full(S, 1000, np.int32)
    for row, length in lengths.items():
        kept[int(row[1:])] = length
    return truncate_rows(state, kept)


def tables(state: BlockState) -> list[list[int]]:
    """Tables without the zeros past the end of each row, which audit checks."""
    core.audit(state)
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


def ledger_of(state: BlockState) -> Ledger:
    ledger = Ledger(N, P, S, M)
    ledger.free_blocks = stack(state)[::-1]
    ledger.refcounts = np.asarray(state.refcounts).tolist()
    ledger.tables = tables(state)
    ledger.lengths = np.asarray(state.lengths).tolist()
    return ledger


def shared_state() -> BlockState:
    """Rows 0 and 1 share [1, 2] (6 tokens); row 2 holds blocks 3 to 6; 6 blocks are free."""
    return fork(grow(fresh(), 6, 0, 16), (0, 1))
