"""The pool of keys and values: every token is found where it was written, and nowhere else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.core import CacheSpec, KVCache

SPEC = CacheSpec(num_layers=2, num_kv_heads=2, head_dim=3)
N = 8
TOKENS = 12  # per write; padded with slot 0

write = jax.jit(core.write)
copy_blocks = jax.jit(core.copy_blocks)
gather = jax.jit(core.gather)
allocate = jax.jit(core.allocate)
fork = jax.jit(core.fork)
slot_mapping = jax.jit(core.slot_mapping)


def pool(block_size: int, fill: float | None = None, dtype="float32") -> KVCache:
    cache = core.create_kv_cache(SPEC, N, block_size, dtype, "split")
    if fill is None:
        return cache
    return dataclasses.replace(cache, kv=jnp.full_like(cache.kv, fill))


def random_tokens(rng, count: int = TOKENS) -> tuple[np.ndarray, np.ndarray]:
    shape = (2, count, SPEC.num_kv_heads, SPEC.head_dim)
    keys, values = rng.standard_normal(shape, dtype=np.float32)
    return keys, values


def slots_of(table, count: int, block_size: int) -> np.ndarray:
    """Slots of positions 0, 1, ..., padded to TOKENS with slot 0; by hand, not by core."""
    slots = [table[t // block_size] * block_size + t % block_size for t in range(count)]
    return np.array([*slots, *[0] * (TOKENS - count)], np.int32)


@functools.cache
def written(block_size: int):
    """Two rows of 7 and 5 tokens in shuffled blocks of layer 1 of a pool of NaN."""
    rng = np.random.default_rng(block_size)
    ids = rng.permutation(np.arange(1, N + 1)).tolist()
    # With blocks of one token the two rows would need 12 blocks, so only 5 and 3 tokens are live.
    lengths = (5, 3) if block_size == 1 else (7, 5)
    widths = [-(-length // block_size) for length in lengths]
    tables = [ids[: widths[0]], ids[widths[0] : sum(widths)]]
    cache = pool(block_size, jnp.nan)
    tokens = []
    for table, length in zip(tables, lengths, strict=True):
        keys, values = random_tokens(rng)
        cache = write(cache, jnp.int32(1), keys, values, slots_of(table, length, block_size))
        tokens.append((keys[:length], values[:length]))
    return cache, tables, lengths, tokens


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_gather_gives_back_what_was_written(block_size):
    cache, tables, lengths, tokens = written(block_size)
    for table, length, (keys, values) in zip(tables, lengths, tokens, strict=True):
        padded = np.zeros(5, np.int32)
        padded[: len(table)] = table
        read = gather(cache, jnp.int32(1), padded, jnp.int32(length))
        for got, expected in zip(read, (keys, values), strict=True):
            assert got.shape == (5 * block_size, SPEC.num_kv_heads, SPEC.head_dim)
            np.testing.assert_array_equal(got[:length], expected)
            # Dead slots hold NaN, and so does the null block that the table is padded with.
            np.testing.assert_array_equal(got[length:], 0.0)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_rows_of_the_pool_are_key_and_value_of_each_head(block_size):
    cache, tables, lengths, tokens = written(block_size)
    keys, values = tokens[0]
    last = lengths[0] - 1
    block, offset = tables[0][last // block_size], last % block_size
    slot = np.asarray(cache.kv)[1, block, :, offset]
    np.testing.assert_array_equal(
        slot, [keys[last, 0], values[last, 0], keys[last, 1], values[last, 1]]
    )


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_write_touches_its_slots_only(block_size):
    cache, tables, lengths, _ = written(block_size)
    is_written = np.zeros((2, N + 1, block_size), bool)
    for table, length in zip(tables, lengths, strict=True):
        for t in range(length):
            is_written[1, table[t // block_size], t % block_size] = True
    is_written[1, 0, 0] = True  # padding goes to slot 0
    has_number = ~np.isnan(np.moveaxis(np.asarray(cache.kv), 2, 3)).any(axis=(3, 4))
    np.testing.assert_array_equal(has_number, is_written)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_padding_never_touches_a_live_block(block_size, rng):
    # Every block is live: rows 0 and 1 hold all N of them, the first and the last included.
    tables = np.arange(1, N + 1, dtype=np.int32).reshape(2, N // 2)
    blocks = dataclasses.replace(
        core.create_block_state(N, block_size, 2, N // 2),
        block_tables=jnp.asarray(tables),
        lengths=jnp.full(2, N // 2 * block_size, jnp.int32),
    )
    cache = pool(block_size)
    before = rng.standard_normal(cache.kv.shape, dtype=np.float32)
    cache = dataclasses.replace(cache, kv=jnp.asarray(before))
    rows = np.array([2, 2, -1, 3, 0, 1, 0, 1, 2, 2, 2, 2], np.int32)  # 2 is padding
    past = N // 2 * block_size
    positions = np.array([0, 5, 0, 0, past, past, -1, past + 7, 1, 2, 3, 4], np.int32)
    keys, values = random_tokens(rng)
    slots = slot_mapping(blocks, rows, positions)
    after = np.asarray(write(cache, jnp.int32(0), keys, values, slots).kv)
    np.testing.assert_array_equal(after[:, 1:], before[:, 1:])
    assert (after[0, 0] != before[0, 0]).any(), "the writes did happen, in the null block"


def test_copy_moves_every_layer_of_a_block(rng):
    cache = pool(2)
    before = rng.standard_normal(cache.kv.shape, dtype=np.float32)
    cache = dataclasses.replace(cache, kv=jnp.asarray(before))
    # One source twice, a copy behind padding, and the last block as target.
    src, dst = np.array([3, 0, 3, 0, 1], np.int32), np.array([5, 0, 8, 0, 2], np.int32)
    expected = before.copy()
    expected[:, 5], expected[:, 8], expected[:, 2] = before[:, 3], before[:, 3], before[:, 1]
    np.testing.assert_array_equal(copy_blocks(cache, src, dst).kv, expected)


def test_no_copy_leaves_the_pool_as_it_is(rng):
    cache = pool(2)
    before = rng.standard_normal(cache.kv.shape, dtype=np.float32)
    cache = dataclasses.replace(cache, kv=jnp.asarray(before))
    nothing = np.zeros(5, np.int32)
    np.testing.assert_array_equal(copy_blocks(cache, nothing, nothing).kv, before)
    # A source without a target is padding too.
    np.testing.assert_array_equal(copy_blocks(cache, nothing + 4, nothing).kv, before)


def test_forked_rows_write_on_without_seeing_each_other(rng):
    max_seqs, row_ids = 5, (0, 1, 2)
    blocks = core.create_block_state(N, 4, max_seqs, 5)
    cache = pool(4, jnp.nan)
    expected = {row: ([], []) for row in row_ids}

    def append(blocks, cache, counts):
        """Allocates, copies and writes different random tokens to each row of layer 1."""
        starts = np.asarray(blocks.lengths)
        blocks, allocation = allocate(blocks, np.array([*counts, 0, 0], np.int32))
        assert allocation.ok
        cache = copy_blocks(cache, allocation.copy_src, allocation.copy_dst)
        placed = [(row, starts[row] + i) for row in row_ids for i in range(counts[row])]
        keys, values = random_tokens(rng)
        for (row, _), key, value in zip(placed, keys, values, strict=False):
            expected[row][0].append(key)
            expected[row][1].append(value)
        rows, positions = np.array(placed + [(max_seqs, 0)] * (TOKENS - len(placed)), np.int32).T
        slots = slot_mapping(blocks, rows, positions)
        return blocks, write(cache, jnp.int32(1), keys, values, slots)

    blocks, cache = append(blocks, cache, [6, 0, 0])
    blocks = fork(blocks, np.array([0, 0], np.int32), np.array([1, 2], np.int32))
    for child in (1, 2):
        expected[child] = ([*expected[0][0]], [*expected[0][1]])
    # Rows 0 and 2 write while row 1 only looks on: both copy. Then all write into blocks of
    # their own, row 1 past the end of its block.
    blocks, cache = append(blocks, cache, [1, 0, 1])
    assert blocks.block_tables[:3, 1].tolist() == [3, 2, 4]
    blocks, cache = append(blocks, cache, [1, 4, 2])
    core.audit(blocks)
    for row in row_ids:
        length = len(expected[row][0])
        read = gather(cache, jnp.int32(1), blocks.block_tables[row], blocks.lengths[row])
        for got, tokens in zip(read, expected[row], strict=True):
            np.testing.assert_array_equal(got[:length], np.stack(tokens))


def test_bfloat16_pool_rounds_once(rng):
    keys, values = random_tokens(rng)
    slots = slots_of([3, 1, 7], TOKENS, 4)
    cache = write(pool(4, dtype="bfloat16"), jnp.int32(0), keys, values, slots)
    assert cache.kv.dtype == jnp.bfloat16
    table = np.array([3, 1, 7, 0, 0], np.int32)
    for got, tokens in zip(
        gather(cache, jnp.int32(0), table, jnp.int32(12)), (keys, values), strict=True
    ):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got[:12], jnp.asarray(tokens, jnp.bfloat16))


def test_block_bytes_are_those_of_the_arrays():
    for dtype, itemsize in [("float32", 4), ("bfloat16", 2), ("float16", 2)]:
        cache = core.create_kv_cache(SPEC, N, 4, dtype, "split")
        width = cache.kv.shape[4]
        # Layers, keys and values of each head, positions, width.
        assert cache.block_bytes == 2 * (2 * 2) * 4 * width * itemsize
        assert cache.kv.nbytes == (N + 1) * cache.block_bytes
        assert (cache.num_layers, cache.num_blocks, cache.block_size) == (2, N, 4)
        assert width >= SPEC.head_dim


def test_auto_is_split():
    auto, split = (core.create_kv_cache(SPEC, N, 4, "float32", name) for name in ("auto", "split"))
    assert auto.layout == split.layout == "split"
    assert auto.kv.shape == split.kv.shape == core.kv_shape(SPEC, N, 4)


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="layout \\('pakced'\\) must be 'auto', 'split'"):
        core.create_kv_cache(SPEC, N, 4, "float32", "pakced")


@pytest.mark.parametrize("layout", ["packed", "latent"])
def test_layouts_not_built_are_refused(layout):
    with pytest.raises(NotImplementedError, match="is not built yet; use 'split'"):
        core.create_kv_cache(SPEC, N, 4, "float32", layout)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float64"])
def test_dtypes_not_built_are_refused(dtype):
    with pytest.raises(NotImplementedError, match="float32, bfloat16, float16"):
        core.create_kv_cache(SPEC, N, 4, dtype)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (8, 0)])
def test_sizes_below_1_are_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match="must be at least 1"):
        core.create_kv_cache(SPEC, num_blocks, block_size, "float32")
