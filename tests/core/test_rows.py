"""Freeing, forking and truncating rows: block ids worked out by hand."""

import dataclasses

import numpy as np
import pytest

from paged_jax import core
from paged_jax.ledger import Ledger
from tests.core.transitions import (
    N,
    S,
    assert_same,
    counts,
    fork,
    free,
    free_rows,
    fresh,
    grow,
    shared_state,
    stack,
    state_of,
    tables,
    truncate,
    truncate_rows,
)


def test_freed_ids_are_pushed_by_row_then_by_logical_block():
    state = grow(fresh(), 8, 4, 12)  # [1, 2], [3], [4, 5, 6]
    state = free(state, 2, 0)
    assert state.free_blocks.tolist() == [12, 11, 10, 9, 8, 7, 1, 2, 4, 5, 6, 0, 0]
    assert tables(state) == [[], [3], [], [], []]
    assert tables(grow(state, 0, 0, 0, 9))[3] == [6, 5, 4]


def test_count_goes_from_1_to_0_and_the_block_is_free():
    state = grow(fresh(), 1)
    assert counts(state) == {1: 1}
    assert state.num_free == N - 1
    state = free(state, 0)
    assert counts(state) == {}
    assert state.num_free == N
    assert_same(state, fresh())
    # Once more: a row that is empty owns nothing.
    assert_same(free(state, 0), fresh())


def test_shared_block_is_free_when_its_last_owner_is():
    state = fork(grow(fresh(), 6), (0, 1))
    assert counts(state) == {1: 2, 2: 2}
    state = free(state, 0)
    assert counts(state) == {1: 1, 2: 1}
    assert state.num_free == N - 2
    state = free(state, 1)
    assert counts(state) == {}
    assert stack(state)[:3] == [2, 1, 3]
    core.audit(state)


def test_owners_freed_together_return_a_block_once():
    state = free(fork(grow(fresh(), 6, 3), (0, 2), (0, 3)), 0, 1, 2, 3)
    # Row 1's block 3 comes back first: the others had further owners until row 3 was dropped.
    assert stack(state)[:4] == [2, 1, 3, 4]
    assert state.num_free == N
    core.audit(state)


def test_freeing_no_row_or_an_empty_one_changes_nothing():
    state = shared_state()
    assert_same(free(state), state)
    assert_same(free(state, 3, 4), state)


def test_freed_blocks_are_reused():
    state = fresh()
    for _ in range(5):
        state = grow(state, 16, 16, 16)
        assert state.num_free == 0
        state = free(state, 0, 1, 2)
    assert state.num_free == N
    core.audit(state)


def test_forks_chain_and_branch_within_one_call():
    state = fork(grow(fresh(), 6), (0, 1), (1, 2), (0, 4))
    assert tables(state) == [[1, 2], [1, 2], [1, 2], [], [1, 2]]
    assert state.lengths.tolist() == [6, 6, 6, 0, 6]
    assert counts(state) == {1: 4, 2: 4}
    assert state.num_free == N - 2


def test_padding_pairs_are_dropped_wherever_they_stand():
    state = grow(fresh(), 6)
    assert_same(fork(state), state)
    assert_same(fork(state, (S, 1), (0, S)), state)
    assert_same(fork(state, (S, S), (0, 1), (S, S)), fork(state, (0, 1)))


def test_fork_onto_an_occupied_row_sets_a_fault_and_changes_nothing_else():
    state = grow(fresh(), 6, 3)
    for pair in [(0, 1), (0, 0)]:
        after = fork(state, pair)
        assert after.faults == core.FAULT_OCCUPIED
        assert_same(dataclasses.replace(after, faults=state.faults), state)


@pytest.mark.parametrize("pair", [(-1, 3), (0, -1), (S + 1, 3), (0, S + 1), (-S, 3)])
def test_fork_out_of_range_sets_a_fault_and_changes_nothing_else(pair):
    state = grow(fresh(), 6, 0, 0, 0, 3)
    after = fork(state, pair)
    assert after.faults == core.FAULT_OUT_OF_RANGE
    assert_same(dataclasses.replace(after, faults=state.faults), state)


def test_faulty_pair_does_not_stop_the_others_and_its_bit_stays():
    state = fork(grow(fresh(), 6, 3), (0, 1), (-1, 2), (0, 3))
    assert state.faults == core.FAULT_OCCUPIED | core.FAULT_OUT_OF_RANGE
    assert state.block_tables[3].tolist() == [1, 2, 0, 0]
    state = free(grow(state, 1), 0)
    assert state.faults == core.FAULT_OCCUPIED | core.FAULT_OUT_OF_RANGE
    with pytest.raises(core.AuditError, match="0b11"):
        core.audit(state)


def test_fork_of_an_empty_row_is_empty():
    state = grow(fresh(), 6)
    assert_same(fork(state, (2, 3), (4, 4)), state)


def test_truncation_keeps_whole_blocks_and_returns_the_rest():
    state = grow(fresh(), 16, 16)  # [1, 2, 3, 4], [5, 6, 7, 8]
    state = truncate(state, r0=8, r1=9)
    assert tables(state)[:2] == [[1, 2], [5, 6, 7]]
    assert state.lengths.tolist() == [8, 9, 0, 0, 0]
    assert stack(state) == [8, 4, 3, 9, 10, 11, 12]


def test_truncation_inside_the_last_block_returns_nothing():
    state = truncate(grow(fresh(), 7), r0=5)
    assert tables(state)[0] == [1, 2]
    assert state.lengths[0] == 5
    assert state.num_free == N - 2


def test_truncation_never_lengthens():
    state = grow(fresh(), 7)
    assert_same(truncate(state, r0=7, r1=3), state)
    assert_same(truncate(state, r0=8), state)


def test_truncation_to_zero_is_freeing():
    state = shared_state()
    assert_same(truncate(state, r0=0, r2=0), free(state, 0, 2))


def test_truncation_of_shared_blocks_only_drops_a_reference():
    state = truncate(fork(grow(fresh(), 12), (0, 1)), r1=1)
    assert tables(state)[:2] == [[1, 2, 3], [1]]
    assert counts(state) == {1: 2, 2: 1, 3: 1}
    assert state.num_free == N - 3


def test_negative_length_sets_a_fault_and_is_ignored():
    state = grow(fresh(), 7, 7)
    after = truncate(state, r0=-1, r1=2)
    assert after.faults == core.FAULT_OUT_OF_RANGE
    after = dataclasses.replace(after, faults=state.faults)
    assert_same(after, truncate(state, r1=2))


def wide_ledger(length: int) -> Ledger:
    """Row 0 holds 7 tokens and row 2 `length`, one a block, of which row 1 shares up to 200.

    Rows are released 128 blocks at a time, so these take up to three turns.
    """
    ledger = Ledger(num_blocks=700, block_size=1, max_seqs=3, max_blocks_per_seq=300)
    ledger.allocate({0: 100, 2: length})
    ledger.free([0])  # ids 1 to 100 are on top of the stack again, the highest first
    ledger.allocate({0: 7})
    ledger.fork(2, 1)
    ledger.truncate({1: 200})
    return ledger


WIDTHS = [0, 1, 127, 128, 129, 200, 256, 300]


@pytest.mark.parametrize("length", WIDTHS)
def test_row_of_any_width_is_freed_block_by_block(length):
    ledger = wide_ledger(length)
    state = state_of(ledger)
    for rows in [[2], [0, 1]]:
        ledger.free(rows)
        state = free_rows(state, np.isin(np.arange(3), rows))
        assert_same(state, state_of(ledger))
    core.audit(state)
    assert state.num_free == 700


@pytest.mark.parametrize("length", WIDTHS)
def test_row_is_truncated_to_any_width(length):
    ledger = wide_ledger(300)
    state = state_of(ledger)
    for row in (2, 1):
        ledger.truncate({row: length})
        state = truncate_rows(state, np.where(np.arange(3) == row, length, 300).astype(np.int32))
        assert_same(state, state_of(ledger))
    core.audit(state)
    assert state.num_free == 693 - max(length, min(length, 200))


def test_rows_truncated_together_are_released_one_after_the_other():
    ledger = wide_ledger(300)
    state = state_of(ledger)
    ledger.truncate({0: 3, 1: 129, 2: 128})
    state = truncate_rows(state, np.array([3, 129, 128], np.int32))
    assert_same(state, state_of(ledger))
    core.audit(state)
