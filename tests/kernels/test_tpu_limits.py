"""TPU attention at the edges of what it serves, interpreted on CPU: many rows, few or no tokens."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core, ops
from pallas_kernels.compat import tpu_interpret_params
from pallas_kernels.reference import attention_reference
from pallas_kernels.tpu import tables
from pallas_kernels.tpu.config import DecodeConfig, PrefillConfig, prefill_config
from pallas_kernels.tpu.decode import paged_decode
from pallas_kernels.tpu.heads import heads_of
from pallas_kernels.tpu.prefill import paged_prefill
from tests.kernels.cases import (
    BASE,
    LAYER,
    SM_SCALE,
    Inputs,
    assert_close,
    build,
    expected_decode,
)
from tests.kernels.races import assert_orderly

# (queries, keys) of every row of 1 to 9 queries and up to 33 keys.
LENGTHS = [(count, total) for count in range(1, 10) for total in range(count, 34)]
CALLS = 9  # of 29 rows each

NARROW = dataclasses.replace(
    BASE, block_size=8, num_heads=2, num_kv_heads=1, head_dim=128, is_for_tpu=True
)


@functools.cache
def narrow_prefill():
    """Tiles of 8 queries against chunks of two blocks of 8 keys."""
    config = PrefillConfig(tile_tokens=8, chunk_tokens=16, heads_per_step=1)
    return jax.jit(
        functools.partial(
            paged_prefill,
            sm_scale=SM_SCALE,
            num_kv_heads=1,
            config=config,
            interpret=tpu_interpret_params(),
        )
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", range(CALLS))
def test_any_number_of_queries_meets_any_number_of_keys(call, capsys):
    counts, totals = zip(*LENGTHS[call::CALLS], strict=True)
    case = dataclasses.replace(NARROW, context_lens=totals, query_lens=counts, table_width=5)
    inputs = build(case)
    q = np.full((29 * 9, 2, 128), np.nan, np.float32)  # the shape of every call
    q[: len(inputs.prefill_q)] = inputs.prefill_q
    context = inputs.block_tables, inputs.context_lens, inputs.query_starts
    out, _ = narrow_prefill()(q, inputs.cache.kv, LAYER, *context)
    assert_close(np.asarray(out), oracle(q, inputs))
    assert_orderly(capsys)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_rows", [8, 5, 1, 0])
def test_cores_share_the_rows_of_decode(num_rows, capsys):
    # The first core gets four rows, of which the last has three items.
    lens = (17, 0, 1, 33, 130, 8, 0, 40)
    case = dataclasses.replace(NARROW, context_lens=lens, query_lens=(0,) * 8, table_width=17)
    inputs = build(case)
    config = DecodeConfig(block_tokens=16, heads_per_tile=1, num_cores=2)
    out, _ = decode_with(config)(
        inputs.decode_q, inputs.cache.kv, LAYER, inputs.block_tables, inputs.context_lens, num_rows
    )
    lens = np.where(np.arange(8) < num_rows, inputs.context_lens, 0)
    inputs = dataclasses.replace(inputs, context_lens=lens)
    assert_close(np.asarray(out), expected_decode(inputs)[0])
    assert_orderly(capsys)


@functools.cache
def decode_with(config: DecodeConfig):
    def run(q, kv, layer, block_tables, lens, num_rows):
        return paged_decode(
            q,
            kv,
            layer,
            block_tables,
            lens,
            num_rows=num_rows,
            sm_scale=SM_SCALE,
            num_kv_heads=1,
            config=config,
            interpret=tpu_interpret_params(),
        )

    return jax.jit(run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_tables_that_scalar_memory_cannot_hold_stay_in_hbm(kernel, capsys):
    """256 rows of 4096 blocks are 4 MiB; six rows have tokens, two of them side by side."""
    num_rows, width, live = 256, 4096, [0, 1, 77, 128, 254, 255]
    lens = (40, 1, 130, 8, 17, 9)
    case = dataclasses.replace(
        NARROW, context_lens=lens, query_lens=(3, 1, 9, 8, 0, 2), table_width=17
    )
    inputs = build(case)
    block_tables = np.full((num_rows, width), 2**30, np.int32)
    block_tables[live, :17] = inputs.block_tables
    context_lens = np.zeros(num_rows, np.int32)
    context_lens[live] = lens
    counts = np.zeros(num_rows, np.int32)
    counts[live] = case.query_lens
    q = np.full((num_rows, 2, 128), np.nan, np.float32)
    q[live] = inputs.decode_q
    spread = dataclasses.replace(
        inputs,
        decode_q=q,
        block_tables=block_tables,
        context_lens=context_lens,
        query_starts=np.array([0, *np.cumsum(counts)], np.int32),
    )
    assert not tables.table_of(jnp.asarray(block_tables)).is_in_smem
    if kernel == "decode":
        config = DecodeConfig(block_tokens=128, heads_per_tile=1)
        out, _ = decode_with(config)(
            q, inputs.cache.kv, LAYER, block_tables, context_lens, num_rows
        )
        want = expected_decode(spread)[0]
    else:
        q = inputs.prefill_q
        context = block_tables, context_lens, spread.query_starts
        out, _ = narrow_prefill()(q, inputs.cache.kv, LAYER, *context)
        want = oracle(q, spread)
    assert_close(np.asarray(out), want)
    assert_orderly(capsys)


def test_a_work_list_that_scalar_memory_cannot_hold_is_refused():
    def decode(num_rows, width, **options):
        shapes = (num_rows, 8, 256), (1, 9, 16, 128, 256), (num_rows, width), (num_rows,)
        dtypes = jnp.float32, jnp.float32, jnp.int32, jnp.int32
        arrays = itertools.starmap(jax.ShapeDtypeStruct, zip(shapes, dtypes, strict=True))

        def run(q, kv, block_tables, lens):
            operands = q, kv, 0, block_tables, lens
            return paged_decode(*operands, sm_scale=1.0, num_kv_heads=8, **options)

        return jax.eval_shape(run, *arrays)

    decode(256, 1024)
    message = r"work list of 1024 rows of 131072 tokens needs more than 327680 bytes"
    with pytest.raises(NotImplementedError, match=message):
        decode(1024, 1024)
    with pytest.raises(NotImplementedError, match="32768 rows; a work list holds at most 32767"):
        decode(32768, 1, config=DecodeConfig(block_tokens=128, heads_per_tile=1))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kv_dtype", "width", "block_size"),
    [
        pytest.param("float32", 64, 8, id="packed"),
        # Three heads have six scales a token, padded to eight.
        pytest.param("int8", 128, 128, id="int8"),
    ],
)
def test_operations_do_what_the_xla_backend_does(kv_dtype, width, block_size, rng, capsys):
    """Row 0 has a token more than a block; row 1 reads a copy of its first block."""
    spec = core.CacheSpec(num_layers=2, num_kv_heads=3, head_dim=width)
    layout = "packed" if width == 64 else "split"
    cache = core.create_kv_cache(spec, 5, block_size, kv_dtype, layout=layout)
    if cache.is_quantized:
        shape = (*cache.scales.shape[:2], 8, block_size)
        cache = dataclasses.replace(cache, scales=jnp.zeros(shape))
    keys, values = rng.standard_normal((2, block_size + 2, 3, width), np.float32)
    slots = np.array([*range(block_size, 2 * block_size), 4 * block_size, 0], np.int32)
    q = rng.standard_normal((6, 6, width), np.float32)
    sinks = rng.standard_normal(6, np.float32)

    def run(cache, keys, values, q, sinks, slots, num_rows, **options):
        block_tables = jnp.array([[1, 4], [3, 5]])
        lens, starts = jnp.array([block_size + 1, block_size]), jnp.array([0, 3, 5])
        cache = ops.write_kv(cache, 1, keys, values, slots, **options)
        cache = ops.copy_kv(cache, jnp.array([1, 0]), jnp.array([3, 0]), **options)
        options |= {
            "sm_scale": SM_SCALE,
            "sliding_window": block_size,
            "soft_cap": 4.0,
            "sinks": sinks,
            "num_rows": num_rows,
            "return_lse": True,
        }
        context = cache, 1, block_tables, lens
        decoded = ops.paged_decode(q[:2], *context, **options)
        first_row = 2 - num_rows
        filled = ops.paged_prefill(q, *context, starts, first_row=first_row, **options)
        return cache, decoded, filled

    interpreted = {"backend": "pallas_tpu", "interpret": tpu_interpret_params()}
    got, want = (
        jax.jit(functools.partial(run, **options)) for options in (interpreted, {"backend": "xla"})
    )
    for num_rows in (2, 1):
        operands = cache, keys, values, q, sinks, slots, num_rows
        (pool, *outputs), (expected_pool, *expected) = got(*operands), want(*operands)
        # The null block takes padding or does not.
        np.testing.assert_array_equal(pool.kv[:, 1:], expected_pool.kv[:, 1:])
        if cache.is_quantized:
            six = np.s_[:, 1:, :6]
            np.testing.assert_array_equal(pool.scales[six], expected_pool.scales[six])
        for left, right in zip(*map(jax.tree.leaves, (outputs, expected)), strict=True):
            assert_close(np.asarray(left), np.asarray(right))
        assert_orderly(capsys)


def oracle(q: np.ndarray, inputs: Inputs) -> np.ndarray:
    """Outputs of packed queries."""
    return np.asarray(
        attention_reference(
            jnp.asarray(q),
            jnp.asarray(inputs.split_kv),
            LAYER,
            inputs.block_tables,
            inputs.context_lens,
            inputs.query_starts,
            SM_SCALE,
        )[0]
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tile_tokens": 24}, r"tile_tokens \(24\) must be a power of two"),
        ({"heads_per_step": 0}, r"heads_per_step \(0\) must be an integer of at least 1"),
        ({"heads_per_step": 2}, r"heads_per_step \(2\) must divide pool heads \(3\)"),
        ({"chunk_tokens": 24}, r"block_size \(16\) must divide chunk_tokens \(24\)"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(fields, message):
    kv, i32 = jnp.zeros((1, 3, 6, 16, 128)), jnp.int32
    good = {"tile_tokens": 16, "chunk_tokens": 16, "heads_per_step": 1}
    arrays = jnp.zeros((1, 2), i32), jnp.zeros(1, i32), jnp.zeros(2, i32)
    with pytest.raises(ValueError, match=message):
        paged_prefill(
            jnp.zeros((4, 3, 128)),
            kv,
            0,
            *arrays,
            sm_scale=1.0,
            num_kv_heads=3,
            config=PrefillConfig(**good | fields),
        )


def test_rows_of_more_blocks_than_scalar_memory_holds_are_refused():
    table = jax.ShapeDtypeStruct((2, 100_000), jnp.int32)
    with pytest.raises(NotImplementedError, match="100000 blocks per row"):
        jax.eval_shape(lambda table: tables.table_of(table).array, table)


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "most"), [(32, 128, 16), (16, 256, 8), (64, 128, 16), (8, 128, 8)]
)
def test_as_many_heads_per_step_as_vector_memory_holds(num_heads, head_dim, most):
    """Of small blocks all heads are copied at once, unless their tiles are too large."""

    def config(kv):
        heads = heads_of((num_heads, head_dim), kv, num_heads)
        found.append(prefill_config(heads, kv, jnp.bfloat16, num_tokens=2048, max_tokens=4096))

    found = []
    jax.eval_shape(config, jax.ShapeDtypeStruct((1, 2, 2 * num_heads, 16, head_dim), jnp.bfloat16))
    assert 1 < found[0].heads_per_step <= most
    assert num_heads % found[0].heads_per_step == 0
