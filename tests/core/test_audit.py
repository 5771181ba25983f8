"""Every law of the audit, broken by hand, names the block that is wrong."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.core import AuditError, BlockState


def healthy() -> BlockState:
    """Rows 0 and 2 share block 3, row 1 holds 1 and 2 and block 5 is of row 0; 4, 6, 7 are free."""
    return BlockState(
        free_blocks=jnp.array([7, 4, 6, 0, 0, 0, 0, 0], jnp.int32),
        num_free=jnp.int32(3),
        refcounts=jnp.array([0, 1, 1, 2, 0, 1, 0, 0], jnp.int32),
        block_tables=jnp.array([[3, 5, 0], [1, 2, 0], [3, 0, 0], [0, 0, 0]], jnp.int32),
        lengths=jnp.array([6, 8, 4, 0], jnp.int32),
        faults=jnp.int32(0),
        block_size=4,
    )


def broken(**changes) -> BlockState:
    """The healthy state with elements replaced: `refcounts={3: 1}` or `num_free=2`."""
    state = healthy()
    fields = {}
    for name, change in changes.items():
        array = np.array(getattr(state, name))
        if isinstance(change, dict):
            for index, value in change.items():
                array[index] = value
        else:
            array = np.array(change, array.dtype)
        fields[name] = jnp.asarray(array)
    return dataclasses.replace(state, **fields)


def test_healthy_state_passes():
    core.audit(healthy())
    core.audit(healthy(), external=np.zeros(8, np.int32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"faults": 2}, "fault bits are set: 0b10"),
        ({"num_free": -1}, "num_free (-1) is outside 0..7"),
        ({"num_free": 8}, "num_free (8) is outside 0..7"),
        ({"free_blocks": {1: 7}}, "block 7: stands more than once on the free stack (times 2)"),
        ({"free_blocks": {1: 0}}, "block 0: an id outside 1..7 is on the stack"),
        ({"free_blocks": {1: 8}}, "block 8: an id outside 1..7 is on the stack"),
        ({"free_blocks": {1: -4}}, "block -4: an id outside 1..7 is on the stack"),
        ({"num_free": 2}, "block 6: stands on the stack above num_free (2)"),
        ({"free_blocks": {2: 0}, "num_free": 2}, "block 6: is neither free nor owned"),
        ({"free_blocks": {4: 4}}, "block 4: stands on the stack above num_free (3)"),
        (
            {"free_blocks": {3: 2}, "num_free": 4},
            "block 2: is free and has owners (count 1)",
        ),
        (
            {"refcounts": {3: 1}},
            "block 3: its count differs from its owners (count 1, owners 2)",
        ),
        (
            {"refcounts": {4: 1}},
            "block 4: its count differs from its owners (count 1, owners 0)",
        ),
        (
            {"refcounts": {5: -1}},
            "block 5: its count differs from its owners (count -1, owners 1)",
        ),
        (
            {"refcounts": {0: 1}},
            "block 0: its count differs from its owners (count 1, owners 0)",
        ),
        # Row 2 takes a free block as its own without a count.
        (
            {"block_tables": {(2, 0): 6}},
            "block 3: its count differs from its owners (count 2, owners 1)",
        ),
        ({"lengths": {0: 4}}, "block 5: row 0 of length 4 must hold 1 blocks"),
        ({"lengths": {1: 9}}, "block 0: row 1 of length 9 must hold 3 blocks"),
        ({"lengths": {1: -1}}, "row 1 of length -1"),
        ({"lengths": {1: 13}}, "row 1 of length 13 must hold 4 blocks"),
        ({"block_tables": {(1, 1): 0}}, "block 0: row 1 of length 8 must hold 2 blocks"),
        ({"block_tables": {(1, 2): 4}}, "block 4: row 1 of length 8 must hold 2 blocks"),
        ({"block_tables": {(1, 1): -2}}, "block -2: row 1 of length 8"),
        ({"block_tables": {(1, 1): 8}}, "block 8: row 1 of length 8"),
        ({"block_tables": {(3, 0): 4}}, "block 4: row 3 of length 0 must hold 0 blocks"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value).replace(" ", ""),
)
def test_broken_law_is_named_with_its_block(changes, message):
    with pytest.raises(AuditError, match=re.escape(message)):
        core.audit(broken(**changes))


def test_external_owners_are_counted():
    held = np.zeros(8, np.int32)
    held[5] = 1
    core.audit(broken(refcounts={5: 2}), external=held)
    message = r"block 5: its count differs from its owners \(count 2, owners 1\)"
    with pytest.raises(AuditError, match=message):
        core.audit(broken(refcounts={5: 2}))
    message = r"block 5: its count differs from its owners \(count 1, owners 2\)"
    with pytest.raises(AuditError, match=message):
        core.audit(healthy(), external=held)


def test_block_owned_only_from_outside_is_not_lost():
    held = np.zeros(8, np.int32)
    held[6] = 1
    state = broken(free_blocks={2: 0}, num_free=2, refcounts={6: 1})
    core.audit(state, external=held)
    with pytest.raises(AuditError, match="block 6"):
        core.audit(state)
