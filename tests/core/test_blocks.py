"""Creating and allocating: block ids worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.ledger import Ledger
from tests.core.transitions import (
    M,
    N,
    P,
    S,
    allocate,
    assert_same,
    counts,
    fork,
    fresh,
    grow,
    per_row,
    shared_state,
    stack,
    state_of,
    tables,
    truncate,
)


def test_fresh_state_hands_out_block_1_first():
    state = fresh()
    assert state.free_blocks.tolist() == [12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert state.num_free == 12
    assert not any(map(np.any, (state.refcounts, state.block_tables, state.lengths, state.faults)))
    assert (state.num_blocks, state.max_seqs, state.max_blocks_per_seq) == (N, S, M)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("int32")}
    core.audit(state)


@pytest.mark.parametrize("position", range(4))
def test_sizes_below_1_are_refused(position):
    sizes = [N, P, S, M]
    sizes[position] = 0
    name = ["num_blocks", "block_size", "max_seqs", "max_blocks_per_seq"][position]
    with pytest.raises(ValueError, match=rf"{name} \(0\) must be at least 1"):
        core.create_block_state(*sizes)


def test_growth_ascends_by_row_then_by_logical_block():
    state, allocation = allocate(fresh(), per_row([5, 0, 9, 0, 1]))
    assert tables(state) == [[1, 2], [], [3, 4, 5], [], [6]]
    assert state.lengths.tolist() == [5, 0, 9, 0, 1]
    assert stack(state) == [7, 8, 9, 10, 11, 12]
    assert (bool(allocation.ok), int(allocation.reason), int(allocation.num_new)) == (True, 0, 6)
    assert not allocation.copy_src.any()
    assert not allocation.copy_dst.any()


def test_tokens_that_fit_the_last_block_take_no_block():
    state = grow(grow(fresh(), 1), 3)
    assert tables(state)[0] == [1]
    assert tables(grow(state, 1))[0] == [1, 2]


def test_copies_come_after_all_growth_in_ascending_row():
    # Rows 0, 1 and 3 share blocks 1 and 2; block 2 holds two tokens.
    state = fork(grow(fresh(), 6), (0, 1), (0, 3))
    # Row 0 grows to 9 tokens and row 2 from nothing: blocks 3 and 4. Row 3 owns block 2 and does
    # not write, so rows 0 and 1 both copy it: blocks 5 and 6.
    state, allocation = allocate(state, per_row([3, 1, 2, 0, 0]))
    assert tables(state) == [[1, 5, 3], [1, 6], [4], [1, 2], []]
    assert allocation.copy_src.tolist() == [2, 2, 0, 0, 0]
    assert allocation.copy_dst.tolist() == [5, 6, 0, 0, 0]
    assert allocation.num_new == 4
    assert counts(state) == {1: 3, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1}
    assert state.lengths.tolist() == [9, 7, 2, 6, 0]


def test_lowest_writer_keeps_the_block_when_all_owners_write():
    state = fork(grow(fresh(), 6), (0, 1), (0, 3))
    state, allocation = allocate(state, per_row([1, 1, 0, 1, 0]))
    assert tables(state) == [[1, 2], [1, 3], [], [1, 4], []]
    assert allocation.copy_src.tolist() == [0, 2, 0, 2, 0]
    assert allocation.copy_dst.tolist() == [0, 3, 0, 4, 0]
    assert counts(state) == {1: 3, 2: 1, 3: 1, 4: 1}


def test_keeping_does_not_depend_on_who_the_parent_was():
    state = fork(grow(fresh(), 0, 0, 0, 0, 6), (4, 3), (4, 1))
    state, allocation = allocate(state, per_row([0, 1, 0, 1, 1]))
    assert tables(state) == [[], [1, 2], [], [1, 3], [1, 4]]
    assert allocation.copy_dst.tolist() == [0, 0, 0, 3, 4]


def test_writer_copies_while_another_owner_does_not_write():
    state = fork(grow(fresh(), 6), (0, 1))
    state, allocation = allocate(state, per_row([0, 1]))
    assert tables(state)[:2] == [[1, 2], [1, 3]]
    assert allocation.copy_src.tolist() == [0, 2, 0, 0, 0]
    # The count of block 2 has fallen to 1: its last owner writes in place.
    state, allocation = allocate(state, per_row([1, 0]))
    assert tables(state)[:2] == [[1, 2], [1, 3]]
    assert allocation.num_new == 0
    assert not allocation.copy_dst.any()


def test_two_groups_of_writers_are_told_apart():
    # Rows 0, 1 share block 1; rows 2, 3 share block 2; all write.
    state = fork(grow(fresh(), 2, 0, 3), (0, 1), (2, 3))
    state, allocation = allocate(state, per_row([1, 1, 1, 1]))
    assert tables(state) == [[1], [3], [2], [4], []]
    assert allocation.copy_src.tolist() == [0, 1, 0, 2, 0]


def test_full_shared_blocks_are_never_copied():
    state = fork(grow(fresh(), 8), (0, 1))
    state, allocation = allocate(state, per_row([1, 5]))
    assert tables(state)[:2] == [[1, 2, 3], [1, 2, 4, 5]]
    assert counts(state) == {1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
    assert not allocation.copy_dst.any()


def test_append_after_truncation_into_a_shared_full_block_copies():
    state = truncate(fork(grow(fresh(), 8), (0, 1)), r1=6)
    # Row 0 holds block 2 as full: it grows (block 3) and does not write into it, so row 1 copies.
    state, allocation = allocate(state, per_row([1, 1]))
    assert tables(state)[:2] == [[1, 2, 3], [1, 4]]
    assert allocation.copy_src.tolist() == [0, 2, 0, 0, 0]
    assert allocation.copy_dst.tolist() == [0, 4, 0, 0, 0]


def test_writers_of_one_block_may_differ_in_length():
    state = truncate(fork(grow(fresh(), 7), (0, 1)), r0=5)
    state, allocation = allocate(state, per_row([1, 1]))
    assert tables(state)[:2] == [[1, 2], [1, 3]]
    assert allocation.copy_dst.tolist() == [0, 3, 0, 0, 0]


def test_row_that_grows_and_copies_gets_both():
    state = fork(grow(fresh(), 2), (0, 1))
    state, _ = allocate(state, per_row([0, 9]))  # 2 -> 11 tokens
    assert tables(state)[:2] == [[1], [4, 2, 3]]


@pytest.mark.parametrize(
    ("new_tokens", "reason"),
    [
        ([10, 10, 0, 6, 0], core.REASON_OUT_OF_BLOCKS),  # growth 2 + 2 + 2 and a copy: 7
        ([0, 0, 0, 16, 12], core.REASON_OUT_OF_BLOCKS),  # growth 4 + 3
        ([1, 1, 1, 0, 0], core.REASON_ROW_TOO_LONG),  # row 2 is at M * P
        ([0, 0, 0, 17, 0], core.REASON_ROW_TOO_LONG),
        ([0, 0, 0, 2**31 - 1, 2**31 - 1], core.REASON_ROW_TOO_LONG),  # sums would overflow
        ([10, 10, 1, 16, 16], core.REASON_ROW_TOO_LONG),  # both: the row is named first
    ],
)
def test_failed_allocation_changes_nothing(new_tokens, reason):
    before = shared_state()
    after, allocation = allocate(before, per_row(new_tokens))
    assert not allocation.ok
    assert allocation.reason == reason
    assert allocation.num_new == 0
    assert not allocation.copy_src.any()
    assert not allocation.copy_dst.any()
    assert_same(before, after)


def test_allocation_may_take_the_last_block_as_a_copy():
    state, allocation = allocate(shared_state(), per_row([6, 10, 0, 8, 0]))
    # Growth 1 + 2 + 2 and one copy.
    assert allocation.ok
    assert state.num_free == 0
    assert allocation.copy_dst.tolist() == [0, 12, 0, 0, 0]
    core.audit(state)
    after, allocation = allocate(state, per_row([0, 0, 0, 0, 1]))
    assert allocation.reason == core.REASON_OUT_OF_BLOCKS
    assert_same(state, after)


def test_row_may_reach_exactly_the_width_of_its_table():
    state = grow(fresh(), 0, 16)
    assert tables(state)[1] == [1, 2, 3, 4]
    assert state.lengths[1] == M * P


def test_max_new_blocks_bounds_the_call():
    before = shared_state()
    # Three blocks: growth 1, growth 1, copy 1.
    after, allocation = allocate(before, per_row([3, 1, 0, 4, 0]), max_new_blocks=2)
    assert allocation.reason == core.REASON_OUT_OF_BLOCKS
    assert_same(before, after)
    # Two blocks: the same as without the bound.
    bounded, bounded_allocation = allocate(before, per_row([3, 1]), max_new_blocks=2)
    unbounded, unbounded_allocation = allocate(before, per_row([3, 1]))
    assert bounded_allocation.num_new == 2
    assert_same(bounded, unbounded)
    jax.tree.map(np.testing.assert_array_equal, bounded_allocation, unbounded_allocation)


def test_bound_of_no_block_leaves_room_for_tokens_that_need_none():
    before = grow(fresh(), 6)
    state, allocation = allocate(before, per_row([2]), max_new_blocks=0)
    assert allocation.ok
    assert_same(state, grow(before, 2))
    for new_tokens in ([3], [0, 1]):
        state, allocation = allocate(before, per_row(new_tokens), max_new_blocks=0)
        assert allocation.reason == core.REASON_OUT_OF_BLOCKS
        assert_same(state, before)
    # Nor is there one for a copy.
    shared = fork(before, (0, 1))
    state, allocation = allocate(shared, per_row([1]), max_new_blocks=0)
    assert allocation.reason == core.REASON_OUT_OF_BLOCKS
    assert_same(state, shared)


def test_many_rows_of_a_large_pool_get_the_blocks_that_the_ledger_gives_them(rng):
    # Sums over more than 32 and more than 32 x 32 entries take more than one level.
    max_seqs, width = 40, 30
    ledger = Ledger(num_blocks=1100, block_size=2, max_seqs=max_seqs, max_blocks_per_seq=width)
    copies = 0
    for _ in range(30):
        rows = rng.permutation(max_seqs)
        ledger.free(rows[:3].tolist())
        ledger.truncate({int(row): int(rng.integers(width)) for row in rows[3:6]})
        for child in [row for row in range(max_seqs) if not ledger.lengths[row]][:8]:
            ledger.fork(int(rows[7]), child)
        most = rng.choice([2, 12, 25])
        new_tokens = np.where(rng.random(max_seqs) < 0.8, rng.integers(0, most, max_seqs), 0)
        room = 2 * width - np.array(ledger.lengths)
        new_tokens = np.minimum(new_tokens, room).astype(np.int32)
        state, allocation = allocate(state_of(ledger), new_tokens)
        expected = ledger.allocate(dict(enumerate(new_tokens.tolist())))
        assert allocation.ok == expected.ok
        assert allocation.num_new == expected.num_new
        for row, pair in expected.copies.items():
            assert (allocation.copy_src[row], allocation.copy_dst[row]) == pair
        assert np.count_nonzero(allocation.copy_dst) == len(expected.copies)
        assert_same(state, state_of(ledger))
        copies += len(expected.copies)
    assert copies > 10
    core.audit(state)


def test_negative_token_count_sets_a_fault_and_counts_as_none():
    state, allocation = allocate(fresh(), per_row([-3, 2]))
    assert allocation.ok
    assert state.faults == core.FAULT_OUT_OF_RANGE
    assert_same(dataclasses.replace(state, faults=jnp.int32(0)), grow(fresh(), 0, 2))
