"""Transitions of `BlockState`: block ids worked out by hand, laws on random states.

All tests share one pool shape, N = 12, P = 4, S = 5, M = 4, so that each transition is compiled
once.
"""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


# Creation


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


# Allocation order


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


# Copy-on-write


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


# All or nothing


def shared_state() -> BlockState:
    """Rows 0 and 1 share [1, 2] (6 tokens); row 2 holds blocks 3 to 6; 6 blocks are free."""
    return fork(grow(fresh(), 6, 0, 16), (0, 1))


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


def test_negative_token_count_sets_a_fault_and_counts_as_none():
    state, allocation = allocate(fresh(), per_row([-3, 2]))
    assert allocation.ok
    assert state.faults == core.FAULT_OUT_OF_RANGE
    assert_same(dataclasses.replace(state, faults=jnp.int32(0)), grow(fresh(), 0, 2))


# Freeing


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


# Forking


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


# Truncation


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


# needed and fit


def test_needed_counts_growth_and_copies():
    # Rows 0 and 1 share block 2, which has two tokens: the lower writer keeps it.
    state = shared_state()
    assert needed(state, per_row([3, 1, 0, 4, 5])).tolist() == [1, 1, 0, 1, 2]
    assert needed(state, per_row([3, 0, 0, 4, 5])).tolist() == [2, 0, 0, 1, 2]
    assert needed(state, per_row([0, 0, 0, 0, 0])).tolist() == [0, 0, 0, 0, 0]
    # A row that cannot fit needs more than its table holds; the sum does not overflow.
    assert needed(fresh(), per_row([2**31 - 1])).tolist() == [M + 1, 0, 0, 0, 0]


def test_fit_passes_over_a_row_and_tries_the_next():
    state = grow(fresh(), 16, 16, 8)  # 2 blocks free
    # Row 2 would take 1, row 3 asks for 3 and is passed over, row 4 takes the last.
    assert fit(state, per_row([0, 0, 4, 12, 4])).tolist() == [True, True, True, False, True]


def test_row_past_its_table_never_fits_and_costs_nothing():
    state = grow(fresh(), 16)
    expected = [False, False, True, True, True]
    assert fit(state, per_row([1, 17, 16, 16, 0])).tolist() == expected
    assert fit(state, per_row([2**31 - 1, 2**31 - 1, 16, 16, 0])).tolist() == expected


def test_needed_and_fit_agree_with_brute_force_on_random_states(rng):
    passed_over = 0
    for _ in range(60):
        state = random_state(rng)
        ledger = ledger_of(state)
        new_tokens = rng.integers(0, 12, S, dtype=np.int32) * rng.integers(0, 2, S, dtype=np.int32)
        wanted = dict(enumerate(new_tokens.tolist()))
        assert needed(state, np.minimum(new_tokens, M * P - state.lengths)).tolist() == [
            ledger.needed({**wanted, row: min(count, M * P - ledger.lengths[row])})[row]
            for row, count in wanted.items()
        ]
        accepted = {}
        for row, count in wanted.items():
            tried = {**accepted, row: count}
            is_short = ledger.lengths[row] + count <= M * P
            if is_short and sum(ledger.needed(tried).values()) <= ledger.num_free:
                accepted = tried
        fits = np.asarray(fit(state, new_tokens))
        assert np.flatnonzero(fits).tolist() == list(accepted)
        passed_over += not fits.all()
        after, allocation = allocate(state, np.where(fits, new_tokens, 0).astype(np.int32))
        assert allocation.ok
        core.audit(after)
    assert passed_over > 10


# Logical to physical


def scattered() -> BlockState:
    """Row 0 holds 12 tokens in blocks 5, 2, 9; the last row is full, so that wraps would show."""
    block_tables = np.zeros((S, M), np.int32)
    block_tables[0, :3] = 5, 2, 9
    block_tables[S - 1] = 10, 11, 7, 12
    return dataclasses.replace(
        fresh(), block_tables=jnp.asarray(block_tables), lengths=jnp.array([12, 0, 0, 0, 16])
    )


def test_positions_translate_through_the_table():
    block, offset = translate(scattered(), np.int32(0), np.array([0, 6, 11], np.int32))
    assert block.tolist() == [5, 2, 9]
    assert offset.tolist() == [0, 2, 3]


def test_block_not_held_translates_to_the_null_block():
    rows = np.array([0, 1, 0, 0, -1, S], np.int32)
    positions = np.array([12, 0, 16, 2**31 - 1, 0, 0], np.int32)
    block, offset = translate(scattered(), rows, positions)
    assert block.tolist() == [0] * 6
    assert offset.tolist() == [0, 0, 0, 3, 0, 0]


def test_slots_are_block_times_size_plus_offset():
    rows = np.array([0, 0, 0, S - 1, S - 1, 0, 0, 0], np.int32)
    positions = np.array([0, 6, 11, 0, 15, 3, 4, 8], np.int32)
    expected = [5 * 4, 2 * 4 + 2, 9 * 4 + 3, 10 * 4, 12 * 4 + 3, 5 * 4 + 3, 2 * 4, 9 * 4]
    assert slot_mapping(scattered(), rows, positions).tolist() == expected


def test_padding_and_positions_outside_the_row_go_to_slot_0():
    rows = np.array([S, -1, S + 1, 1000, 0, 0, 0, 1], np.int32)
    positions = np.array([0, 0, 0, 0, -1, 16, 2**31 - 1, 0], np.int32)
    assert slot_mapping(scattered(), rows, positions).tolist() == [0] * 8
    # Position 11 lies in a block that the row holds, but past a length of 10.
    state = dataclasses.replace(scattered(), lengths=jnp.array([10, 0, 0, 0, 16]))
    rows = np.array([0, 0, 0, 0, S, S, S, S], np.int32)
    positions = np.array([9, 10, 11, 12, 0, 1, 2, 3], np.int32)
    assert slot_mapping(state, rows, positions).tolist() == [37, 0, 0, 0, 0, 0, 0, 0]


# Tracing


def test_values_never_retrace():
    state = fresh()

    def use_all(state: BlockState, row: int, count: int) -> BlockState:
        new_tokens = per_row([0] * row + [count])
        fit(state, new_tokens)
        needed(state, new_tokens)
        state, _ = allocate(state, new_tokens)
        state = truncate(fork(state, (row, row + 1)), r0=count - 1)
        rows = np.full(8, row, np.int32)
        slot_mapping(state, rows, np.arange(8, dtype=np.int32))
        translate(state, np.int32(row), np.arange(3, dtype=np.int32))
        return free(state, row)

    state = use_all(state, 0, 5)
    before = TRACES.copy()
    assert len(before) == 8
    for row, count in [(1, 3), (2, 16), (3, 9), (0, 1)]:
        state = use_all(state, row, count)
    assert before == TRACES


def test_transitions_map_over_a_batch_of_states(rng):
    states = [random_state(rng) for _ in range(3)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    new_tokens = rng.integers(0, 7, (3, S), dtype=np.int32)
    rows = rng.random((3, S)) < 0.5

    @jax.jit
    @jax.vmap
    def both(state: BlockState, new_tokens: jax.Array, rows: jax.Array):
        grown, allocation = core.allocate(state, new_tokens)
        return grown, allocation, core.free(grown, rows)

    results = both(batch, new_tokens, rows)
    oks = []
    for i, state in enumerate(states):
        grown, allocation = allocate(state, new_tokens[i])
        one = grown, allocation, free_rows(grown, rows[i])
        batched = jax.tree.map(lambda leaf, i=i: leaf[i], results)
        jax.tree.map(np.testing.assert_array_equal, batched, one)
        oks.append(bool(allocation.ok))
    assert len(set(oks)) == 2, "one state should be short of blocks and another not"


@pytest.mark.parametrize(
    "transition",
    [
        lambda state, ids, mask: core.allocate(state, ids),
        lambda state, ids, mask: core.allocate(state, ids, max_new_blocks=2),
        lambda state, ids, mask: core.free(state, mask),
        lambda state, ids, mask: core.fork(state, ids, ids),
        lambda state, ids, mask: core.truncate(state, ids),
        lambda state, ids, mask: core.needed(state, ids),
        lambda state, ids, mask: core.slot_mapping(state, ids, ids),
        lambda state, ids, mask: core.translate(state, ids, ids),
    ],
    ids=["allocate", "bounded", "free", "fork", "truncate", "needed", "slot_mapping", "translate"],
)
def test_dtypes_stay_32_bit_under_x64(transition):
    with jax.enable_x64(True):
        ids, mask = np.zeros(S, np.int32), np.zeros(S, bool)
        leaves = jax.tree.leaves(jax.eval_shape(transition, fresh(), ids, mask))
    assert {leaf.dtype.itemsize for leaf in leaves} <= {1, 4}
