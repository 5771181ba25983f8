"""What a state promises, where its tokens lie, and how it is traced."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.core import BlockState
from tests.core.transitions import (
    TRACES,
    M,
    P,
    S,
    allocate,
    fit,
    fork,
    free,
    free_rows,
    fresh,
    grow,
    ledger_of,
    needed,
    per_row,
    random_state,
    shared_state,
    slot_mapping,
    translate,
    truncate,
)


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
