"""TPU attention, interpreted on CPU, against the oracle; no copy races with a read or a write."""

import numpy as np
import pytest

from tests.kernels import conformance
from tests.kernels.cases import build
from tests.kernels.conformance import check, expected
from tests.kernels.races import assert_orderly
from tests.kernels.tpu_cases import TABLE, Entry

# One head with two queries, and blocks that are half a chunk; the cheapest to compile. Those of
# float32 have a window of 4 and sinks.
SMALL = {
    (kernel, dtype): Entry(
        kernel,
        head_dim=128,
        group=2,
        num_kv_heads=1,
        block_size=128,
        dtype=dtype,
        window="small" if dtype == "float32" else "all",
        has_sinks=dtype == "float32",
        edge="parts" if kernel == "decode" else "whole",
    )
    for kernel in ("decode", "prefill")
    for dtype in ("float32", "bfloat16")
}
DECODE, PREFILL = SMALL["decode", "float32"], SMALL["prefill", "float32"]

by_small_entry = pytest.mark.parametrize(
    "entry",
    [
        pytest.param(
            entry,
            id="-".join(key),
            marks=() if entry.dtype == "float32" else pytest.mark.exhaustive,
        )
        for key, entry in SMALL.items()
    ],
)


@pytest.mark.parametrize("entry", conformance.halves(TABLE.entries, TABLE.typical))
def test_what_is_live_is_read_and_nothing_else(entry, capsys):
    inputs = build(entry.case)
    got = TABLE.run(entry, inputs)
    assert_orderly(capsys)
    check(entry, got, expected(entry, inputs))


@by_small_entry
def test_dead_slots_do_not_change_a_bit(entry, capsys):
    conformance.dead_slots_do_not_change_a_bit(TABLE.run, entry, (1.0, 1e3, np.nan))
    assert_orderly(capsys)


@by_small_entry
def test_table_entries_past_the_length_name_no_block(entry):
    conformance.table_entries_past_the_length_name_no_block(TABLE.run, entry)


@by_small_entry
def test_rows_of_nothing_are_zero(entry):
    conformance.rows_of_nothing_are_zero(TABLE.run, entry)


@by_small_entry
def test_rows_come_out_alike_in_any_order(entry):
    conformance.rows_come_out_alike_in_any_order(TABLE.run, entry)


@pytest.mark.parametrize("entry", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_cases_worked_by_hand(entry):
    conformance.cases_worked_by_hand_are_right(TABLE.run, entry)


def test_a_window_is_the_same_in_every_split_of_a_prompt():
    conformance.a_window_is_the_same_in_every_split_of_a_prompt(TABLE.run, DECODE, PREFILL)
