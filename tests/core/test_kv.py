"""The pool of keys and values: every token is found where it was written, and nowhere else."""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.core import CacheSpec, KVCache

N = 8
TOKENS = 12  # per write; padded with slot 0


@dataclass(frozen=True)
class Pool:
    """Layout and sizes of a pool of N blocks and two layers."""

    layout: str
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def spec(self) -> CacheSpec:
        return CacheSpec(num_layers=2, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    @property
    def heads_per_row(self) -> int:
        return 128 // self.head_dim if self.layout == "packed" else 1

    def __str__(self) -> str:
        return f"{self.layout}-k{self.num_kv_heads}-d{self.head_dim}-p{self.block_size}"


SMALL = Pool("split", 2, 3, 4)

POOLS = [
    Pool("split", 2, 3, 1),
    Pool("split", 2, 3, 2),
    SMALL,
    Pool("packed", 2, 64, 2),
    # The last row of these is partly empty: it has room for 4 heads of 32, or 2 of 64.
    Pool("packed", 1, 32, 1),
    Pool("packed", 3, 64, 2),
    Pool("packed", 5, 32, 4),
]

on_every_pool = pytest.mark.parametrize("pool", POOLS, ids=str)

write = jax.jit(core.write)
copy_blocks = jax.jit(core.copy_blocks)
gather = jax.jit(core.gather)
allocate = jax.jit(core.allocate)
fork = jax.jit(core.fork)
slot_mapping = jax.jit(core.slot_mapping)


def create(pool: Pool, fill: float | None = None, dtype="float32") -> KVCache:
    cache = core.create_kv_cache(pool.spec, N, pool.block_size, dtype, pool.layout)
    return cache if fill is None else filled(cache, np.full(cache.kv.shape, fill, np.float32))


def filled(cache: KVCache, kv: np.ndarray) -> KVCache:
    return dataclasses.replace(cache, kv=jnp.asarray(kv))


def random_tokens(rng, pool: Pool, count: int = TOKENS) -> tuple[np.ndarray, np.ndarray]:
    shape = (2, count, pool.num_kv_heads, pool.head_dim)
    keys, values = rng.standard_normal(shape, dtype=np.float32)
    return keys, values


def slots_of(table, count: int, block_size: int) -> np.ndarray:
    """Slots of positions 0, 1, ..., padded to TOKENS with slot 0; by hand, not by core."""
    slots = [table[t // block_size] * block_size + t % block_size for t in range(count)]
    return np.array([*slots, *[0] * (TOKENS - count)], np.int32)


@functools.cache
def written(pool: Pool):
    """Two rows of 7 and 5 tokens in shuffled blocks of layer 1 of a pool of NaN."""
    rng = np.random.default_rng(pool.block_size)
    ids = rng.permutation(np.arange(1, N + 1)).tolist()
    # With blocks of one token the two rows would need 12 blocks, so only 5 and 3 tokens are live.
    lengths = (5, 3) if pool.block_size == 1 else (7, 5)
    widths = [-(-length // pool.block_size) for length in lengths]
    tables = [ids[: widths[0]], ids[widths[0] : sum(widths)]]
    cache = create(pool, np.nan)
    tokens = []
    for table, length in zip(tables, lengths, strict=True):
        keys, values = random_tokens(rng, pool)
        slots = slots_of(table, length, pool.block_size)
        cache = write(cache, jnp.int32(1), keys, values, slots)
        tokens.append((keys[:length], values[:length]))
    return cache, tables, lengths, tokens


def read_row(cache: KVCache, layer: int, table, length) -> tuple[np.ndarray, np.ndarray]:
    """`gather` on the host: slices of JAX arrays are compiled one by one."""
    keys, values = gather(cache, jnp.int32(layer), table, jnp.int32(length))
    return np.asarray(keys), np.asarray(values)


def assert_reads(cache: KVCache, pool: Pool) -> None:
    """The two rows of `written` read their tokens."""
    _, tables, lengths, tokens = written(pool)
    for table, length, (keys, values) in zip(tables, lengths, tokens, strict=True):
        padded = np.zeros(5, np.int32)
        padded[: len(table)] = table
        read = read_row(cache, 1, padded, length)
        for got, expected in zip(read, (keys, values), strict=True):
            assert got.shape == (5 * pool.block_size, pool.num_kv_heads, pool.head_dim)
            np.testing.assert_array_equal(got[:length], expected)
            # Dead slots hold NaN, and so does the null block that the table is padded with.
            np.testing.assert_array_equal(got[length:], 0.0)


@on_every_pool
def test_gather_gives_back_what_was_written(pool):
    assert_reads(written(pool)[0], pool)


@on_every_pool
def test_rows_of_the_pool_are_keys_and_values_of_heads_side_by_side(pool):
    cache, tables, lengths, tokens = written(pool)
    last = lengths[0] - 1
    block, offset = tables[0][last // pool.block_size], last % pool.block_size
    slot = np.asarray(cache.kv)[1, block, :, offset]
    side_by_side = pool.heads_per_row
    for head in range(pool.num_kv_heads):
        row, lane = 2 * (head // side_by_side), head % side_by_side * pool.head_dim
        for half, which in enumerate(tokens[0]):
            found = slot[row + half, lane : lane + pool.head_dim]
            np.testing.assert_array_equal(found, which[last, head])
    empty = side_by_side * slot.shape[0] // 2 - pool.num_kv_heads
    np.testing.assert_array_equal(slot[-2:, slot.shape[1] - empty * pool.head_dim :], 0.0)


@pytest.mark.parametrize("pool", [pool for pool in POOLS if pool.num_kv_heads % 2], ids=str)
def test_what_the_last_row_has_room_for_is_never_read(pool):
    cache = written(pool)[0]
    used = pool.num_kv_heads % pool.heads_per_row * pool.head_dim
    kv = np.array(cache.kv)
    kv[..., -2:, :, used:] = np.nan
    assert_reads(filled(cache, kv), pool)


@on_every_pool
def test_write_touches_its_slots_only(pool):
    cache, tables, lengths, _ = written(pool)
    is_written = np.zeros((2, N + 1, pool.block_size), bool)
    for table, length in zip(tables, lengths, strict=True):
        for t in range(length):
            is_written[1, table[t // pool.block_size], t % pool.block_size] = True
    is_written[1, 0, 0] = True  # padding goes to slot 0
    has_number = ~np.isnan(np.moveaxis(np.asarray(cache.kv), 2, 3)).any(axis=(3, 4))
    np.testing.assert_array_equal(has_number, is_written)


@on_every_pool
def test_padding_never_touches_a_live_block(pool, rng):
    # Every block is live: rows 0 and 1 hold all N of them, the first and the last included.
    tables = np.arange(1, N + 1, dtype=np.int32).reshape(2, N // 2)
    past = N // 2 * pool.block_size
    blocks = dataclasses.replace(
        core.create_block_state(N, pool.block_size, 2, N // 2),
        block_tables=jnp.asarray(tables),
        lengths=jnp.full(2, past, jnp.int32),
    )
    cache = create(pool)
    before = rng.standard_normal(cache.kv.shape, dtype=np.float32)
    rows = np.array([2, 2, -1, 3, 0, 1, 0, 1, 2, 2, 2, 2], np.int32)  # 2 is padding
    positions = np.array([0, 5, 0, 0, past, past, -1, past + 7, 1, 2, 3, 4], np.int32)
    keys, values = random_tokens(rng, pool)
    slots = slot_mapping(blocks, rows, positions)
    after = np.asarray(write(filled(cache, before), jnp.int32(0), keys, values, slots).kv)
    np.testing.assert_array_equal(after[:, 1:], before[:, 1:])
    assert (after[0, 0] != before[0, 0]).any(), "the writes did happen, in the null block"


@pytest.mark.parametrize("pool", [SMALL, Pool("packed", 5, 32, 4)], ids=str)
def test_copy_moves_every_layer_of_a_block(pool, rng):
    cache = create(pool)
    before = rng.standard_normal(cache.kv.shape, dtype=np.float32)
    # One source twice, a copy behind padding, and the last block as target.
    src, dst = np.array([3, 0, 3, 0, 1], np.int32), np.array([5, 0, 8, 0, 2], np.int32)
    expected = before.copy()
    expected[:, 5], expected[:, 8], expected[:, 2] = before[:, 3], before[:, 3], before[:, 1]
    np.testing.assert_array_equal(copy_blocks(filled(cache, before), src, dst).kv, expected)


def test_copy_moves_tags_with_their_block():
    cache = core.with_tags(create(SMALL))
    before = np.arange(1, (N + 1) * 4 + 1, dtype=np.int32).reshape(N + 1, 4)
    cache = dataclasses.replace(cache, tags=jnp.asarray(before))
    # Padding of both kinds: without a target, and 0 to 0.
    src, dst = np.array([3, 0, 3, 6, 1], np.int32), np.array([5, 0, 8, 0, 2], np.int32)
    expected = before.copy()
    expected[5], expected[8], expected[2] = before[3], before[3], before[1]
    np.testing.assert_array_equal(copy_blocks(cache, src, dst).tags, expected)


def test_no_copy_leaves_the_pool_as_it_is(rng):
    cache = create(SMALL)
    before = rng.standard_normal(cache.kv.shape, dtype=np.float32)
    cache = filled(cache, before)
    nothing = np.zeros(5, np.int32)
    np.testing.assert_array_equal(copy_blocks(cache, nothing, nothing).kv, before)
    # A source without a target is padding too.
    np.testing.assert_array_equal(copy_blocks(cache, nothing + 4, nothing).kv, before)


@pytest.mark.parametrize("pool", [SMALL, Pool("packed", 5, 32, 4)], ids=str)
def test_forked_rows_write_on_without_seeing_each_other(pool, rng):
    max_seqs, row_ids = 5, (0, 1, 2)
    blocks = core.create_block_state(N, 4, max_seqs, 5)
    cache = create(pool, np.nan)
    expected = {row: ([], []) for row in row_ids}

    def append(blocks, cache, counts):
        """Allocates, copies and writes different random tokens to each row of layer 1."""
        starts = np.asarray(blocks.lengths)
        blocks, allocation = allocate(blocks, np.array([*counts, 0, 0], np.int32))
        assert allocation.ok
        cache = copy_blocks(cache, allocation.copy_src, allocation.copy_dst)
        placed = [(row, starts[row] + i) for row in row_ids for i in range(counts[row])]
        keys, values = random_tokens(rng, pool)
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
    assert np.asarray(blocks.block_tables)[:3, 1].tolist() == [3, 2, 4]
    blocks, cache = append(blocks, cache, [1, 4, 2])
    core.audit(blocks)
    for row in row_ids:
        length = len(expected[row][0])
        table = np.asarray(blocks.block_tables)[row]
        read = read_row(cache, 1, table, length)
        for got, tokens in zip(read, expected[row], strict=True):
            np.testing.assert_array_equal(got[:length], np.stack(tokens))


@pytest.mark.parametrize("pool", [SMALL, Pool("packed", 3, 64, 4)], ids=str)
def test_bfloat16_pool_rounds_once(pool, rng):
    keys, values = random_tokens(rng, pool)
    slots = slots_of([3, 1, 7], TOKENS, 4)
    cache = write(create(pool, dtype="bfloat16"), jnp.int32(0), keys, values, slots)
    assert cache.kv.dtype == jnp.bfloat16
    table = np.array([3, 1, 7, 0, 0], np.int32)
    for got, tokens in zip(read_row(cache, 0, table, 12), (keys, values), strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got[:12], tokens.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("pool", "rows", "width"),
    [
        (Pool("split", 2, 3, 4), 4, 3),
        (Pool("packed", 1, 32, 4), 2, 128),
        (Pool("packed", 2, 64, 4), 2, 128),
        (Pool("packed", 3, 64, 2), 4, 128),
        (Pool("packed", 5, 32, 1), 4, 128),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_arrays(pool, rows, width):
    for dtype, itemsize in [("float32", 4), ("bfloat16", 2), ("float16", 2)]:
        cache = create(pool, dtype=dtype)
        assert cache.kv.shape == (2, N + 1, rows, pool.block_size, width)
        assert cache.kv.shape == core.kv_shape(pool.spec, N, pool.block_size, pool.layout)
        assert cache.token_bytes == 2 * rows * width * itemsize
        assert cache.block_bytes == pool.block_size * cache.token_bytes
        assert cache.pool_bytes == cache.kv.nbytes == (N + 1) * cache.block_bytes
        sizes = (cache.num_layers, cache.num_blocks, cache.block_size)
        assert sizes == (2, N, pool.block_size)
        assert (cache.num_kv_heads, cache.head_dim) == (pool.num_kv_heads, pool.head_dim)


@pytest.mark.parametrize("head_dim", [3, 32, 64, 128])
def test_auto_is_split(head_dim):
    spec = CacheSpec(num_layers=2, num_kv_heads=2, head_dim=head_dim)
    auto, split = (core.create_kv_cache(spec, N, 4, "float32", name) for name in ("auto", "split"))
    assert auto.layout == split.layout == "split"
    assert auto.kv.shape == split.kv.shape == core.kv_shape(spec, N, 4)


@pytest.mark.parametrize(
    ("head_dim", "layout", "shape"),
    [
        (32, "packed", (2, N + 1, 2, 4, 128)),
        (64, "packed", (2, N + 1, 4, 4, 128)),
        (40, "split", (2, N + 1, 6, 4, 128)),
        (128, "split", (2, N + 1, 6, 4, 128)),
        (192, "split", (2, N + 1, 6, 4, 256)),
    ],
)
def test_auto_on_a_tpu_fills_its_lanes(monkeypatch, head_dim, layout, shape):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    spec = CacheSpec(num_layers=2, num_kv_heads=3, head_dim=head_dim)
    cache = core.create_kv_cache(spec, N, 4, "bfloat16")
    assert (cache.layout, cache.kv.shape) == (layout, shape)


def test_rows_wider_than_a_head_are_read_and_written(monkeypatch, rng):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    pool = Pool("split", 2, 40, 4)
    cache = create(pool)
    assert cache.kv.shape[4] == 128
    cache = filled(cache, np.full(cache.kv.shape, np.nan, np.float32))
    keys, values = random_tokens(rng, pool)
    cache = write(cache, jnp.int32(0), keys, values, slots_of([3, 1, 7], TOKENS, 4))
    read = read_row(cache, 0, np.array([3, 1, 7, 0, 0], np.int32), 12)
    for got, expected in zip(read, (keys, values), strict=True):
        np.testing.assert_array_equal(got[:12], expected)


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="layout \\('pakced'\\) must be 'auto', 'split'"):
        core.create_kv_cache(SMALL.spec, N, 4, "float32", "pakced")


@pytest.mark.parametrize("head_dim", [3, 16, 40, 128])
def test_packed_refuses_heads_that_do_not_fill_a_row(head_dim):
    spec = CacheSpec(num_layers=2, num_kv_heads=2, head_dim=head_dim)
    message = f"head_dim \\({head_dim}\\) must be one of \\(32, 64\\) in layout 'packed'"
    with pytest.raises(ValueError, match=message):
        core.create_kv_cache(spec, N, 4, "float32", "packed")
    with pytest.raises(ValueError, match=message):
        core.kv_shape(spec, N, 4, "packed")


def test_a_latent_pool_needs_latent_heads_and_they_need_it():
    with pytest.raises(ValueError, match="must have a model with latent heads; use 'split'"):
        core.create_kv_cache(SMALL.spec, N, 4, "float32", "latent")
    spec = CacheSpec(num_layers=2, num_kv_heads=1, head_dim=24, latent_dim=16)
    with pytest.raises(ValueError, match="must be 'latent' for a model with latent heads"):
        core.create_kv_cache(spec, N, 4, "float32", "split")


@pytest.mark.parametrize("dtype", ["int4", "float64", "float8_e4m3b11fnuz"])
def test_dtypes_not_built_are_refused(dtype):
    with pytest.raises(NotImplementedError, match="float32, bfloat16, float16"):
        core.create_kv_cache(SMALL.spec, N, 4, dtype)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (8, 0)])
def test_sizes_below_1_are_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match="must be at least 1"):
        core.create_kv_cache(SMALL.spec, num_blocks, block_size, "float32")


@pytest.mark.parametrize("layout", ["split", "packed"])
@pytest.mark.parametrize(
    ("dtype", "error"), [("int8", 1 / 254), ("float8_e4m3fn", 1 / 16), ("float8_e5m2", 1 / 8)]
)
def test_8_bit_pools_keep_a_scale_per_token_and_head(dtype, error, layout, rng):
    spec = core.CacheSpec(num_layers=2, num_kv_heads=3, head_dim=64)
    cache = core.create_kv_cache(spec, N, 4, dtype, layout)
    assert cache.kv.dtype.name == dtype
    assert cache.scales.shape == (2, N + 1, 6, 4)
    heads = rng.standard_normal((2, 6, 3, 64), dtype=np.float32)
    # Heads of very different size, a head of zeros, and an outlier.
    heads *= np.float32([1e-6, 1.0, 1e6])[None, None, :, None]
    heads[0, 0, 1], heads[1, 2, 0, 5] = 0.0, 300.0
    keys, values = heads
    slots = np.array([4, 5, 6, 7, 8, 9], np.int32)
    cache = jax.jit(core.write)(cache, jnp.int32(1), keys, values, slots)
    table = np.array([1, 2, 0], np.int32)
    read = core.gather(cache, 1, table, 6)
    for got, wanted in zip(read, (keys, values), strict=True):
        assert got.dtype == jnp.float32
        largest = np.abs(wanted).max(axis=-1, keepdims=True)
        # int8: half a step of the scale. fp8: half a unit of the last of 3 or 2 bits.
        assert (np.abs(got[:6] - wanted) <= error * largest + 1e-30).all()
        np.testing.assert_array_equal(got[6:], 0.0)
        top = np.abs(got[:6]).max(axis=-1, keepdims=True)
        np.testing.assert_allclose(top, largest, rtol=1e-6)
    copied = jax.jit(core.copy_blocks)(
        cache, np.array([1, 0], np.int32), np.array([5, 0], np.int32)
    )
    np.testing.assert_array_equal(copied.kv[:, 5], cache.kv[:, 1])
    np.testing.assert_array_equal(copied.scales[:, 5], cache.scales[:, 1])
    assert cache.block_bytes == 2 * (cache.kv[0, 0].size + 6 * 4 * 4)


def test_quantising_saturates(rng):
    heads = np.float32([[np.inf, 1.0, -np.inf], [3e38, -3e38, 0.0]])
    for dtype in ("int8", "float8_e4m3fn", "float8_e5m2"):
        numbers, scales = core.quantize(heads, jnp.dtype(dtype))
        assert np.isfinite(numbers.astype(jnp.float32)).all()
        assert np.isfinite(scales).all()
        assert numbers[0, 0] > 0 > numbers[0, 2]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-37])
def test_heads_too_small_for_a_scale_are_zero(dtype, size):
    heads = np.float32([[size, 0.0, -size]])
    numbers, scales = jax.jit(core.quantize, static_argnums=1)(heads, jnp.dtype(dtype))
    np.testing.assert_array_equal(scales, 1.0)
    np.testing.assert_array_equal(numbers.astype(jnp.float32), 0.0)


def test_a_list_of_no_copies_is_fine():
    spec = CacheSpec(num_layers=1, num_kv_heads=1, head_dim=2)
    cache = core.create_kv_cache(spec, 4, 2, "float32")
    none = jnp.zeros(0, jnp.int32)
    assert core.copy_blocks(cache, none, none) is cache
