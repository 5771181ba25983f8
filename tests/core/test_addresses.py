"""What a state promises, where its tokens lie, and how it is traced."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.core import BlockState
from tests.core.transitions import (
    COMPILED,
    ENTRIES,
    IDS,
    TRACES,
    M,
    N,
    P,
    S,
    allocate,
    assert_same,
    fit,
    fork,
    free,
    fresh,
    grow,
    ledger_of,
    needed,
    padded,
    per_row,
    random_state,
    reindex,
    release,
    retain,
    retained_state,
    share,
    share_arrays,
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
        state = truncate(fork(state, (row, row + 1)), r0=max(1, count - 1))
        rows = np.full(8, row, np.int32)
        slot_mapping(state, rows, np.arange(8, dtype=np.int32))
        translate(state, np.int32(row), np.arange(3, dtype=np.int32))
        block = int(state.block_tables[row, 0])
        state = free(retain(state, *[block] * count), row)
        state = reindex(share(state, (row, [block], 1)), (row, row + 1), (row + 1, row))
        return free(release(state, *[block] * count), row, row + 1)

    state = use_all(state, 0, 5)
    before = TRACES.copy()
    assert len(before) == 12
    for row, count in [(1, 3), (2, 6), (3, 4), (0, 1)]:
        state = use_all(state, row, count)
    assert before == TRACES
    core.audit(state)
    assert state.num_free == N


def test_transitions_map_over_a_batch_of_states(rng):
    states, retained = zip(*[retained_state(rng) for _ in range(3)], strict=True)
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    new_tokens = rng.integers(0, 7, (3, S), dtype=np.int32)
    rows = rng.random((3, S)) < 0.5
    rows[:, S - 1] = True  # empty, and so free to share
    entries = [share_arrays((S - 1, blocks, len(blocks) * P)) for blocks in retained]
    shares = [np.stack(arrays) for arrays in zip(*entries, strict=True)]
    # Some of these are out of range, padding, or name a block that nobody owns.
    pairs = rng.integers(0, S + 2, (3, 2, ENTRIES), dtype=np.int32)
    ids = np.array([padded([*blocks, 0, int(rng.integers(N + 2))], IDS, 0) for blocks in retained])

    def use_all(apply, state, new_tokens, rows, shares, pairs, ids):
        grown, allocation = apply["allocate"](state, new_tokens)
        freed = apply["free"](grown, rows)
        shared = apply["share"](freed, *shares)
        moved = apply["fork"](apply["reindex"](apply["retain"](shared, ids), *pairs), *pairs)
        released = apply["truncate"](apply["release"](moved, ids), new_tokens)
        return grown, allocation, freed, shared, moved, released

    plain = {name: getattr(core, name) for name in COMPILED}
    mapped = jax.jit(jax.vmap(functools.partial(use_all, plain)))
    args = (new_tokens, rows, shares, pairs, ids)
    results = mapped(batch, *args)
    oks, faults = [], []
    for i, state in enumerate(states):
        one = use_all(COMPILED, state, *jax.tree.map(lambda array, i=i: array[i], args))
        batched = jax.tree.map(lambda leaf, i=i: leaf[i], results)
        jax.tree.map(np.testing.assert_array_equal, batched, one)
        oks.append(bool(one[1].ok))
        faults.append(int(one[-1].faults))
    assert len(set(oks)) == 2, "one state should be short of blocks and another not"
    assert len(set(faults)) > 1, "faults of one state must not reach another"


TRANSITIONS = {
    "allocate": lambda state, ids, mask: core.allocate(state, ids),
    "bounded": lambda state, ids, mask: core.allocate(state, ids, max_new_blocks=2),
    "free": lambda state, ids, mask: core.free(state, mask),
    "fork": lambda state, ids, mask: core.fork(state, ids, ids),
    "share": lambda state, ids, mask: core.share(state, ids, jnp.zeros((S, M), jnp.int32), ids),
    "reindex": lambda state, ids, mask: core.reindex(state, ids, ids),
    "retain": lambda state, ids, mask: core.retain(state, ids),
    "release": lambda state, ids, mask: core.release(state, ids),
    "truncate": lambda state, ids, mask: core.truncate(state, ids),
    "needed": lambda state, ids, mask: core.needed(state, ids),
    "fit": lambda state, ids, mask: core.fit(state, ids),
    "slot_mapping": lambda state, ids, mask: core.slot_mapping(state, ids, ids),
    "translate": lambda state, ids, mask: core.translate(state, ids, ids),
}


@pytest.mark.parametrize("name", TRANSITIONS)
def test_dtypes_stay_32_bit_under_x64(name):
    with jax.enable_x64(True):
        ids, mask = np.zeros(S, np.int32), np.zeros(S, bool)
        leaves = jax.tree.leaves(jax.eval_shape(TRANSITIONS[name], fresh(), ids, mask))
    assert {leaf.dtype.itemsize for leaf in leaves} <= {1, 4}


def test_history_is_the_same_under_x64():
    def history():
        state, states = fresh(), []
        for transition in [
            lambda state: grow(state, 6, 9),
            lambda state: fork(state, (0, 2), (1, 4)),
            lambda state: retain(state, 1, 2, 2, 4),
            lambda state: grow(state, 1, 1, 1),
            lambda state: reindex(state, (0, 1), (1, 0), (2, 4)),
            lambda state: share(state, (3, [4, 2], 6)),
            lambda state: truncate(state, r1=2, r4=5),
            lambda state: grow(state, 0, 1, 0, 1),
            lambda state: release(state, 2, 4, 1),
            lambda state: free(state, 0, 1, 2, 3),
            lambda state: free(release(state, 2), 4),
        ]:
            state = transition(state)
            states.append(jax.device_get(state))
        return states

    with jax.enable_x64(True):
        wide = history()
    for one, other in zip(wide, history(), strict=True):
        assert_same(one, other)
        leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        assert all(leaf.dtype == expected.dtype for leaf, expected in leaves)
    core.audit(wide[-1])
    assert wide[-1].num_free == N
