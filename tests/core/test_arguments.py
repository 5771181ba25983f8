"""Arguments that would be misread are refused, and wide integers do not wrap."""

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from tests.core.transitions import (
    N,
    P,
    S,
    assert_same,
    fresh,
    grow,
    shared_state,
    truncate,
)

ONES = np.ones(S, np.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: core.allocate(s, 3), r"new_tokens must have one entry per row \(5\)"),
        (lambda s: core.allocate(s, [3]), r"new_tokens must have one entry per row \(5\)"),
        (lambda s: core.allocate(s, jnp.ones(S)), "new_tokens must be integers, not float32"),
        (lambda s: core.allocate(s, ONES, max_new_blocks=-1), r"max_new_blocks \(-1\) must be at"),
        (lambda s: core.needed(s, [1, 2]), "new_tokens must have one entry per row"),
        (lambda s: core.fit(s, 1), "new_tokens must have one entry per row"),
        (lambda s: core.free(s, jnp.array([1])), r"rows must be bool\[5\], not int32\(1,\)"),
        (lambda s: core.free(s, np.zeros(2, bool)), r"rows must be bool\[5\], not bool\(2,\)"),
        (lambda s: core.truncate(s, jnp.array(2)), "lengths must have one entry per row"),
        (lambda s: core.fork(s, [0, 1], [2]), "lists must have one dimension and equal length"),
        (lambda s: core.reindex(s, [0, 1], [1]), "lists must have one dimension and equal length"),
        (lambda s: core.retain(s, [1.5]), "block_ids must be integers, not float64"),
        (lambda s: core.release(s, [[1]]), "lists must have one dimension"),
        (lambda s: core.audit(s, external=[0]), r"external must be \[13\], not \(1,\)"),
        (lambda s: core.describe(s, written=[0]), r"written must be \[5\], not \(1,\)"),
        (lambda s: core.describe(s, row=0, block=1), "row and block must not both be given"),
        (
            lambda s: core.make_batch(s, tokens=[1, 2], row_ids=[0, 1], query_lens=[1]),
            r"query_lens \(1,\) must be as many as row_ids \(2,\)",
        ),
    ],
)
def test_shapes_and_kinds_that_would_broadcast_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(shared_state())


def test_sizes_must_be_integers():
    with pytest.raises(TypeError):
        core.create_block_state(12.0, 4, 5, 4)


def test_wide_integers_saturate():
    """Cut to 32 bits, 2^40 would be 0, and 2^32 - 40 would be -40."""
    state = shared_state()
    assert core.as_i32(np.array([2**40, -(2**40), 7]), "x").tolist() == [2**31 - 1, -(2**31), 7]
    assert core.as_i32(jnp.array([2**32 - 1], jnp.uint32), "x").tolist() == [2**31 - 1]
    assert core.as_i32(np.array([200], np.uint8), "x").dtype == jnp.int32
    for keep in (2**40, 2**32 - 40, 2**31):
        assert_same(core.truncate(state, np.full(S, keep)), state)
    after = core.fork(state, np.array([2**32]), np.array([4]))
    assert after.faults == core.FAULT_OUT_OF_RANGE
    block, _ = core.translate(state, np.array([2**32]), np.array([0]))
    assert block.tolist() == [0]


def test_lists_and_eager_numpy_are_taken():
    state, allocation = core.allocate(fresh(), [6, 0, 0, 0, 0])
    assert allocation.ok
    state = core.fork(state, np.array([0]), [1])
    assert_same(core.truncate(state, [4, 99, 99, 99, 99]), truncate(state, r0=4))
    assert core.slot_mapping(state, [0, S], [5, 0]).tolist() == [2 * P + 1, 0]


@pytest.mark.parametrize("padding", [S, -1, S + 3])
def test_padding_may_stand_between_the_rows_of_a_batch(padding):
    state = grow(fresh(), 1, 0, 1)
    batch = core.make_batch(
        state, tokens=[7, 9], row_ids=[0, padding, 2], query_lens=[1, 0, 1], num_decode=0
    )
    assert batch.num_rows == 3
    assert batch.last_tokens.tolist() == [0, 0, 1]
    assert (batch.tokens.tolist(), batch.rows.tolist()) == ([7, 9], [0, 2])
    assert batch.row_ids.tolist() == [0, S, 2]
    # Where every row decodes, token i is row i.
    batch = core.make_batch(state, tokens=[7, 0, 9], row_ids=[0, padding, 2], query_lens=[1, 1, 1])
    assert batch.tokens.tolist() == [7, 0, 9]
    assert batch.rows.tolist() == [0, S, 2]
    assert batch.context_lens.tolist() == [1, 0, 1]
    assert batch.slots.tolist() == [1 * P, 0, 2 * P]


def test_ids_outside_the_pool_are_refused_by_swaps():
    cache = core.create_kv_cache(
        core.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=2), N, P, "float32"
    )
    for ids in ([-1], [N + 1]):
        with pytest.raises(ValueError, match=rf"id {ids[0]} must be in 0..{N}"):
            core.swap_out(cache, ids)
        with pytest.raises(ValueError, match=rf"id {ids[0]} must be in 0..{N}"):
            core.swap_in(cache, ids, core.swap_out(cache, [1]))


def test_a_layer_outside_the_pool_is_refused():
    cache = core.create_kv_cache(
        core.CacheSpec(num_layers=1, num_kv_heads=1, head_dim=2), N, P, "float32"
    )
    new = jnp.ones((1, 1, 2))
    for layer in (-1, 1):
        with pytest.raises(ValueError, match=rf"layer \({layer}\) must be in 0..0"):
            core.write(cache, layer, new, new, [4])
        with pytest.raises(ValueError, match=rf"layer \({layer}\) must be in 0..0"):
            core.gather(cache, layer, np.array([1], np.int32), 1)
