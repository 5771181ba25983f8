"""The TPU kernel that copies blocks changes the blocks it copies to, to the bit, and no other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from paged_jax.core import KVCache
from paged_jax.core import copy_blocks as core_copy_blocks
from pallas_kernels.compat import tpu_interpret_params
from pallas_kernels.tpu.copy import copy_blocks
from tests.kernels.races import MESSAGE, assert_orderly, races_found

LAYERS, BLOCKS = 3, 24


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_blocks_are_copied_and_nothing_else_changes(dtype, rng, capsys):
    shape = (LAYERS, BLOCKS + 1, 2, 8)
    is_quantized = dtype != "bfloat16"
    kv = rng.standard_normal((*shape, 128)).astype(jnp.dtype(dtype))
    scales = rng.standard_normal(shape, np.float32)
    # More pairs than are in flight, one block copied twice, padding in front, between and behind.
    src = np.array([5, 3, 1, 1, 7, 0, 2, 9, 10, 11, 0, 12, 8, 6], np.int32)
    dst = np.array([0, 13, 14, 15, 16, 0, 17, 18, 19, 20, 0, 21, 22, 0], np.int32)
    for blocks in (kv, scales):
        blocks[:, dst[dst > 0]] = np.nan
    pools = (jnp.asarray(kv), jnp.asarray(scales))[: 2 if is_quantized else 1]
    copy = jax.jit(functools.partial(copy_blocks, interpret=tpu_interpret_params()))
    got = copy(pools, src, dst)
    jax.block_until_ready(got)
    assert_orderly(capsys)
    cache = KVCache(
        kv=pools[0],
        scales=pools[1] if is_quantized else jnp.zeros(0),
        layout="split",
        num_kv_heads=1,
        head_dim=128,
    )
    want = jax.jit(core_copy_blocks)(cache, src, dst)
    for pool, expected in zip(got, (want.kv, want.scales), strict=False):
        assert_same_bits(pool, expected)
    for pool, expected in zip(copy(pools, src, np.zeros_like(dst)), pools, strict=True):
        assert_same_bits(pool, expected)


def test_a_block_that_is_written_and_read_is_found_to_race(capsys):
    """Otherwise tests that find no race would show nothing."""
    pools = (jnp.zeros((1, 4, 2, 8, 128)),)
    src, dst = jnp.array([1, 2]), jnp.array([2, 3])
    try:
        jax.block_until_ready(copy_blocks(pools, src, dst, interpret=tpu_interpret_params()))
        found = races_found(capsys)
    except jax.errors.JaxRuntimeError as error:  # JAX 0.12
        found = MESSAGE in str(error)
        pltpu.reset_tpu_interpret_mode_state()
    assert found


def test_arguments_that_cannot_be_served_are_refused():
    kv, ids = jnp.zeros((1, 2, 2, 8, 128)), jnp.zeros(2, jnp.int32)
    with pytest.raises(NotImplementedError, match="float16"):
        copy_blocks((kv.astype(jnp.float16),), ids, ids)
    with pytest.raises(ValueError, match="equal length"):
        copy_blocks((kv,), ids, ids[:1])


def assert_same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
