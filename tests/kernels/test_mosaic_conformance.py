"""GPU attention in Mosaic GPU, interpreted on CPU, against the oracle; no copy races with a read.

Interpret mode replaces `mma`, and knows no registers or layouts: that the kernels compile is for
`tests/aot` to show.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from tests.kernels import conformance
from tests.kernels.cases import TOLERANCES, build
from tests.kernels.conformance import WINDOW, by_hand, check, expected
from tests.kernels.mosaic_cases import TABLE, Entry

pytestmark = [
    pytest.mark.skipif(
        not compat.has_mosaic_gpu(), reason="this JAX is older than the backend's first, 0.12"
    ),
    # The interpreter multiplies dead keys, which may be NaN, before their products are masked.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
]

# One head with two queries and blocks of eight; the cheapest to compile.
DECODE, PREFILL = (
    Entry(
        kernel,
        head_dim=64,
        group=2,
        num_kv_heads=1,
        block_size=8,
        window="small",
        has_sinks=True,
        num_programs=4 if kernel == "decode" else 1,
    )
    for kernel in ("decode", "prefill")
)
by_kernel = pytest.mark.parametrize("entry", [DECODE, PREFILL], ids=["decode", "prefill"])


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(
            entry, id=str(entry), marks=() if entry in TABLE.typical else pytest.mark.exhaustive
        )
        for entry in TABLE.entries
    ],
)
def test_what_is_live_is_read_and_nothing_else(entry):
    inputs = build(entry.case)
    check(entry, TABLE.run(entry, inputs), expected(entry, inputs))


@by_kernel
def test_dead_slots_do_not_change_a_bit(entry):
    conformance.dead_slots_do_not_change_a_bit(TABLE.run, entry, (1e3, np.nan))


@by_kernel
def test_table_entries_past_the_length_name_no_block(entry):
    conformance.table_entries_past_the_length_name_no_block(TABLE.run, entry)


@by_kernel
def test_rows_of_nothing_are_zero(entry):
    conformance.rows_of_nothing_are_zero(TABLE.run, entry)


@by_kernel
def test_cases_worked_by_hand(entry):
    """The entry has a window of four keys and sinks; all numbers are exact in bfloat16."""
    assert entry.case.sliding_window == WINDOW
    rows = [
        ([0.0], [8.0], 1),
        ([0.0, 0.0], [2.0, 7.0], 1),
        # The window hides the first three, whose logits and values are the largest.
        ([50.0, 60.0, 70.0, 0.0, 0.0, 0.0, 0.0], [1e6, 1e6, 1e6, 1.0, 2.0, 3.0, 14.0], 1),
    ]
    # The sink of head 0 has the logit of a key, 0; that of head 1 is as good as none.
    inputs = by_hand(entry.case, rows, [0.0, -1e9])
    kv = inputs.cache.kv.astype(jnp.bfloat16)
    out, lse = TABLE.run(
        entry, dataclasses.replace(inputs, cache=dataclasses.replace(inputs.cache, kv=kv))
    )
    # Values over the number of keys, which the sink makes one more.
    want = np.array([[8 / 2, 8 / 1], [9 / 3, 9 / 2], [20 / 5, 20 / 4]])
    want = np.repeat(want[..., None], entry.head_dim, axis=2)
    np.testing.assert_array_equal(out[:3].astype(np.float32), want)
    weights = np.array([[2.0, 1.0], [3.0, 2.0], [5.0, 4.0]])
    np.testing.assert_allclose(lse[:3], np.log(weights), **TOLERANCES["float32"])


@by_kernel
def test_large_logits_do_not_overflow(entry):
    inputs = build(entry.case)
    decode_q, prefill_q = (
        (q * jnp.bfloat16(1e3)).astype(q.dtype) for q in (inputs.decode_q, inputs.prefill_q)
    )
    inputs = dataclasses.replace(inputs, decode_q=decode_q, prefill_q=prefill_q)
    check(entry, TABLE.run(entry, inputs), expected(entry, inputs))


def test_programs_that_share_a_row_compute_what_one_does():
    entry = Entry("decode", 64, 2, 1, 8, has_cap=True, has_sinks=True)
    inputs = build(entry.case)
    want, got = (TABLE.run(e, inputs) for e in (entry, entry._replace(num_programs=4)))
    is_split = inputs.context_lens > entry.block_k
    assert 0 < np.sum(is_split) < len(is_split)
    assert np.any(got[1][is_split] != want[1][is_split])
    for left, right in zip(got, want, strict=True):
        np.testing.assert_array_equal(left[~is_split], right[~is_split])
        np.testing.assert_allclose(
            left.astype(np.float32), right.astype(np.float32), **TOLERANCES["bfloat16"]
        )
