"""GPU attention in Triton, interpreted on CPU, against the oracle."""

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels.gpu import triton_decode, triton_prefill, triton_softmax
from tests.kernels import conformance
from tests.kernels.cases import TOLERANCES, build
from tests.kernels.conformance import assert_same, check, expected
from tests.kernels.table import call
from tests.kernels.triton_cases import TABLE, Entry

# One head with two queries and blocks of four; the cheapest to compile. Those of float32 have a
# window of 4 and sinks.
SMALL = {
    (kernel, dtype): Entry(
        kernel,
        head_dim=16,
        group=2,
        num_kv_heads=1,
        block_size=4,
        dtype=dtype,
        window="small" if dtype == "float32" else "all",
        has_sinks=dtype == "float32",
        num_programs=9 if kernel == "decode" else 1,
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
# Four heads a row, of which some are missing; pools that are wider or narrower than queries.
OTHERS = (
    Entry("decode", 32, 5, 1, 4, "float32", "bfloat16", "packed", "long", num_programs=9),
    Entry("prefill", 32, 2, 5, 4, "bfloat16", "float32", "packed", tile_rows=64),
)


@pytest.mark.parametrize(
    "entry",
    conformance.halves((*TABLE.entries, *OTHERS), TABLE.typical | {*OTHERS}),
)
def test_what_is_live_is_read_and_nothing_else(entry):
    inputs = build(entry.case)
    check(entry, TABLE.run(entry, inputs), expected(entry, inputs))


@by_small_entry
def test_dead_slots_do_not_change_a_bit(entry):
    poisons = (1.0, 1e3, np.nan, np.inf, -np.inf)
    conformance.dead_slots_do_not_change_a_bit(TABLE.run, entry, poisons)


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


@pytest.mark.parametrize("entry", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_large_logits_do_not_overflow(entry):
    inputs = build(entry.case)
    inputs = dataclasses.replace(
        inputs, decode_q=inputs.decode_q * 1e3, prefill_q=inputs.prefill_q * 1e3
    )
    check(entry, TABLE.run(entry, inputs), expected(entry, inputs))


# The longest row that one program has, where as many share the keys: three tiles, one tile.
@pytest.mark.parametrize(
    ("num_programs", "longest"), [pytest.param(9, 48, marks=pytest.mark.exhaustive), (60, 16)]
)
def test_programs_that_share_a_row_compute_what_one_does(num_programs, longest):
    entry = Entry("decode", 16, 2, 1, 4, has_cap=True, has_sinks=True)
    inputs = build(entry.case)
    want, got = (TABLE.run(e, inputs) for e in (entry, entry._replace(num_programs=num_programs)))
    check(entry, want, expected(entry, inputs))
    is_split = inputs.context_lens > longest
    assert 0 < np.sum(is_split) < len(is_split)
    assert_same([x[~is_split] for x in got], [x[~is_split] for x in want])
    # Sums of parts are joined in another order.
    assert np.any(got[0][is_split] != want[0][is_split])
    for left, right in zip(got, want, strict=True):
        np.testing.assert_allclose(left, right, **TOLERANCES["float32"])


def reads_of(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[set[int]]]:
    """Positions that tiles of keys gather, by row of the table."""
    found, attend = {}, triton_softmax.attend

    def note(row, tokens):
        found.setdefault(int(row), []).append(set(np.asarray(tokens).tolist()))

    def noted(refs, shape, queries, row, kv_head, tokens, seen, state):
        jax.debug.callback(note, row, tokens)
        return attend(refs, shape, queries, row, kv_head, tokens, seen, state)

    for module in (triton_decode, triton_prefill):
        monkeypatch.setattr(module, "attend", noted)
    # Not the program of another test, which notes nothing.
    call(TABLE.program(entry), entry, build(entry.case))
    jax.effects_barrier()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("window", ["all", "long"])
def test_decode_reads_what_a_row_sees_once(window, monkeypatch):
    entry = Entry("decode", 16, 2, 1, 4, window=window, num_programs=9, rows="some")
    lens, first = entry.case.context_lens, entry.case.sliding_window or max(entry.case.context_lens)
    reads = reads_of(entry, monkeypatch)
    want = {row: n for row, n in enumerate(lens) if n and row < len(lens) - 1}
    assert reads.keys() == want.keys()
    for row, tiles in reads.items():
        seen = set(range(max(want[row] - first, 0), want[row]))
        assert set.union(*tiles) == seen
        assert sum(map(len, tiles)) == len(seen)


@pytest.mark.parametrize("window", ["all", pytest.param("long", marks=pytest.mark.exhaustive)])
def test_prefill_reads_no_slot_that_its_row_does_not_see(window, monkeypatch):
    """Tokens of no row, which come before and after those that are computed, read nothing."""
    entry = Entry("prefill", 16, 2, 1, 4, window=window, rows="some")
    case = entry.case
    reads = reads_of(entry, monkeypatch)
    first_row, num_rows = conformance.row_range(entry)
    assert reads.keys() == {row for row in range(first_row, num_rows) if case.query_lens[row]}
    for row, tiles in reads.items():
        length, first = case.context_lens[row], 0
        if case.sliding_window is not None:
            first = max(length - case.query_lens[row] + 1 - case.sliding_window, 0)
        assert set.union(*tiles) == set(range(first, length))
