"""TPU attention, interpreted on CPU, against the oracle; no copy races with a read or a write."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cases import LAYER, SM_SCALE, TOLERANCES, Inputs, assert_close, build
from tests.kernels.races import assert_orderly
from tests.kernels.tpu_cases import (
    Entry,
    covering_entries,
    expected,
    run,
    typical_entries,
)

# Queries of prefill are scaled and rounded to bfloat16 once more: 2^-9 of each product, and logits
# of up to 15 here, where probabilities and logits then move by 1 or 2 in 100.
SCALED_QUERIES = {"rtol": 8e-3, "atol": 2.5e-2}

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
WINDOW = 4

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
TYPICAL = typical_entries()


def check(entry: Entry, got: tuple, want: tuple) -> None:
    (out, lse), is_rounded = got, entry.kernel == "prefill" and entry.dtype == "bfloat16"
    assert out.dtype == entry.dtype
    if is_rounded:
        np.testing.assert_allclose(out.astype(np.float32), want[0], **SCALED_QUERIES, strict=True)
    else:
        assert_close(out, want[0])
    assert (lse is not None) == entry.return_lse
    if lse is not None:
        tolerance = SCALED_QUERIES if is_rounded else TOLERANCES["float32"]
        np.testing.assert_allclose(lse, want[1], **tolerance, strict=True)


def assert_same(got: tuple, want: tuple) -> None:
    for left, right in zip(got, want, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=str(entry), marks=() if entry in TYPICAL else pytest.mark.exhaustive)
        for entry in covering_entries()
    ],
)
def test_what_is_live_is_read_and_nothing_else(entry, capsys):
    inputs = build(entry.case)
    got = run(entry, inputs)
    assert_orderly(capsys)
    check(entry, got, expected(entry, inputs))


@by_small_entry
def test_dead_slots_do_not_change_a_bit(entry, capsys):
    clean, *others = (build(entry.case, poison) for poison in (0.0, 1.0, 1e3, np.nan))
    want = run(entry, clean)
    check(entry, want, expected(entry, clean))
    for other in others:
        assert_same(run(entry, other), want)
    assert_orderly(capsys)


@by_small_entry
def test_table_entries_past_the_length_name_no_block(entry):
    inputs = build(entry.case)
    tables, width = inputs.block_tables.copy(), inputs.block_tables.shape[1]
    for row, length in enumerate(inputs.context_lens):
        num_used = -(-length // entry.block_size)
        tables[row, num_used:] = [2**30, -1, -(2**31), 10**6, 2**31 - 1][: width - num_used]
    assert_same(run(entry, inputs, block_tables=tables), run(entry, inputs))


@by_small_entry
def test_rows_of_nothing_are_zero(entry):
    inputs = build(entry.case)
    queries = {
        "decode_q": np.full_like(inputs.decode_q, np.nan),
        "prefill_q": np.full_like(inputs.prefill_q, np.nan),
    }
    nothing = {
        "context_lens": np.zeros_like(inputs.context_lens),
        "query_starts": np.zeros_like(inputs.query_starts),
    }
    for rows, lens in (((0, 0), {}), ((0, 8), nothing), ((0, 0), nothing)):
        out, lse = run(entry, inputs, rows, **lens, **queries)
        np.testing.assert_array_equal(out.astype(np.float32), 0.0)
        # Rows without tokens see the sink, rows that are not computed do not.
        sees_sink = entry.kernel == "decode" and entry.has_sinks and rows[1] > 0
        empty = inputs.sinks[None] if sees_sink else -np.inf
        np.testing.assert_array_equal(lse, np.broadcast_to(empty, lse.shape))


@by_small_entry
def test_rows_come_out_alike_in_any_order(entry):
    inputs = build(entry.case)
    order = np.array([6, 2, 5, 7, 1, 0, 4, 3])
    starts, lens = inputs.query_starts[:-1], np.diff(inputs.query_starts)
    tokens = np.concatenate([np.arange(starts[row], starts[row] + lens[row]) for row in order])
    prefill_q = inputs.prefill_q.copy()
    prefill_q[: len(tokens)] = inputs.prefill_q[tokens]
    got = run(
        entry,
        inputs,
        decode_q=inputs.decode_q[order],
        prefill_q=prefill_q,
        block_tables=inputs.block_tables[order],
        context_lens=inputs.context_lens[order],
        query_starts=np.array([0, *np.cumsum(lens[order])], np.int32),
    )
    want = run(entry, inputs)
    if entry.kernel == "decode":
        assert_same(got, [x[order] for x in want])
    else:
        # A token may lie elsewhere in its tile: its sums are its own.
        assert_same([x[: len(tokens)] for x in got], [x[tokens] for x in want])


def by_hand(rows: list[tuple[list[float], list[float], int]], sinks: list[float]) -> Inputs:
    """Rows of (logits, values, queries): the query is 1 in lane 0, the key holds the logit there.

    A value fills all lanes. The two query heads are alike but for their sinks.
    """
    inputs = build(DECODE.case, poison=np.nan)
    kv = np.full(inputs.cache.kv.shape, np.nan, np.float32)
    lens, counts = np.zeros((2, 8), np.int32)
    for row, (logits, values, num_queries) in enumerate(rows):
        block, length = inputs.block_tables[row, 0], len(logits)
        lens[row], counts[row] = length, num_queries
        kv[LAYER, block, 0, :length] = 0.0
        kv[LAYER, block, 0, :length, 0] = np.array(logits) / SM_SCALE
        kv[LAYER, block, 1, :length] = np.array(values)[:, None]
    decode_q, prefill_q = np.zeros_like(inputs.decode_q), np.zeros_like(inputs.prefill_q)
    decode_q[..., 0] = prefill_q[..., 0] = 1.0
    return dataclasses.replace(
        inputs,
        decode_q=decode_q,
        prefill_q=prefill_q,
        cache=dataclasses.replace(inputs.cache, kv=jnp.asarray(kv)),
        sinks=np.array(sinks, np.float32),
        context_lens=lens,
        query_starts=np.array([0, *np.cumsum(counts)], np.int32),
    )


@pytest.mark.parametrize("entry", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_cases_worked_by_hand(entry):
    ln3 = np.log(3.0)
    rows = [
        ([0.0], [8.0], 1),
        ([0.0, 0.0], [2.0, 6.0], 1),
        ([0.0, ln3], [2.0, 6.0], 1),
        # A window of 4 hides the first three, whose logits and values are the largest.
        ([50.0, 60.0, 70.0, 0.0, 0.0, 0.0, 0.0], [1e6, 1e6, 1e6, 1.0, 2.0, 3.0, 10.0], 1),
    ]
    # The sink of head 0 has the logit of a key, 0; that of head 1 is as good as none.
    out, lse = run(entry, by_hand(rows, [0.0, -1e9]))
    # One key: its value, and half of it beside an equal sink. Two equal keys: (2 + 6) / 2, and
    # 8 / 3 with the sink. Weights 1 and 3: (2 + 18) / 4 and / 5. Four equal keys: 16 / 4 and / 5.
    want = np.array([[4.0, 8.0], [8 / 3, 4.0], [4.0, 5.0], [3.2, 4.0]])
    np.testing.assert_allclose(out[:4], np.repeat(want[..., None], 128, axis=2), rtol=1e-6)
    weights = np.array([[2.0, 1.0], [3.0, 2.0], [5.0, 4.0], [5.0, 4.0]])
    np.testing.assert_allclose(lse[:4], np.log(weights), rtol=1e-6, atol=1e-6)


def test_a_window_is_the_same_in_every_split_of_a_prompt():
    """Values are powers of two, so a plain sum of those seen tells which they are."""
    row = ([0.0] * 9, [2.0**t for t in range(9)], 0)

    def seen(entry, stops, num_queries):
        """Keys that the last queries of rows of the given lengths see."""
        inputs = by_hand([row] * len(stops), [-1e9, -1e9])
        starts = np.array([0, *np.cumsum(num_queries)], np.int32)
        lens = np.array([*stops, *[0] * (8 - len(stops))], np.int32)
        starts = np.pad(starts, (0, 9 - len(starts)), mode="edge")
        out, lse = run(entry, inputs, context_lens=lens, query_starts=starts)
        sums = out[..., 0] * np.exp(lse)
        for query in range(sum(num_queries)):
            total = round(float(sums[query, 0]))
            yield [t for t in range(9) if total >> t & 1]

    want = [list(range(max(0, last + 1 - WINDOW), last + 1)) for last in range(9)]
    assert list(seen(PREFILL, [9], [9])) == want
    assert list(seen(PREFILL, [3, 9], [3, 6])) == want
    assert list(seen(PREFILL, [1, 2, 7, 9], [1, 1, 5, 2])) == want
    assert list(seen(DECODE, [4, 5, 6, 7, 8, 9], [1] * 6)) == want[3:]
    assert list(seen(DECODE, [1, 2, 3, 4], [1] * 4)) == want[:4]
