"""The backend of plain XLA against the oracle, over the table of cases.

Those of TPU kernels are in test_tpu_conformance.py: a kernel has limits, and is interpreted here.
"""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import ops
from tests.kernels.cases import (
    BASE,
    CASES,
    LAYER,
    SM_SCALE,
    Case,
    Inputs,
    assert_close,
    build,
    expected_decode,
    expected_prefill,
)

POISONS = {"nan": np.nan, "inf": np.inf}
TRACES = Counter()


@functools.cache
def compiled(name: str, backend: str, sliding_window: int | None, soft_cap: float | None):
    """The op under jit, so that other values in the same shapes run the same program."""
    op = getattr(ops, name)

    def traced(*args, **arrays):
        TRACES[name] += 1
        return op(
            *args,
            **arrays,
            sm_scale=SM_SCALE,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            return_lse=True,
            backend=backend,
        )

    return jax.jit(traced)


def decode_with_lse(
    backend: str, inputs: Inputs, num_rows: int | None = None, case: Case = BASE
) -> tuple[np.ndarray, np.ndarray]:
    rows = inputs.block_tables.shape[0] if num_rows is None else num_rows
    out, lse = compiled("paged_decode", backend, case.sliding_window, case.soft_cap)(
        inputs.decode_q,
        inputs.cache,
        jnp.int32(LAYER),
        inputs.block_tables,
        inputs.context_lens,
        sinks=inputs.sinks,
        num_rows=jnp.int32(rows),
    )
    return np.asarray(out), np.asarray(lse)


def prefill_with_lse(
    backend: str,
    inputs: Inputs,
    first_row: int = 0,
    num_rows: int | None = None,
    case: Case = BASE,
) -> tuple[np.ndarray, np.ndarray]:
    rows = inputs.block_tables.shape[0] if num_rows is None else num_rows
    out, lse = compiled("paged_prefill", backend, case.sliding_window, case.soft_cap)(
        inputs.prefill_q,
        inputs.cache,
        jnp.int32(LAYER),
        inputs.block_tables,
        inputs.context_lens,
        inputs.query_starts,
        sinks=inputs.sinks,
        first_row=jnp.int32(first_row),
        num_rows=jnp.int32(rows),
    )
    return np.asarray(out), np.asarray(lse)


def decode(backend: str, inputs: Inputs, num_rows: int | None = None) -> np.ndarray:
    return decode_with_lse(backend, inputs, num_rows)[0]


def prefill(
    backend: str, inputs: Inputs, first_row: int = 0, num_rows: int | None = None
) -> np.ndarray:
    return prefill_with_lse(backend, inputs, first_row, num_rows)[0]


def permuted(inputs: Inputs, order: list[int]) -> tuple[Inputs, np.ndarray]:
    """The rows in another order, and where each token went."""
    starts = inputs.query_starts
    tokens = [np.arange(starts[row], starts[row + 1]) for row in order]
    padding = np.arange(starts[-1], inputs.prefill_q.shape[0])
    moved = np.concatenate([*tokens, padding])
    inputs = dataclasses.replace(
        inputs,
        decode_q=inputs.decode_q[np.array(order)],
        prefill_q=inputs.prefill_q[moved],
        block_tables=inputs.block_tables[order],
        context_lens=inputs.context_lens[order],
        query_starts=np.array([0, *np.cumsum([len(row) for row in tokens])], np.int32),
    )
    return inputs, moved


pytestmark = pytest.mark.parametrize("backend", ["xla"])
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.mark.parametrize("poison", POISONS)
@by_case
def test_decode_reads_what_is_live_and_nothing_else(backend: str, case: Case, poison: str):
    inputs = build(case, POISONS[poison])
    out, lse = decode_with_lse(backend, inputs, case=case)
    assert out.dtype == inputs.decode_q.dtype
    for got, expected in zip((out, lse), expected_decode(inputs, case), strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("poison", POISONS)
@by_case
def test_prefill_reads_what_is_live_and_nothing_else(backend: str, case: Case, poison: str):
    inputs = build(case, POISONS[poison])
    out, lse = prefill_with_lse(backend, inputs, case=case)
    assert out.dtype == inputs.prefill_q.dtype
    for got, expected in zip((out, lse), expected_prefill(inputs, case), strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("context_lens", [(0, 5, 0, 3, 0), (0, 0, 0, 0, 0)])
def test_rows_without_tokens_are_zero(backend, context_lens):
    inputs = build(BASE.with_lens(context_lens, (0, 4, 0, 3, 0) if any(context_lens) else (0,) * 5))
    # As many tokens as in BASE, so that it is the same program.
    prefill_q = np.full_like(build(BASE).prefill_q, np.nan)
    prefill_q[: inputs.prefill_q.shape[0]] = inputs.prefill_q
    inputs = dataclasses.replace(inputs, prefill_q=prefill_q)
    assert_close(decode(backend, inputs), expected_decode(inputs)[0])
    assert_close(prefill(backend, inputs), expected_prefill(inputs)[0])
    np.testing.assert_array_equal(decode(backend, inputs)[np.array(context_lens) == 0], 0.0)


ORDERS = [[4, 3, 2, 1, 0], [1, 2, 3, 4, 0], [3, 0, 4, 2, 1]]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_order_of_rows_does_not_matter(backend, order):
    inputs = build(BASE.with_lens((3, 4, 5, 9, 1), (3, 2, 4, 4, 1)))
    moved_inputs, moved = permuted(inputs, order)
    out = decode(backend, inputs)
    assert_close(out, expected_decode(inputs)[0])
    np.testing.assert_array_equal(decode(backend, moved_inputs), out[np.array(order)])
    out = prefill(backend, inputs)
    assert_close(out, expected_prefill(inputs)[0])
    np.testing.assert_array_equal(prefill(backend, moved_inputs), out[moved])


@pytest.mark.parametrize("first", [126, 127, 128])
def test_a_window_may_begin_beside_the_edge_of_a_chunk(backend, first):
    """Each row's first query sees from this position on, where chunks of 128 meet."""
    [case] = [case for case in CASES if case.name == "window4_block4_group3"]
    lens = tuple(first + case.sliding_window - 1 + count for count in case.query_lens)
    case = case.with_lens(lens, case.query_lens)
    inputs = build(case)
    decoded, _ = decode_with_lse(backend, inputs, case=case)
    assert_close(decoded, expected_decode(inputs, case)[0])
    prefilled, _ = prefill_with_lse(backend, inputs, case=case)
    assert_close(prefilled, expected_prefill(inputs, case)[0])


def test_dead_slots_do_not_change_a_bit(backend):
    clean, *others = (build(BASE, poison) for poison in (0.0, 1e3, -1e30, np.nan, -np.inf))
    for other in others:
        np.testing.assert_array_equal(decode(backend, other), decode(backend, clean))
        np.testing.assert_array_equal(prefill(backend, other), prefill(backend, clean))


def test_large_logits_do_not_overflow(backend):
    inputs = build(BASE)
    inputs = dataclasses.replace(
        inputs, decode_q=inputs.decode_q * 1e3, prefill_q=inputs.prefill_q * 1e3
    )
    assert_close(decode(backend, inputs), expected_decode(inputs)[0])
    assert_close(prefill(backend, inputs), expected_prefill(inputs)[0])


def test_chunks_that_start_inside_a_block_equal_one_pass(backend):
    """13 tokens of the last row in one pass, then 7 and 6 (position 7 is inside block 1)."""
    whole = build(BASE.with_lens((1, 0, 0, 0, 13), (1, 0, 0, 0, 13)))
    queries = whole.prefill_q[1:14]
    expected = prefill(backend, whole)[1:14]
    parts = []
    for first, stop in ((0, 7), (7, 13)):
        lens = np.array([1, 0, 0, 0, stop], np.int32)
        starts = np.array([0, 1, 1, 1, 1, 1 + stop - first], np.int32)
        prefill_q = np.full_like(whole.prefill_q, np.nan)
        prefill_q[0], prefill_q[1 : 1 + stop - first] = whole.prefill_q[0], queries[first:stop]
        part = dataclasses.replace(
            whole, prefill_q=prefill_q, context_lens=lens, query_starts=starts
        )
        parts.append(prefill(backend, part)[1 : 1 + stop - first])
    assert_close(np.concatenate(parts), expected)


def test_rows_outside_the_range_are_zero_and_ranges_do_not_retrace(backend):
    inputs = build(BASE)
    all_rows, all_tokens = decode(backend, inputs), prefill(backend, inputs)
    row_of_token = np.searchsorted(
        inputs.query_starts[1:], np.arange(all_tokens.shape[0]), side="right"
    )
    before = TRACES.copy()
    for first_row, num_rows in [(0, 3), (1, 4), (2, 2), (0, 0), (4, 5)]:
        is_row = np.arange(5)[:, None, None] < num_rows
        expected = np.where(is_row, all_rows, 0.0)
        np.testing.assert_array_equal(decode(backend, inputs, num_rows), expected)
        is_own = ((row_of_token >= first_row) & (row_of_token < num_rows))[:, None, None]
        expected = np.where(is_own, all_tokens, 0.0)
        np.testing.assert_array_equal(prefill(backend, inputs, first_row, num_rows), expected)
    assert before == TRACES
