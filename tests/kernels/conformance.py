"""What every attention kernel must do, whatever its backend: checks of one entry of a table.

A table of a backend has entries with `kernel` ("decode" or "prefill"), `rows` ("all" or "some"),
`return_lse`, `has_sinks`, `case` and `tolerances`; `run` is `tests.kernels.table.Table.run`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cases import (
    LAYER,
    SM_SCALE,
    Case,
    Inputs,
    build,
    expected_decode,
    expected_prefill,
)

Run = Callable[..., tuple[np.ndarray, np.ndarray | None]]
"""run(entry, inputs, rows=None, **changed): outputs and log-sum-exp, see `Table.run`."""

WINDOW = 4
"""Of the entries that are worked by hand."""


def row_range(entry: Any) -> tuple[int, int]:
    """Rows that are computed; decode starts at the first."""
    num_rows = len(entry.case.context_lens)
    if entry.rows == "all":
        return 0, num_rows
    return (0 if entry.kernel == "decode" else 2), num_rows - 1


def expected(
    entry: Any, inputs: Inputs, rows: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What `run` must return, from the oracle."""
    first_row, num_rows = row_range(entry) if rows is None else rows
    if entry.kernel == "decode":
        out, lse = expected_decode(inputs, entry.case)
        is_own = np.arange(len(out)) < num_rows
    else:
        out, lse = expected_prefill(inputs, entry.case)
        token = np.arange(len(out))
        begin, end = inputs.query_starts[[first_row, num_rows]]
        is_own = (token >= begin) & (token < end)
    return np.where(is_own[:, None, None], out, 0.0), np.where(is_own[:, None], lse, -np.inf)


def check(entry: Any, got: tuple, want: tuple) -> None:
    """Compares outputs with the oracle's, and log-sum-exp if the entry asks for it."""
    (out, lse), (out_tolerance, lse_tolerance) = got, entry.tolerances
    assert out.dtype == entry.dtype
    np.testing.assert_allclose(out.astype(np.float32), want[0], **out_tolerance, strict=True)
    assert (lse is not None) == entry.return_lse
    if lse is not None:
        np.testing.assert_allclose(lse, want[1], **lse_tolerance, strict=True)


def halves(entries: Sequence[Any], fast: Set[Any]) -> list[Any]:
    """Entries as cases: the fast set, and of the others every second one marked "even" or "odd".

    .ci/run interprets one half with each end of JAX's range.
    """
    marks = ([pytest.mark.exhaustive, pytest.mark.even], [pytest.mark.exhaustive, pytest.mark.odd])
    return [
        pytest.param(entry, id=str(entry), marks=() if entry in fast else marks[i % 2])
        for i, entry in enumerate(entries)
    ]


def assert_same(got: Iterable, want: Iterable) -> None:
    """Bit for bit."""
    for left, right in zip(got, want, strict=True):
        np.testing.assert_array_equal(left, right)


def dead_slots_do_not_change_a_bit(run: Run, entry: Any, poisons: Sequence[float]) -> None:
    clean = build(entry.case, 0.0)
    want = run(entry, clean)
    check(entry, want, expected(entry, clean))
    for poison in poisons:
        assert_same(run(entry, build(entry.case, poison)), want)


def table_entries_past_the_length_name_no_block(run: Run, entry: Any) -> None:
    inputs = build(entry.case)
    tables, width = inputs.block_tables.copy(), inputs.block_tables.shape[1]
    for row, length in enumerate(inputs.context_lens):
        num_used = -(-length // entry.case.block_size)
        garbage = [2**30, -1, -(2**31), 10**6, 2**31 - 1]
        tables[row, num_used:] = np.resize(garbage, width - num_used)
    assert_same(run(entry, inputs, block_tables=tables), run(entry, inputs))


def rows_of_nothing_are_zero(run: Run, entry: Any) -> None:
    inputs = build(entry.case)
    num_rows = len(inputs.context_lens)
    queries = {
        "decode_q": np.full_like(inputs.decode_q, np.nan),
        "prefill_q": np.full_like(inputs.prefill_q, np.nan),
    }
    nothing = {
        "context_lens": np.zeros_like(inputs.context_lens),
        "query_starts": np.zeros_like(inputs.query_starts),
    }
    for rows, lens in (((0, 0), {}), ((0, num_rows), nothing), ((0, 0), nothing)):
        out, lse = run(entry, inputs, rows, **lens, **queries)
        np.testing.assert_array_equal(out.astype(np.float32), 0.0)
        # Rows without tokens see the sink, rows that are not computed do not.
        sees_sink = entry.kernel == "decode" and entry.has_sinks and rows[1] > 0
        empty = inputs.sinks[None] if sees_sink else -np.inf
        np.testing.assert_array_equal(lse, np.broadcast_to(empty, lse.shape))


def rows_come_out_alike_in_any_order(run: Run, entry: Any) -> None:
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


def by_hand(
    case: Case, rows: list[tuple[list[float], list[float], int]], sinks: list[float]
) -> Inputs:
    """Rows of (logits, values, queries): the query is 1 in lane 0, the key holds the logit there.

    A value fills all lanes. The two query heads of the one KV head are alike but for their sinks.
    """
    inputs = build(case, poison=np.nan)
    kv = np.full(inputs.cache.kv.shape, np.nan, np.float32)
    lens, counts = np.zeros((2, len(case.context_lens)), np.int32)
    for row, (logits, values, num_queries) in enumerate(rows):
        lens[row], counts[row] = len(logits), num_queries
        for token, (logit, value) in enumerate(zip(logits, values, strict=True)):
            block = inputs.block_tables[row, token // case.block_size]
            offset = token % case.block_size
            kv[LAYER, block, 0, offset] = 0.0
            kv[LAYER, block, 0, offset, 0] = logit / SM_SCALE
            kv[LAYER, block, 1, offset] = value
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


def cases_worked_by_hand_are_right(run: Run, entry: Any) -> None:
    """The entry has a window of `WINDOW` keys and sinks."""
    ln3 = np.log(3.0)
    rows = [
        ([0.0], [8.0], 1),
        ([0.0, 0.0], [2.0, 6.0], 1),
        ([0.0, ln3], [2.0, 6.0], 1),
        # A window of 4 hides the first three, whose logits and values are the largest.
        ([50.0, 60.0, 70.0, 0.0, 0.0, 0.0, 0.0], [1e6, 1e6, 1e6, 1.0, 2.0, 3.0, 10.0], 1),
    ]
    # The sink of head 0 has the logit of a key, 0; that of head 1 is as good as none.
    out, lse = run(entry, by_hand(entry.case, rows, [0.0, -1e9]))
    # One key: its value, and half of it beside an equal sink. Two equal keys: (2 + 6) / 2, and
    # 8 / 3 with the sink. Weights 1 and 3: (2 + 18) / 4 and / 5. Four equal keys: 16 / 4 and / 5.
    want = np.array([[4.0, 8.0], [8 / 3, 4.0], [4.0, 5.0], [3.2, 4.0]])
    want = np.repeat(want[..., None], entry.head_dim, axis=2)
    np.testing.assert_allclose(out[:4], want, rtol=1e-6)
    weights = np.array([[2.0, 1.0], [3.0, 2.0], [5.0, 4.0], [5.0, 4.0]])
    np.testing.assert_allclose(lse[:4], np.log(weights), rtol=1e-6, atol=1e-6)


def a_window_is_the_same_in_every_split_of_a_prompt(run: Run, decode: Any, prefill: Any) -> None:
    """Values are powers of two, so a plain sum of those seen tells which they are."""
    row = ([0.0] * 9, [2.0**t for t in range(9)], 0)

    def seen(entry: Any, stops: list[int], num_queries: list[int]) -> Iterator[list[int]]:
        """Keys that the last queries of rows of the given lengths see."""
        inputs = by_hand(entry.case, [row] * len(stops), [-1e9, -1e9])
        num_rows = len(inputs.context_lens)
        starts = np.array([0, *np.cumsum(num_queries)], np.int32)
        lens = np.array([*stops, *[0] * (num_rows - len(stops))], np.int32)
        starts = np.pad(starts, (0, num_rows + 1 - len(starts)), mode="edge")
        out, lse = run(entry, inputs, context_lens=lens, query_starts=starts)
        sums = out[..., 0] * np.exp(lse)
        for query in range(sum(num_queries)):
            total = round(float(sums[query, 0]))
            yield [t for t in range(9) if total >> t & 1]

    want = [list(range(max(0, last + 1 - WINDOW), last + 1)) for last in range(9)]
    assert list(seen(prefill, [9], [9])) == want
    assert list(seen(prefill, [3, 9], [3, 6])) == want
    assert list(seen(prefill, [1, 2, 7, 9], [1, 1, 5, 2])) == want
    assert list(seen(decode, [4, 5, 6, 7, 8, 9], [1] * 6)) == want[3:]
    assert list(seen(decode, [1, 2, 3, 4], [1] * 4)) == want[:4]
