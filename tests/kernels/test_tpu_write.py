"""The TPU kernels that write new tokens change the tokens' slots, to the bit, and nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.core import KVCache
from paged_jax.core.kv import quantize, to_pool_rows, write
from pallas_kernels.compat import tpu_interpret_params
from pallas_kernels.tpu.write import write_items, write_rows, write_scales
from tests.kernels.races import assert_orderly

LAYERS, LAYER, BLOCKS = 2, 1, 9


def run(block, offset, count):
    """(block, offset) pairs of consecutive positions in a block."""
    return [(block, offset + i) for i in range(count)]


PADDING = (0, 0)

# Slots as (block, offset); blocks of 8.
DECODE_8 = [(5, 0), (2, 7), PADDING, (9, 3), (1, 6), (3, 1), PADDING]
# Prefill that starts inside block 7 of 16, goes through block 2 and ends inside block 4; then a
# second one of one whole tile, then one token behind it, and one block that ends where the next
# starts.
PREFILL_16 = [
    *run(7, 5, 11), *run(2, 0, 16), *run(4, 0, 3), PADDING, PADDING, *run(9, 8, 8), (1, 0),
    *run(5, 14, 2), *run(6, 0, 1),
]  # fmt: skip
MIXED_32 = [
    (3, 31), *run(4, 20, 12), *run(6, 0, 32), *run(5, 1, 15), (1, 8), PADDING, *run(2, 7, 3)
]  # fmt: skip
DECODE_128 = [(8, 127), (1, 0), PADDING, (3, 64), *run(2, 15, 2)]
# More items than buffers: in flight are at most as many as there are.
SINGLES_8 = [(1 + i, (3 * i) % 8) for i in range(9)] + [(1 + i, (3 * i + 1) % 8) for i in range(9)]
# Two rows take turns, so that items share tiles while they are in flight.
TURNS_8 = [slot for i in range(6) for slot in ((3, i), (7, 2 + i))]

ROW_CASES = {
    "decode_f32_p8": ("float32", 8, 2, DECODE_8, None, {}),
    "prefill_bf16_p16": ("bfloat16", 16, 4, PREFILL_16, None, {}),
    "prefill_f32_p16_tile16": ("float32", 16, 1, PREFILL_16, None, {"tile": 16, "num_buffers": 3}),
    "mixed_int8_p32": ("int8", 32, 2, MIXED_32, 61, {}),
    "mixed_e4m3_p32_tile32": ("float8_e4m3fn", 32, 6, MIXED_32, None, {"tile": 32}),
    "decode_e5m2_p128": ("float8_e5m2", 128, 2, DECODE_128, 5, {}),
    "singles_bf16_p8": ("bfloat16", 8, 2, SINGLES_8, None, {"num_buffers": 2}),
    "turns_int8_p8": ("int8", 8, 2, TURNS_8, None, {}),
}


@pytest.mark.parametrize("name", ROW_CASES)
def test_rows_land_in_their_slots_and_nothing_else_changes(name, rng, capsys):
    dtype, block_size, pool_rows, places, num_tokens, options = ROW_CASES[name]
    # A row is wider than a register in one case.
    width = 256 if name == "decode_f32_p8" else 128
    kv = poisoned((LAYERS, BLOCKS + 1, pool_rows, block_size, width), dtype)
    rows = rng.standard_normal((len(places), pool_rows, width)) * 50
    rows = rows.astype(jnp.dtype(dtype))
    slots = to_slots(places, block_size)
    write_tokens, num_tokens = interpreted(write_rows, **options), num_tokens or len(slots)
    got = write_tokens(kv, LAYER, rows, slots, num_tokens=num_tokens)
    assert_same_bits(got, written(kv, rows, slots, num_tokens))
    assert_orderly(capsys)
    assert_same_bits(write_tokens(kv, LAYER, rows, slots, num_tokens=0), kv)


SCALE_CASES = {
    # Rows of one or two tokens in blocks of their own, which end at the edge of a block; the last
    # one does not count.
    "decode_p128": (128, 2, [*DECODE_128, PADDING, *run(5, 126, 2), (9, 3)], 9),
    # Runs over the end of 128 positions and of a block.
    "prefill_p256": (256, 8, [(3, 9), *run(7, 100, 156), *run(2, 0, 3), *run(4, 128, 128)], 288),
}


@pytest.mark.parametrize("name", SCALE_CASES)
def test_scales_land_in_their_slots_and_nothing_else_changes(name, rng, capsys):
    block_size, pairs, places, num_tokens = SCALE_CASES[name]
    scales = poisoned((LAYERS, BLOCKS + 1, pairs, block_size), "float32")
    new = rng.uniform(0.01, 0.03, (len(places), pairs)).astype(np.float32)
    slots = to_slots(places, block_size)
    got = interpreted(write_scales)(scales, LAYER, new, slots, num_tokens=num_tokens)
    assert_same_bits(got, written(scales, new, slots, num_tokens))
    assert_orderly(capsys)


def test_kernels_write_what_the_core_writes(rng, capsys):
    num_heads, block_size = 2, 128
    shape = (LAYERS, BLOCKS + 1, 2 * num_heads, block_size)
    cache = KVCache(
        kv=jnp.asarray(poisoned((*shape, 128), "int8")),
        scales=jnp.asarray(poisoned(shape, "float32")),
        layout="split",
        num_kv_heads=num_heads,
        head_dim=128,
    )
    slots = to_slots([*run(3, 125, 3), *run(7, 0, 6), (1, 9), PADDING, (4, 77)], block_size)
    keys, values = rng.standard_normal((2, len(slots), num_heads, 128), np.float32)
    want = jax.jit(write)(cache, LAYER, keys, values, slots)

    @jax.jit
    def to_new(cache, keys, values):
        keys, key_scales = quantize(keys, jnp.int8)
        values, value_scales = quantize(values, jnp.int8)
        scales = jnp.stack([key_scales, value_scales], axis=-1).reshape(len(slots), -1)
        return to_pool_rows(cache, keys, values), scales

    rows, scales = to_new(cache, keys, values)
    # Copies happen when they are started; in the other tests, when they are waited for.
    interpret = dataclasses.replace(tpu_interpret_params(), dma_execution_mode="eager")
    for kernel, pool, new, expected in (
        (write_rows, cache.kv, rows, want.kv),
        (write_scales, cache.scales, scales, want.scales),
    ):
        got = interpreted(kernel, interpret=interpret)(pool, LAYER, new, slots)
        # The core writes padding into the null block.
        assert_same_bits(got[:, 1:], expected[:, 1:])
        assert_orderly(capsys)


def test_items_are_runs_inside_tiles():
    slots = np.array([36, 37, 38, 39, 40, 41, 0, 96, 17, 15, 16], np.int32)
    items = jax.jit(write_items, static_argnums=(1, 2))
    tokens, first_slots, lengths, counts = items(slots, 8, 16, 11)
    assert tokens.tolist()[:5] == [0, 4, 7, 8, 10]
    assert first_slots.tolist()[:5] == [36, 40, 96, 17, 16]
    assert lengths.tolist() == [4, 2, 1, 1, 1] + [0] * 6
    assert counts.tolist() == [5, 1]  # 17 and 16 share a tile
    *_, lengths, counts = items(slots, 8, 16, 6)
    assert lengths.tolist() == [4, 2] + [0] * 9
    assert counts.tolist() == [2, 0]


def test_what_tiles_cannot_hold_is_refused():
    def rows_of(shape, dtype=jnp.float32, rows_dtype=None, **options):
        rows = jax.ShapeDtypeStruct((1, shape[2], shape[4]), rows_dtype or dtype)
        shapes = jax.ShapeDtypeStruct(shape, dtype), rows, jax.ShapeDtypeStruct((1,), jnp.int32)
        jax.eval_shape(lambda kv, rows, slots: write_rows(kv, 0, rows, slots, **options), *shapes)

    def scales_of(shape):
        arrays = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (1, shape[2])))
        slots = jax.ShapeDtypeStruct((1,), jnp.int32)
        jax.eval_shape(
            lambda scales, new, slots: write_scales(scales, 0, new, slots), *arrays, slots
        )

    with pytest.raises(NotImplementedError, match="float16"):
        rows_of((1, 2, 2, 8, 128), jnp.float16)
    with pytest.raises(NotImplementedError, match=r"64 lanes; .* multiple of 128"):
        rows_of((1, 2, 2, 8, 64))
    with pytest.raises(NotImplementedError, match=r"block_size 4; .* multiple of 8"):
        rows_of((1, 2, 2, 4, 128))
    with pytest.raises(ValueError, match=r"tile \(16\) must be a multiple of 8 that divides"):
        rows_of((1, 2, 2, 8, 128), tile=16)
    with pytest.raises(ValueError, match=r"rows \(bfloat16"):
        rows_of((1, 2, 2, 8, 128), rows_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"num_buffers \(9\)"):
        rows_of((1, 2, 2, 8, 128), num_buffers=9)
    with pytest.raises(NotImplementedError, match=r"block_size 64 .* multiple of 128"):
        scales_of((1, 2, 2, 64))
    many = jax.ShapeDtypeStruct((100_000,), jnp.int32)
    kv, rows = (
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 2, 2, 8, 128), (100_000, 2, 128))
    )
    with pytest.raises(NotImplementedError, match="100000 tokens in one write"):
        jax.eval_shape(lambda kv, rows, slots: write_rows(kv, 0, rows, slots), kv, rows, many)
    with pytest.raises(NotImplementedError, match="6 scales per token"):
        scales_of((1, 2, 6, 128))


def interpreted(kernel, **options):
    """The kernel with layer and token count as data."""
    return jax.jit(functools.partial(kernel, **{"interpret": tpu_interpret_params()} | options))


def poisoned(shape, dtype):
    """Where nothing is written stands NaN, or garbage in int8, which has none."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.int8:
        return np.random.default_rng(1).integers(-128, 128, shape).astype(dtype)
    return np.full(shape, np.nan).astype(dtype)


def to_slots(places, block_size):
    return np.array([block * block_size + offset for block, offset in places], np.int32)


def written(pool, new, slots, num_tokens):
    """Oracle: one token at a time; padding is left out."""
    pool, block_size = pool.copy(), pool.shape[3]
    for slot, token in list(zip(slots, new, strict=True))[:num_tokens]:
        if slot >= block_size:
            pool[LAYER, slot // block_size, :, slot % block_size] = token
    return pool


def assert_same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(bits(got), bits(want))


def bits(array):
    """The bits, of NaN those of one: XLA on CPU may change which NaN of 8 bits an array holds."""
    if array.dtype != np.int8:
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.view(np.uint8)
