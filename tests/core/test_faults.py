"""An entry that breaks a rule: core sets its bit, the ledger raises, and nothing else changes."""

import dataclasses
from collections import Counter

import jax
import pytest

from paged_jax import core
from paged_jax.plan import Plan
from tests.core.faults import apply_to_core, apply_to_ledger, bad_entries
from tests.core.transitions import (
    S,
    assert_same,
    external,
    ledger_of,
    retained_state,
    shared_state,
)

BITS = {
    "allocate": {core.FAULT_OUT_OF_RANGE},
    "truncate": {core.FAULT_OUT_OF_RANGE},
    "fork": {core.FAULT_OUT_OF_RANGE, core.FAULT_OCCUPIED},
    "share": {core.FAULT_OUT_OF_RANGE, core.FAULT_OCCUPIED, core.FAULT_FREE_BLOCK},
    "reindex": {core.FAULT_OUT_OF_RANGE},  # and FAULT_REPEATED, which takes two entries
    "retain": {core.FAULT_OUT_OF_RANGE, core.FAULT_FREE_BLOCK},
    "release": {core.FAULT_OUT_OF_RANGE, core.FAULT_FREE_BLOCK},
}


REFUSAL = r"row \d|row -|block \d|block -|num_tokens|block_ids|new_tokens"


@pytest.mark.parametrize("transition", BITS)
def test_bad_entry_sets_its_bit_and_changes_nothing_else(transition):
    before = jax.device_get(shared_state())
    for bad in bad_entries(before, transition):
        after = apply_to_core(before, transition, bad.entry)
        assert after.faults == bad.bit, bad
        assert_same(dataclasses.replace(after, faults=before.faults), before)


@pytest.mark.parametrize("transition", BITS)
def test_bad_entry_raises_in_the_ledger_and_changes_nothing(transition):
    state = shared_state()
    ledger, untouched = ledger_of(state), ledger_of(state)
    for bad in bad_entries(state, transition):
        with pytest.raises(ValueError, match=REFUSAL):
            apply_to_ledger(ledger, transition, bad.entry)
        assert vars(ledger) == vars(untouched), bad


def test_every_transition_refuses_every_kind_of_bad_entry_in_random_states(rng):
    tried = Counter()
    for _ in range(25):
        state, retained = retained_state(rng)
        before, untouched = jax.device_get(state), ledger_of(state)
        for bad in bad_entries(before):
            after = apply_to_core(state, bad.transition, bad.entry)
            assert after.faults == bad.bit, bad
            assert_same(dataclasses.replace(after, faults=before.faults), before)
            ledger = ledger_of(before)
            with pytest.raises(ValueError, match=REFUSAL):
                apply_to_ledger(ledger, bad.transition, bad.entry)
            assert vars(ledger) == vars(untouched), bad
            tried[bad.transition, bad.bit] += 1
        core.audit(state, external(*retained))
    assert set(tried) == {(name, bit) for name, bits in BITS.items() for bit in bits}
    assert min(tried.values()) > 10


def test_a_later_bit_joins_those_that_are_set():
    state = apply_to_core(shared_state(), "fork", (0, 2))
    state = apply_to_core(state, "retain", (12,))
    state = apply_to_core(state, "reindex", (3, 0), (3, 1))
    assert state.faults == core.FAULT_OCCUPIED | core.FAULT_FREE_BLOCK | core.FAULT_REPEATED
    state = apply_to_core(state, "fork", (-1, 4))
    assert state.faults == 15
    # A call without a fault takes no bit away.
    assert apply_to_core(state, "fork", (0, 4)).faults == 15


@pytest.mark.parametrize("row", [-1, S])
def test_the_ledger_knows_no_row_outside_its_own(row):
    ledger = ledger_of(shared_state())
    before = (list(ledger.free_blocks), list(ledger.lengths))
    for change in (
        lambda: ledger.allocate({0: 1, row: 1}),
        lambda: ledger.free([0, row]),
        lambda: ledger.truncate({0: 1, row: 1}),
    ):
        with pytest.raises(ValueError, match=rf"row {row} is outside 0..{S - 1}"):
            change()
    assert (ledger.free_blocks, ledger.lengths) == before


def test_a_plan_changes_a_row_once():
    ledger = ledger_of(shared_state())
    for part in ({"reindexed": ((1, 0), (1, 2))}, {"truncated": ((0, 1), (0, 2))}):
        with pytest.raises(ValueError, match="a plan must not change a row twice"):
            ledger.apply(Plan(**part))
