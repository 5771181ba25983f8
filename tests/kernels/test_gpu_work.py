"""Work lists of GPU kernels: every key and every token is somebody's, once."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gpu.work import decode_work, prefill_work

# Sizes are the same for all examples, so that few programs compile.
ROWS, UNIT, ALIGN = 7, 16, 8
SLOTS = (ROWS + 1, ROWS + 60)
NUM_TOKENS, TILES = 64, (1, 5, 8)

lengths = st.lists(
    st.one_of(
        st.integers(0, 200),
        st.sampled_from([0, 1, UNIT - 1, UNIT, UNIT + 1]),
        st.integers(0, 2**27),
    ),
    min_size=ROWS,
    max_size=ROWS,
)
# How many tokens of each row are new, and how many are in front of the rows.
new_tokens = st.lists(st.integers(0, NUM_TOKENS // (ROWS + 1)), min_size=ROWS, max_size=ROWS)
half = settings(max_examples=50, deadline=None)


@functools.cache
def decode_lists(window: int | None):
    """A list for every number of slots, and for ranges that begin anywhere and at blocks."""
    return jax.jit(
        lambda lens: {
            (num_slots, align): decode_work(lens, UNIT, window, num_slots=num_slots, align=align)
            for num_slots, align in itertools.product(SLOTS, (1, ALIGN))
        }
    )


def ranges_of(work, num_slots: int) -> list[list[tuple[int, int]]]:
    """(begin, end) of the ranges of every row; slots that are not used hold nothing."""
    begins, ends, offsets = map(np.asarray, (work.begins, work.ends, work.offsets))
    assert work.rows.shape == begins.shape == ends.shape == (num_slots,)
    assert work.rows.dtype == begins.dtype == ends.dtype == offsets.dtype == np.int32
    assert (offsets[0], len(offsets)) == (0, ROWS + 1)
    assert offsets[-1] <= num_slots
    slots = [range(a, b) for a, b in itertools.pairwise(offsets.tolist())]
    for row, own in enumerate(slots):
        assert work.rows[own.start : own.stop].tolist() == [row] * len(own)
    np.testing.assert_array_equal(begins[offsets[-1] :], ends[offsets[-1] :])
    # They name rows nevertheless, because programs may look.
    assert 0 <= np.min(work.rows) <= np.max(work.rows) < ROWS
    return [[(int(begins[slot]), int(ends[slot])) for slot in own] for own in slots]


@pytest.mark.parametrize("window", [None, 1, 100], ids=lambda w: f"window_{w}")
@half
@given(lens=lengths)
def test_ranges_cover_the_keys_that_are_seen_once_and_in_order(window, lens):
    lows = [0 if window is None else max(n - window, 0) for n in lens]
    for (num_slots, align), work in decode_lists(window)(np.array(lens, np.int32)).items():
        starts = [low // align * align for low in lows]
        units = sum(-(-(n - start) // UNIT) for n, start in zip(lens, starts, strict=True))
        most = max(-(-units // (num_slots - ROWS)), 1) * UNIT
        for length, low, start, own in zip(
            lens, lows, starts, ranges_of(work, num_slots), strict=True
        ):
            # None is empty, and where one ends the next one begins.
            assert all(begin < end for begin, end in own)
            assert [low, *(end for _, end in own)] == [*(begin for begin, _ in own), length]
            # All of a row are of one length, the last and its first block excepted, and none is
            # longer than an equal share of all keys.
            sizes = [end - begin for begin, end in [(start, end) for _, end in own[:1]] + own[1:]]
            assert len(set(sizes[:-1])) <= 1
            assert all(size % UNIT == 0 for size in sizes[:-1])
            assert max(sizes, default=0) <= most
            assert min(sizes[:1]) >= sizes[-1] if sizes else length == low == 0
            assert all(begin % align == 0 for begin, _ in own[1:])


def test_one_long_row_fills_the_chip_and_many_are_not_split():
    lens = np.zeros(ROWS, np.int32)
    lens[2] = 60 * UNIT
    work = decode_lists(None)(lens)[ROWS + 60, 1]
    assert [len(own) for own in ranges_of(work, ROWS + 60)] == [0, 0, 60, 0, 0, 0, 0]
    work = decode_lists(None)(np.full(ROWS, 1000, np.int32))[ROWS + 1, 1]
    assert ranges_of(work, ROWS + 1) == [[(0, 1000)]] * ROWS


@functools.cache
def prefill_lists():
    """A list for every size of tiles."""
    return jax.jit(
        lambda lens, starts, first_row, num_rows: {
            tile: prefill_work(lens, starts, first_row, num_rows, tile, num_tokens=NUM_TOKENS)
            for tile in TILES
        }
    )


@half
@given(
    new=new_tokens,
    cached=st.lists(st.integers(0, 2**24), min_size=ROWS, max_size=ROWS),
    rows=st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)),
    front=st.integers(0, NUM_TOKENS // (ROWS + 1)),
)
def test_tiles_cover_the_packed_axis_once(new, cached, rows, front):
    first_row, num_rows = rows
    lens = np.add(cached, new, dtype=np.int32)
    starts = np.cumsum([front, *new], dtype=np.int32)
    # Row and position of every token; those of no computed row have none.
    owners = [(-1, 0)] * NUM_TOKENS
    for row in range(first_row, num_rows):
        for i in range(new[row]):
            owners[starts[row] + i] = (row, cached[row] + i)
    lists = prefill_lists()(lens, starts, jnp.int32(first_row), jnp.int32(num_rows))
    for tile, work in lists.items():
        arrays = work.rows, work.begins, work.ends, work.positions
        assert {x.dtype for x in arrays} == {np.dtype(np.int32)}
        assert {x.shape for x in arrays} == {(-(-NUM_TOKENS // tile) + ROWS + 2,)}
        used = []
        for row, begin, end, position in zip(*(x.tolist() for x in arrays), strict=True):
            assert 0 <= row < ROWS
            assert begin <= end <= begin + tile
            if begin == end:
                continue
            used += range(begin, end)
            if owners[begin][0] < 0:
                # As many positions below zero as tokens: no key is at or below the last one.
                assert position + (end - begin) <= 0
                assert {owner for owner, _ in owners[begin:end]} == {-1}
            else:
                tokens = [(row, position + i) for i in range(end - begin)]
                assert owners[begin:end] == tokens
                assert end - begin == tile or end == starts[row + 1]
        assert sorted(used) == list(range(NUM_TOKENS))


def test_the_longest_list_of_tiles_fits():
    # Every row, and what is around them, has a tile of which it fills one token.
    new, tile = np.full(ROWS, 6, np.int32), 5
    starts = np.cumsum([11, *new], dtype=np.int32)
    assert NUM_TOKENS - starts[-1] == 11
    work = prefill_lists()(new, starts, jnp.int32(0), jnp.int32(ROWS))[tile]
    assert np.sum(work.ends > work.begins) == 2 * ROWS + 6
    assert work.rows.shape[0] >= 2 * ROWS + 6
