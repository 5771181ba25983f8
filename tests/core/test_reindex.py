"""Rows that take each other's tables, as beams do: block ids worked out by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from tests.core.transitions import (
    N,
    S,
    allocate,
    assert_same,
    counts,
    fork,
    free,
    fresh,
    grow,
    per_row,
    reindex,
    stack,
    tables,
)


def three_rows():
    """Tables [1, 2], [3], [4, 5, 6] of 5, 4 and 9 tokens; rows 3 and 4 are empty."""
    return grow(fresh(), 5, 4, 9)


def test_two_rows_swap_without_passing_through_the_stack():
    before = three_rows()
    state = reindex(before, (0, 1), (1, 0))
    assert tables(state) == [[3], [1, 2], [4, 5, 6], [], []]
    assert state.lengths.tolist() == [4, 5, 9, 0, 0]
    assert counts(state) == counts(before)
    np.testing.assert_array_equal(state.free_blocks, before.free_blocks)


def test_three_rows_move_in_a_circle():
    before = three_rows()
    state = reindex(before, (2, 0), (0, 1), (1, 2))
    assert tables(state) == [[3], [4, 5, 6], [1, 2], [], []]
    assert state.lengths.tolist() == [4, 9, 5, 0, 0]
    assert counts(state) == counts(before)
    np.testing.assert_array_equal(state.free_blocks, before.free_blocks)


@pytest.mark.parametrize("pairs", [[(0, 2), (1, 2)], [(1, 2), (0, 2)]])
def test_blocks_that_nobody_wants_are_freed_by_row_then_by_logical_block(pairs):
    state = reindex(three_rows(), *pairs)
    assert tables(state) == [[4, 5, 6], [4, 5, 6], [4, 5, 6], [], []]
    assert state.lengths.tolist() == [9, 9, 9, 0, 0]
    assert counts(state) == {4: 3, 5: 3, 6: 3}
    # Row 0 drops 1 and 2, then row 1 drops 3, in whatever order they were named.
    assert state.free_blocks.tolist() == [12, 11, 10, 9, 8, 7, 1, 2, 3, 0, 0, 0, 0]


def test_block_dropped_by_two_rows_is_freed_at_the_second():
    state = fork(three_rows(), (0, 3))  # row 3 is [1, 2] too
    state = reindex(state, (0, 2), (1, 2), (3, 2))
    # Row 0 drops 1 and 2, which row 3 still holds; row 1 drops 3; then row 3 drops 1 and 2.
    assert state.free_blocks.tolist() == [12, 11, 10, 9, 8, 7, 3, 1, 2, 0, 0, 0, 0]
    assert tables(state) == [[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, 5, 6], []]


def test_block_kept_by_a_new_owner_is_not_freed():
    # Row 1 takes [1, 2] while row 0 leaves it: only row 1's block 3 is left over.
    state = reindex(three_rows(), (0, 2), (1, 0))
    assert tables(state) == [[4, 5, 6], [1, 2], [4, 5, 6], [], []]
    assert counts(state) == {1: 1, 2: 1, 4: 2, 5: 2, 6: 2}
    assert stack(state) == [3, 7, 8, 9, 10, 11, 12]


def test_row_that_is_its_own_source_stays():
    before = three_rows()
    assert_same(reindex(before, (0, 0), (1, 1), (4, 4)), before)
    assert_same(reindex(before, (0, 0), (1, 2)), reindex(before, (1, 2)))


def test_empty_source_empties_the_row():
    before = three_rows()
    assert_same(reindex(before, (2, 3), (0, 4)), free(before, 0, 2))


def test_empty_row_takes_a_table():
    before = three_rows()
    assert_same(reindex(before, (3, 0), (4, 2)), fork(before, (0, 3), (2, 4)))


def test_padding_entries_are_dropped_wherever_they_stand():
    before = three_rows()
    assert_same(reindex(before), before)
    assert_same(reindex(before, (S, 1), (0, S), (S, S)), before)
    assert_same(reindex(before, (0, S), (0, 1), (S, 0)), reindex(before, (0, 1)))


def test_row_named_twice_sets_a_fault_and_its_first_entry_counts():
    before = three_rows()
    for pairs, expected in [
        ([(0, 1), (0, 2), (2, 1)], [(0, 1), (2, 1)]),
        ([(0, 1), (2, 1), (0, 1)], [(0, 1), (2, 1)]),
        ([(0, 0), (0, 2)], []),
    ]:
        after = reindex(before, *pairs)
        assert after.faults == core.FAULT_REPEATED
        after = dataclasses.replace(after, faults=before.faults)
        assert_same(after, reindex(before, *expected))


def test_faulty_entry_names_no_row_and_does_not_stop_the_others():
    before = three_rows()
    after = reindex(before, (0, -1), (0, 1), (S + 1, 0))
    assert after.faults == core.FAULT_OUT_OF_RANGE
    assert_same(dataclasses.replace(after, faults=before.faults), reindex(before, (0, 1)))
    # A row of -1 must not wrap to the last row, nor one past the end be clamped to it.
    after = reindex(before, (-1, 0), (S + 1, 1), (-S, 2))
    assert after.faults == core.FAULT_OUT_OF_RANGE
    assert_same(dataclasses.replace(after, faults=before.faults), before)


def test_beam_step_copies_only_what_diverges():
    state = grow(fork(grow(fresh(), 6), (0, 1), (0, 2), (0, 3)), 1, 1, 1, 1)
    # All four wrote into block 2, and the lowest kept it.
    assert tables(state) == [[1, 2], [1, 3], [1, 4], [1, 5], []]
    # The best beam comes from row 1, the third from row 0; rows 2 and 3 die out.
    state = reindex(state, (0, 1), (2, 0), (3, 1))
    assert tables(state) == [[1, 3], [1, 3], [1, 2], [1, 3], []]
    assert counts(state) == {1: 4, 2: 1, 3: 3}
    assert stack(state) == [5, 4, 6, 7, 8, 9, 10, 11, 12]
    state, allocation = allocate(state, per_row([1, 1, 1, 1]))
    assert tables(state) == [[1, 3], [1, 5], [1, 2], [1, 4], []]
    assert allocation.copy_src.tolist() == [0, 3, 0, 3, 0]
    assert allocation.copy_dst.tolist() == [0, 5, 0, 4, 0]
    state = free(state, 0, 1, 2, 3)
    assert tables(state) == [[]] * S
    assert state.num_free == N


BEAMS, PROMPT, BEAM_STEPS = 4, 30, 10


@functools.cache
def beam_step():
    @jax.jit
    def step(state, ended, sources, new_tokens):
        rows = jnp.arange(BEAMS, dtype=jnp.int32)
        state = core.reindex(core.free(state, ended), rows, sources)
        return core.allocate(state, new_tokens)

    return step


@pytest.mark.parametrize("seed", range(5))
def test_beams_that_fork_and_drop_never_free_a_block_twice(seed):
    # The least pool that surely holds 4 beams: 7 full prompt blocks, then 3 blocks a beam.
    num_blocks = 7 + 3 * BEAMS
    rng = np.random.default_rng(seed)
    state = core.create_block_state(num_blocks, 4, BEAMS, 10)
    nobody, in_place = np.zeros(BEAMS, bool), np.arange(BEAMS, dtype=np.int32)
    state, _ = beam_step()(state, nobody, in_place, np.array([PROMPT, 0, 0, 0], np.int32))
    contents = np.zeros((num_blocks + 1, 4), np.int64)
    for position in range(PROMPT):
        contents[int(state.block_tables[0, position // 4]), position % 4] = position
    expected = [list(range(PROMPT)), [], [], []]
    sources = np.zeros(BEAMS, np.int32)
    for step in range(BEAM_STEPS):
        # Some beams end early: their rows are dropped and filled again from those that live.
        ended = (rng.random(BEAMS) < 0.3) & (step > 0)
        ended[rng.integers(BEAMS)] = False
        if step:
            sources = rng.choice(np.flatnonzero(~ended), BEAMS).astype(np.int32)
        state, allocation = beam_step()(state, ended, sources, np.ones(BEAMS, np.int32))
        assert allocation.ok
        core.audit(state)
        assert state.refcounts[1:8].tolist() == [BEAMS] * 7, "full prompt blocks are shared by all"
        before = contents.copy()
        for source, target in zip(allocation.copy_src, allocation.copy_dst, strict=True):
            if target:
                contents[int(target)] = before[int(source)]
        expected = [[*expected[source]] for source in sources]
        for row, tokens in enumerate(expected):
            tokens.append(1000 * (step + 1) + row)
            last = int(state.block_tables[row, (len(tokens) - 1) // 4])
            contents[last, (len(tokens) - 1) % 4] = tokens[-1]
        for table, tokens in zip(np.asarray(state.block_tables), expected, strict=True):
            assert contents[table].reshape(-1)[: len(tokens)].tolist() == tokens
    state, _ = beam_step()(state, ~nobody, in_place, np.zeros(BEAMS, np.int32))
    core.audit(state)
    assert state.num_free == num_blocks
