"""Work lists of TPU kernels against lists made in plain Python, and the arithmetic around them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tpu.heads import LANES, from_pool_heads, heads_of, per_head, to_pool_heads
from pallas_kernels.tpu.softmax import lane_sums, pick_rows, widen
from pallas_kernels.tpu.work import block_of, decode_work, prefill_work, row_of

# Sizes are the same for all examples, so that few programs compile.
ROWS, TOKENS, MAX_LEN = 7, 8, 60
MAX_ITEMS = ROWS * -(-MAX_LEN // TOKENS)
NUM_TOKENS, TILE = 64, 8
MAX_TILES = NUM_TOKENS // TILE + ROWS

lengths = st.lists(
    st.one_of(
        st.integers(0, MAX_LEN),
        st.sampled_from([0, 1, TOKENS - 1, TOKENS, TOKENS + 1, MAX_LEN]),
    ),
    min_size=ROWS,
    max_size=ROWS,
)
# How many tokens are new, row by row, and how many of the packed axis are left over.
new_tokens = st.lists(
    st.one_of(st.integers(0, NUM_TOKENS // ROWS), st.just(0), st.sampled_from([1, TILE])),
    min_size=ROWS,
    max_size=ROWS,
)
half = settings(max_examples=50, deadline=None)


def pairs(items: np.ndarray) -> list[tuple[int, int]]:
    """(row, block) of every item."""
    return list(zip((items >> 16).tolist(), (items & 0xFFFF).tolist(), strict=True))


@functools.cache
def decode_lists(window: int | None):
    """Lists for one, two and three cores."""
    return jax.jit(
        lambda lens: [
            decode_work(lens, TOKENS, window, max_items=MAX_ITEMS, num_cores=num_cores)
            for num_cores in (1, 2, 3)
        ]
    )


def blocks_seen(length: int, window: int | None) -> list[int]:
    """Blocks that hold a key that the last of `length` tokens sees, one key after the other."""
    first = 0 if window is None else length - window
    return sorted({key // TOKENS for key in range(length) if key >= first})


@pytest.mark.parametrize("window", [None, 1, 11], ids=lambda w: f"window_{w}")
@half
@given(lens=lengths)
def test_decode_visits_the_blocks_that_are_seen_row_after_row(window, lens):
    want = [(row, block) for row, n in enumerate(lens) for block in blocks_seen(n, window)]
    longest = max(len(blocks_seen(n, window)) for n in lens)
    for num_cores, (items, bounds) in enumerate(decode_lists(window)(np.array(lens, np.int32)), 1):
        assert items.dtype == bounds.dtype == np.int32
        items, edges = np.asarray(items), bounds.tolist()
        assert pairs(items)[: len(want)] == want
        assert not np.any(items[len(want) :])
        # Every item is one core's; no row is begun by one core and ended by another.
        assert (len(edges), edges[0], edges[-1]) == (num_cores + 1, 0, len(want))
        assert edges == sorted(edges)
        assert all(want[e - 1][0] != want[e][0] for e in edges if 0 < e < len(want))
        share = -(-len(want) // num_cores)
        assert np.diff(edges).max() <= share + max(longest - 1, 0)


def test_rows_of_one_length_are_shared_evenly():
    lists = decode_lists(None)(np.full(ROWS, TOKENS, np.int32))
    assert [np.diff(bounds).tolist() for _, bounds in lists] == [[7], [3, 4], [2, 2, 3]]


@functools.cache
def prefill_list():
    return jax.jit(
        lambda starts, first_row, num_rows: prefill_work(
            starts, first_row, num_rows, TILE, max_items=MAX_TILES
        )
    )


@half
@given(
    new=new_tokens,
    rows=st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)),
    front=st.integers(0, TILE),
)
def test_prefill_visits_every_tile_that_a_row_has_a_token_in(new, rows, front):
    first_row, num_rows = rows
    starts = np.cumsum([front, *new], dtype=np.int32)
    items, count = prefill_list()(starts, jnp.int32(first_row), jnp.int32(num_rows))
    want = sorted(
        {
            (row, token // TILE)
            for row in range(first_row, num_rows)
            for token in range(starts[row], starts[row + 1])
        }
    )
    assert items.dtype == count.dtype == np.int32
    assert count.shape == ()
    items = np.asarray(items)
    assert (int(count), pairs(items)[: len(want)]) == (len(want), want)
    assert not np.any(items[len(want) :])
    # A tile stays in VMEM while consecutive items name it, so it must not come back later.
    tiles = [tile for _, tile in want]
    assert tiles == sorted(tiles)


def test_the_longest_prefill_list_fits():
    # A tile of every row's own, and one more for each row that begins inside another's.
    starts = np.array([0, 1, 2, 3, 4, 5, 6, NUM_TOKENS], np.int32)
    _, count = prefill_list()(starts, jnp.int32(0), jnp.int32(ROWS))
    assert int(count) == MAX_TILES - 1


def test_rows_and_blocks_keep_to_their_bits():
    row, block = (1 << 15) - 2, (1 << 16) - 1
    item = jnp.int32(row << 16 | block)
    assert (int(row_of(item)), int(block_of(item))) == (row, block)
    starts = np.full(row + 2, block * TILE, np.int32)
    starts[-1] += 1
    items, count = jax.jit(lambda starts: prefill_work(starts, 0, row + 1, TILE, max_items=1))(
        starts
    )
    assert (items.tolist(), int(count)) == ([int(item)], 1)
    with pytest.raises(NotImplementedError, match="32768 rows; a work list holds at most 32767"):
        jax.eval_shape(
            lambda lens: decode_work(lens, TOKENS, None, max_items=1),
            jax.ShapeDtypeStruct((row + 2,), jnp.int32),
        )


HEADS = {  # (H, K, D), rows of a block, lanes
    "one_in_a_row": ((6, 3, 128), 6, 128),
    "wide": ((4, 2, 256), 4, 256),
    "padded_lanes": ((4, 2, 80), 4, 128),
    "two_of_64": ((8, 4, 64), 4, 128),
    "two_of_64_and_a_gap": ((9, 3, 64), 4, 128),
    "four_of_32_and_three_gaps": ((10, 5, 32), 4, 128),
    "four_of_32_and_two_gaps": ((2, 2, 32), 2, 128),
}


@pytest.mark.parametrize("name", HEADS)
def test_queries_lie_in_the_lanes_of_their_own_head(name, rng):
    (num_heads, num_kv_heads, head_dim), rows, width = HEADS[name]
    pool = jax.ShapeDtypeStruct((1, 1, rows, 8, width), jnp.float32)

    @jax.jit
    def run(q, numbers, outputs):
        # Only its shape is asked for, and nothing is allocated for it.
        kv = jnp.zeros(pool.shape, pool.dtype)
        heads = heads_of((num_heads, head_dim), kv, num_kv_heads)
        spread = to_pool_heads(q, heads), per_head(numbers, heads)
        return spread, from_pool_heads(outputs, heads)

    per_row = 1 if rows == 2 * num_kv_heads else width // head_dim
    group = num_heads // num_kv_heads
    q = rng.standard_normal((3, num_heads, head_dim), np.float32)
    numbers = rng.standard_normal((2, num_heads), np.float32)
    shape = (rows // 2, per_row * group)
    want, want_numbers = np.zeros((3, *shape, width), np.float32), np.zeros((2, *shape), np.float32)
    outputs = np.full_like(want, np.nan)  # lanes of other heads hold what is no output
    for h in range(num_heads):
        j, i = divmod(h // group, per_row)
        row = i * group + h % group
        lanes = slice(i * head_dim, (i + 1) * head_dim)
        want[:, j, row, lanes] = outputs[:, j, row, lanes] = q[:, h]
        want_numbers[:, j, row] = numbers[:, h]
    (got, got_numbers), back = run(q, numbers, outputs)
    np.testing.assert_array_equal(got, want, strict=True)
    np.testing.assert_array_equal(got_numbers, want_numbers, strict=True)
    np.testing.assert_array_equal(back, q, strict=True)


HEIGHTS = (1, 2, 3, 5, 8, 11)  # rows of each array


def test_rows_are_picked_from_the_array_they_belong_to(rng):
    rows = 8
    arrays = rng.standard_normal((rows, rows, 4), np.float32)

    @jax.jit
    def run(arrays):
        counts = {height: -(-rows // height) for height in HEIGHTS}
        shape = (rows, 4)
        return {
            height: (
                pick_rows({i: arrays[i] for i in range(n)}, height, shape),
                [pick_rows({i: arrays[i]}, height, shape) for i in range(n)],
            )
            for height, n in counts.items()
        }

    owner = {height: np.arange(rows) // height for height in HEIGHTS}
    for height, (together, alone) in run(arrays).items():
        want = arrays[owner[height], np.arange(rows)]
        np.testing.assert_array_equal(together, want, strict=True)
        for i, got in enumerate(alone):
            want = np.where((owner[height] == i)[:, None], arrays[i], np.float32(0))
            np.testing.assert_array_equal(got, want, strict=True)


WIDTHS = (8, 96, 128, 200, 256, 384, 640, 1024)


def test_lane_sums_keep_the_sum_of_a_row(rng):
    # Sums of small integers are exact in any order.
    rows = {width: rng.integers(-9, 9, (3, width)).astype(np.float32) for width in WIDTHS}
    for width, got in jax.jit(lambda xs: jax.tree.map(lane_sums, xs))(rows).items():
        x, got = rows[width], np.asarray(got)
        assert got.shape == (3, LANES)
        np.testing.assert_array_equal(got.sum(axis=1), x.sum(axis=1))
        if width % LANES == 0:  # no sum crosses lanes
            np.testing.assert_array_equal(got, x.reshape(3, -1, LANES).sum(axis=1))


def test_widen_repeats_what_all_lanes_hold():
    column = np.array([[1.5], [-2.0], [np.inf]], np.float32)
    run = jax.jit(lambda x: {width: widen(x, width) for width in WIDTHS})
    for width, got in run(np.tile(column, LANES)).items():
        np.testing.assert_array_equal(got, np.tile(column, width), strict=True)
