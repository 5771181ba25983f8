"""Sharing, and owners that are not rows: block ids worked out by hand."""

import dataclasses

import numpy as np
import pytest

from paged_jax import core
from tests.core.transitions import (
    N,
    S,
    allocate,
    assert_same,
    counts,
    external,
    fork,
    free,
    fresh,
    grow,
    ledger_of,
    per_row,
    release,
    retain,
    share,
    stack,
    tables,
    truncate,
)


def cached():
    """Blocks 1 and 2 (full, two tokens) belong to nobody but the prefix cache."""
    return free(retain(grow(fresh(), 6), 1, 2), 0)


def test_empty_row_adopts_cached_blocks_and_their_partial_tail():
    before = cached()
    state = share(before, (3, [1, 2], 6))
    assert tables(state, 1, 2) == [[], [], [], [1, 2], []]
    assert state.lengths.tolist() == [0, 0, 0, 6, 0]
    assert counts(state) == {1: 2, 2: 2}
    assert stack(state) == stack(before)


def test_rows_may_share_the_same_blocks_at_different_lengths():
    state = share(cached(), (4, [1, 2], 5), (0, [1], 4), (2, [1, 2], 6))
    assert tables(state, 1, 2) == [[1], [], [1, 2], [], [1, 2]]
    assert state.lengths.tolist() == [4, 0, 6, 0, 5]
    assert counts(state) == {1: 4, 2: 3}


def test_blocks_of_rows_are_shared_as_well_as_those_of_the_cache():
    state = share(grow(fresh(), 6, 12), (2, [3, 1, 4], 10))
    assert tables(state)[2] == [3, 1, 4]
    assert counts(state) == {1: 2, 2: 1, 3: 2, 4: 2, 5: 1}


def test_ids_past_the_tokens_are_ignored_whatever_they_are():
    before = cached()
    expected = share(before, (3, [1], 4))
    assert_same(share(before, (3, [1, 2, 2, 1], 4)), expected)
    assert_same(share(before, (3, [1, -7, N + 1, 9], 4)), expected)
    # A row of no tokens stays empty.
    assert_same(share(before, (3, [-7, N + 1, 9, 1], 0)), before)


def test_padding_entries_are_not_shared_wherever_they_stand():
    before = cached()
    assert_same(share(before), before)
    assert_same(share(before, (S, [-7, N + 1, 9, 1], -5), (S, [9], 1000)), before)
    assert_same(share(before, (S, [9], 4), (3, [1], 4), (S, [2], 4)), share(before, (3, [1], 4)))


def test_row_shared_twice_keeps_its_first_blocks():
    before = cached()
    state = share(before, (3, [1], 4), (3, [2], 2), (4, [2], 2))
    assert state.faults == core.FAULT_OCCUPIED
    state = dataclasses.replace(state, faults=before.faults)
    assert_same(state, share(before, (3, [1], 4), (4, [2], 2)))


def test_faulty_share_does_not_stop_the_others():
    before = cached()
    state = share(before, (3, [1, 9], 8), (-1, [1], 4), (4, [1, 2], 6))
    assert state.faults == core.FAULT_FREE_BLOCK | core.FAULT_OUT_OF_RANGE
    assert_same(dataclasses.replace(state, faults=before.faults), share(before, (4, [1, 2], 6)))


def test_shared_block_outlives_the_row_it_came_from():
    state = share(grow(fresh(), 6), (1, [1, 2], 6))
    state = free(state, 0)
    assert tables(state) == [[], [1, 2], [], [], []]
    assert counts(state) == {1: 1, 2: 1}
    state = free(state, 1)
    assert state.num_free == N
    assert stack(state)[:3] == [2, 1, 3]


def test_released_ids_are_pushed_in_the_given_order():
    state = free(retain(grow(fresh(), 12), 1, 2, 3), 0)
    assert state.num_free == N - 3
    core.audit(state, external(1, 2, 3))
    state = release(state, 2, 3, 1)
    assert state.free_blocks.tolist() == [12, 11, 10, 9, 8, 7, 6, 5, 4, 2, 3, 1, 0]
    assert state.num_free == N
    core.audit(state)


def test_id_named_twice_gains_and_loses_two_owners():
    state = retain(grow(fresh(), 8), 2, 1, 2)
    assert counts(state) == {1: 2, 2: 3}
    state = release(free(state, 0), 2)
    assert counts(state) == {1: 1, 2: 1}
    state = retain(state, 2)
    # Block 2 reaches 0 at its second naming, after block 1.
    state = release(state, 2, 1, 2)
    assert state.free_blocks.tolist() == [12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 1, 2, 0]
    core.audit(state)


def test_release_of_a_block_that_a_row_holds_frees_nothing():
    before = grow(fresh(), 6)
    state = release(retain(before, 1, 2, 2), 2, 1, 2)
    assert_same(state, before)


def test_padding_ids_are_dropped_wherever_they_stand():
    before = grow(fresh(), 6)
    assert_same(retain(before), before)
    assert_same(release(before), before)
    held = retain(before, 0, 1, 0, 0, 2)
    assert_same(held, retain(before, 1, 2))
    assert_same(release(held, 0, 0, 1, 0, 2), before)


def test_release_beyond_the_last_owner_sets_a_fault():
    # Block 1 has one owner left: the first naming frees it and the second is refused.
    before = cached()
    state = release(before, 1, 1, 2)
    assert state.faults == core.FAULT_FREE_BLOCK
    assert_same(dataclasses.replace(state, faults=before.faults), release(before, 1, 2))
    assert state.num_free == N


def test_faulty_id_does_not_stop_the_others():
    before = cached()
    for transition in (retain, release):
        state = transition(before, -1, 1, 9, N + 1, 2)
        assert state.faults == core.FAULT_OUT_OF_RANGE | core.FAULT_FREE_BLOCK
        state = dataclasses.replace(state, faults=before.faults)
        assert_same(state, transition(before, 1, 2))
    # -1 must not wrap to block 12, nor an id past the end be clamped to it.
    everything = grow(fresh(), 16, 16, 16)
    for transition in (retain, release):
        state = transition(everything, -1, N + 1, -N)
        assert state.faults == core.FAULT_OUT_OF_RANGE
        assert_same(dataclasses.replace(state, faults=everything.faults), everything)


def test_partly_filled_block_that_is_retained_is_copied_by_the_next_append():
    state = retain(grow(fresh(), 6), 2)
    state, allocation = allocate(state, per_row([1]))
    assert tables(state, 2)[0] == [1, 3]
    assert (allocation.copy_src[0], allocation.copy_dst[0]) == (2, 3)
    assert counts(state) == {1: 1, 2: 1, 3: 1}
    # The copy is the row's own, so it is written in place from now on.
    state, allocation = allocate(state, per_row([1]))
    assert tables(state, 2)[0] == [1, 3]
    assert not allocation.copy_dst.any()
    state = release(state, 2)
    assert stack(state)[0] == 2


def test_no_copy_is_made_once_the_count_has_fallen_back_to_1():
    state = release(retain(grow(fresh(), 6), 2), 2)
    state, allocation = allocate(state, per_row([1]))
    assert tables(state)[0] == [1, 2]
    assert allocation.num_new == 0
    assert not allocation.copy_dst.any()


def test_full_block_that_is_retained_is_not_copied():
    state, allocation = allocate(retain(grow(fresh(), 8), 1, 2), per_row([1]))
    assert tables(state, 1, 2)[0] == [1, 2, 3]
    assert not allocation.copy_dst.any()


def test_append_after_truncation_into_a_retained_full_block_copies():
    state = truncate(retain(grow(fresh(), 8), 1, 2), r0=5)
    state, allocation = allocate(state, per_row([4]))
    # Growth first: block 3 holds position 8, block 4 is the copy of block 2.
    assert tables(state, 1, 2)[0] == [1, 4, 3]
    assert (allocation.copy_src[0], allocation.copy_dst[0]) == (2, 4)


def test_no_writer_keeps_a_block_that_is_retained():
    # Both rows write into block 2, but the cache is an owner that does not.
    state = retain(fork(grow(fresh(), 6), (0, 1)), 2)
    state, allocation = allocate(state, per_row([1, 1]))
    assert tables(state, 2)[:2] == [[1, 3], [1, 4]]
    assert allocation.copy_src.tolist() == [2, 2, 0, 0, 0]
    assert counts(state) == {1: 2, 2: 1, 3: 1, 4: 1}


def test_writers_into_a_shared_tail_part_ways():
    # The tail is shared through the cache and not by fork. Row 1 holds fewer of its tokens.
    state = share(grow(fresh(), 7), (1, [1, 2], 6), (2, [1, 2], 7))
    state, allocation = allocate(state, per_row([1, 1, 0]))
    # Row 2 does not write: rows 0 and 1 both leave it block 2.
    assert tables(state)[:3] == [[1, 3], [1, 4], [1, 2]]
    assert allocation.copy_src.tolist() == [2, 2, 0, 0, 0]
    state, allocation = allocate(state, per_row([1, 1, 1]))
    assert tables(state)[:3] == [[1, 3, 5], [1, 4], [1, 2]]
    assert not allocation.copy_dst.any()
    state = free(state, 0, 1, 2)
    assert tables(state) == [[]] * S
    assert state.num_free == N


def test_cached_tail_is_written_in_place_when_the_cache_lets_go_of_it():
    state = release(share(cached(), (0, [1, 2], 6)), 1, 2)
    state, allocation = allocate(state, per_row([1]))
    assert tables(state)[0] == [1, 2]
    assert not np.any(allocation.copy_dst)


def test_a_block_twice_in_one_row_is_a_fault():
    state = grow(fresh(), 6)
    after = core.share(state, np.array([1]), np.array([[1, 1, 0, 0]]), np.array([8]))
    assert after.faults == core.FAULT_REPEATED
    assert_same(dataclasses.replace(after, faults=state.faults), state)
    with pytest.raises(ValueError, match=r"block_ids \[1, 1\] must not name a block twice"):
        ledger_of(state).share(1, [1, 1], 8)


def test_lists_of_another_width_than_the_table_are_refused():
    with pytest.raises(ValueError, match=r"block_ids \(1, 1\) must have shape \(1, 4\)"):
        core.share(grow(fresh(), 6), np.array([1]), np.array([[1]]), np.array([4]))
