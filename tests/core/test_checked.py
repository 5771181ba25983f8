"""The wrappers for the host: an error that names the entry, and otherwise what core returns."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.core import checked
from tests.core import transitions
from tests.core.faults import apply_to_core, arguments, bad_entries
from tests.core.transitions import (
    IDS,
    M,
    N,
    S,
    assert_same,
    fresh,
    grow,
    padded,
    per_row,
    retained_state,
    share_arrays,
    shared_state,
)

ALL = ["allocate", "free", "truncate", "fork", "share", "reindex", "retain", "release"]
ENTRYWISE = ["truncate", "fork", "share", "reindex", "retain", "release"]
RULES = {
    core.FAULT_OUT_OF_RANGE: "is out of range: rows are 0..4, blocks 1..12, tokens of a row 0..16",
    core.FAULT_OCCUPIED: "names a row that holds tokens; free it first",
    core.FAULT_FREE_BLOCK: "names a block that nobody owns",
    core.FAULT_REPEATED: "names a row or block twice",
}
# Padding that stands before a bad entry, so that its number is not 0.
PADDING = {
    "fork": [(S, 0), (0, S)],
    "share": [(S, [-1], 0), (S, [], -1)],
    "reindex": [(S, 0), (0, S)],
    "retain": [(0,), (0,)],
    "release": [(0,), (0,)],
    "truncate": [],  # the row is the number
}


def test_every_transition_has_a_wrapper():
    for name in ALL:
        assert callable(getattr(checked, name))
        assert getattr(checked, name) is not getattr(core, name)


@pytest.mark.parametrize("transition", ENTRYWISE)
def test_bad_entry_is_named_with_its_values_and_its_rule(transition):
    state = shared_state()
    for bad in bad_entries(state, transition):
        entries = [*PADDING[transition], bad.entry]
        number = bad.entry[0] if transition == "truncate" else 2
        message = rf"^{transition}: entry {number} \(.*\) {re.escape(RULES[bad.bit])}$"
        with pytest.raises(ValueError, match=message):
            getattr(checked, transition)(state, *arguments(transition, *entries))


@pytest.mark.parametrize(
    ("transition", "args", "message"),
    [
        ("fork", ([0, 0, S], [3, 2, S]), "entry 1 (parents[1] = 0, children[1] = 2) names a row"),
        ("fork", ([0, 7, S], [3, 4, S]), "entry 1 (parents[1] = 7, children[1] = 4) is out"),
        # The second entry is bad only because the first was carried out.
        ("fork", ([0, 0, S], [3, 3, S]), "entry 1 (parents[1] = 0, children[1] = 3) names a row"),
        (
            "share",
            share_arrays((S, [], 0), (3, [1, 9], 8)),
            "entry 1 (rows[1] = 3, block_ids[1] = [1 9 0 0], num_tokens[1] = 8) names a block",
        ),
        ("reindex", ([0, 1, 0], [1, 0, 2]), "entry 2 (rows[2] = 0, sources[2] = 2) names a row"),
        ("retain", ([1, 2, 13, 0, 0, 0],), "entry 2 (block_ids[2] = 13) is out"),
        # Block 3 has one owner: the second naming is one too many.
        ("release", ([3, 1, 3, 0, 0, 0],), "entry 2 (block_ids[2] = 3) names a block"),
        ("truncate", ([9, -2, 9, 9, 9],), "entry 1 (lengths[1] = -2) is out"),
        ("allocate", ([0, -3, 1, 0, 0],), "new_tokens[1] (-3) must be at least 0"),
    ],
    ids=lambda value: value if value in ALL else "",
)
def test_first_of_several_entries_that_breaks_a_rule_is_named(transition, args, message):
    with pytest.raises(ValueError, match=re.escape(f"{transition}: {message}")):
        getattr(checked, transition)(shared_state(), *args)


def test_entry_that_breaks_two_rules_is_named_with_both():
    # Row 2 holds tokens, and nobody owns block 9.
    message = "holds tokens; free it first and names a block that nobody owns"
    with pytest.raises(ValueError, match=message):
        checked.share(shared_state(), *share_arrays((2, [9], 4)))


def test_wrappers_return_what_core_returns(rng):
    allocated = set()
    for _ in range(20):
        state, retained = retained_state(rng)
        lengths = np.asarray(state.lengths)
        new_tokens = np.where(rng.random(S) < 0.5, rng.integers(0, 8, S), 0).astype(np.int32)
        got, got_allocation = checked.allocate(state, new_tokens)
        expected, allocation = transitions.allocate(state, new_tokens)
        assert_same(got, expected)
        jax.tree.map(np.testing.assert_array_equal, got_allocation, allocation)
        allocated.add(int(allocation.reason))

        rows = rng.random(S) < 0.5
        assert_same(checked.free(state, rows), transitions.free_rows(state, rows))
        parent, child = int(np.argmax(lengths)), int(np.argmin(lengths))
        entries = {
            "truncate": [(row, int(rng.integers(0, M * 4))) for row in range(S)],
            "reindex": [(row, int(rng.integers(S))) for row in (4, 0, 2)],
            "retain": [(block,) for block in retained],
            "release": [(block,) for block in retained],
        }
        if lengths[child] == 0:
            entries["fork"] = [(parent, child)]
            ids = np.asarray(state.block_tables)[parent]
            entries["share"] = [(child, ids[ids > 0].tolist(), int(lengths[parent]))]
        for transition, some in entries.items():
            after = getattr(checked, transition)(state, *arguments(transition, *some))
            assert_same(after, apply_to_core(state, transition, *some))
    assert allocated == {0, core.REASON_OUT_OF_BLOCKS, core.REASON_ROW_TOO_LONG}


def test_lists_are_taken_as_they_are():
    state = checked.retain(grow(fresh(), 6), [1, 2, 2, 0, 0, 0])
    state = checked.free(state, [True, False, False, False, False])
    state = checked.share(state, [3, S, S], share_arrays((3, [1, 2], 6))[1].tolist(), [6, 0, 0])
    state = checked.reindex(state, [0, 3, S], [3, 0, S])
    assert transitions.tables(state, 1, 2, 2) == [[1, 2], [], [], [], []]
    state = checked.release(state, [2, 1, 2, 0, 0, 0])
    state = checked.truncate(checked.fork(state, [0, S, S], [4, S, S]), [4, 9, 9, 9, 9])
    assert transitions.tables(state) == [[1], [], [], [], [1, 2]]


def test_out_of_blocks_is_an_answer_and_not_an_error():
    before = shared_state()
    after, allocation = checked.allocate(before, per_row([0, 0, 0, 16, 16]))
    assert (bool(allocation.ok), int(allocation.reason)) == (False, core.REASON_OUT_OF_BLOCKS)
    assert_same(after, before)
    after, allocation = checked.allocate(before, per_row([0, 0, 1]))
    assert (bool(allocation.ok), int(allocation.reason)) == (False, core.REASON_ROW_TOO_LONG)
    assert_same(after, before)
    _, allocation = checked.allocate(before, per_row([0, 0, 0, 16]), max_new_blocks=3)
    assert allocation.reason == core.REASON_OUT_OF_BLOCKS


@pytest.mark.parametrize("transition", ENTRYWISE)
def test_bit_that_an_earlier_call_left_neither_hides_a_fault_nor_raises(transition):
    for bits in (core.FAULT_OUT_OF_RANGE, 15):
        state = dataclasses.replace(shared_state(), faults=jnp.int32(bits))
        for bad in bad_entries(state, transition):
            with pytest.raises(ValueError, match=re.escape(RULES[bad.bit])):
                getattr(checked, transition)(state, *arguments(transition, bad.entry))
        # Nothing is wrong with padding, and the old bits are still there.
        after = getattr(checked, transition)(state, *arguments(transition))
        assert_same(after, state)


def test_allocate_and_free_keep_an_earlier_bit():
    state = dataclasses.replace(shared_state(), faults=jnp.int32(core.FAULT_OCCUPIED))
    grown, _ = checked.allocate(state, per_row([1]))
    assert grown.faults == core.FAULT_OCCUPIED
    assert checked.free(grown, np.ones(S, bool)).faults == core.FAULT_OCCUPIED
    with pytest.raises(ValueError, match=r"new_tokens\[0\] \(-1\)"):
        checked.allocate(state, per_row([-1]))


def test_arguments_that_are_no_rows_or_ids_are_refused():
    state = shared_state()
    with pytest.raises(ValueError, match=r"new_tokens must have one entry per row \(5\)"):
        checked.allocate(state, [1, 2])
    with pytest.raises(ValueError, match=r"lengths must have one entry per row \(5\)"):
        checked.truncate(state, [1, 2])
    with pytest.raises(ValueError, match=r"free: rows must be bool\[5\], not int32\(1,\)"):
        checked.free(state, [2])
    with pytest.raises(ValueError, match="block_ids must be integers, not float64"):
        checked.retain(state, [1.0])
    with pytest.raises(ValueError, match="fork: arguments must have as many entries as each other"):
        checked.fork(state, [0], [3, 4])
    with pytest.raises(ValueError, match=r"'rows': 2, 'block_ids': 3, 'num_tokens': 3"):
        checked.share(state, [3, 4], *share_arrays()[1:])


def test_failed_call_leaves_the_state_as_it_was():
    state = shared_state()
    before = jax.device_get(state)
    with pytest.raises(ValueError, match="release: entry 5"):
        checked.release(state, padded([3, 4, 5, 6, 1], IDS, N + 1))
    assert_same(state, before)


def test_integers_that_do_not_fit_32_bits_are_refused():
    # 2^32 is row 0 once it is cut to 32 bits.
    with pytest.raises(ValueError, match="parents must fit 32 bits"):
        checked.fork(shared_state(), np.array([2**32]), [1])
    with pytest.raises(ValueError, match=r"parents must have 1 dimensions, not shape \(\)"):
        checked.fork(shared_state(), 0, 1)
    with pytest.raises(ValueError, match=r"block_ids \(1, 1\) must have shape \(1, 4\)"):
        checked.share(shared_state(), [4], [[1]], [8])


def test_empty_lists_change_nothing():
    state = shared_state()
    assert_same(checked.retain(state, []), state)
    assert_same(checked.fork(state, [], []), state)
    assert_same(checked.reindex(state, [], []), state)
