"""GPU attention in Triton at the edges of what it serves: what is refused by name, and nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu import device
from pallas_kernels.gpu.triton_copy import copy_blocks
from pallas_kernels.gpu.triton_decode import paged_decode
from pallas_kernels.gpu.triton_prefill import paged_prefill

GIB = 1 << 30
KERNELS = ("decode", "prefill")
by_kernel = pytest.mark.parametrize("kernel", KERNELS)


def trace(
    kernel,
    *,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    pool=(2, 9, 4, 16, 128),
    dtype="bfloat16",
    has_scales=True,
    tokens=4,
    table=(4, 8),
    **options,
):
    """Shapes that come out, of arrays without memory."""
    is_8_bit = jnp.dtype(dtype).itemsize == 1
    arrays = {
        "q": jax.ShapeDtypeStruct((tokens, num_heads, head_dim), jnp.bfloat16),
        "kv": jax.ShapeDtypeStruct(pool, jnp.dtype(dtype)),
        "scales": jax.ShapeDtypeStruct(pool[:-1], jnp.float32) if is_8_bit and has_scales else None,
        "block_tables": jax.ShapeDtypeStruct(table, jnp.int32),
        "context_lens": jax.ShapeDtypeStruct(table[:1], jnp.int32),
        "layer": jax.ShapeDtypeStruct((), jnp.int32),
    }
    if kernel == "prefill":
        arrays["query_starts"] = jax.ShapeDtypeStruct((table[0] + 1,), jnp.int32)
    options |= {"sm_scale": 1.0, "num_kv_heads": num_kv_heads, "return_lse": True}
    op = paged_decode if kernel == "decode" else paged_prefill
    out, lse = jax.eval_shape(lambda arrays: op(**arrays, **options), arrays)
    assert (out.shape, out.dtype) == (arrays["q"].shape, jnp.bfloat16)
    assert (lse.shape, lse.dtype) == (arrays["q"].shape[:2], jnp.float32)


REFUSALS = {
    "head_dim": (
        {"head_dim": 40, "pool": (2, 9, 4, 16, 40)},
        NotImplementedError,
        "head_dim 40; GPU kernels need a multiple of 16",
    ),
    "heads": (
        {"num_heads": 3},
        ValueError,
        r"num_heads \(3\) must be a multiple of num_kv_heads \(2\)",
    ),
    "rows": ({"pool": (2, 9, 6, 16, 128)}, ValueError, "6 rows of 128 cannot hold 2 heads of 128"),
    "packed_rows": (
        {"num_kv_heads": 4, "head_dim": 64, "pool": (2, 9, 6, 16, 128)},
        ValueError,
        "6 rows of 128 cannot hold 4 heads of 64",
    ),
    "lanes": ({"head_dim": 256}, ValueError, "4 rows of 128 cannot hold 2 heads of 256"),
    "scales": (
        {"dtype": "int8", "has_scales": False},
        ValueError,
        "a pool of int8 needs scales",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
@by_kernel
def test_what_does_not_fit_is_refused_by_name(kernel, name):
    changed, error, message = REFUSALS[name]
    trace(kernel)
    with pytest.raises(error, match=message):
        trace(kernel, **changed)


def pool_of(num_bytes):
    """A pool of 1-byte numbers, of one block less or more for each 8192 bytes."""
    return (1, num_bytes // 8192, 4, 16, 128)


# Offsets are signed numbers of 32 bits up to 4 GiB.
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@by_kernel
def test_8_bit_pools_that_offsets_cannot_address_are_refused(kernel, dtype):
    for num_bytes in (2 * GIB + 8192, 3 * GIB, 4 * GIB):
        with pytest.raises(NotImplementedError, match=f"8-bit pool of {num_bytes} bytes; GPU ker"):
            trace(kernel, pool=pool_of(num_bytes), dtype=dtype)
    for num_bytes in (2 * GIB, 4 * GIB + 8192, 16 * GIB):
        trace(kernel, pool=pool_of(num_bytes), dtype=dtype)


@by_kernel
def test_other_pools_are_of_any_size(kernel):
    for num_blocks in (2 * GIB // 8192 + 1, 3 * GIB // 8192, 16 * GIB // 8192):
        trace(kernel, pool=(1, num_blocks, 4, 16, 128))


def test_copies_of_8_bit_pools_have_the_same_limit():
    def copy(num_bytes):
        ids = jax.ShapeDtypeStruct((2,), jnp.int32)
        pool = jax.ShapeDtypeStruct(pool_of(num_bytes), jnp.int8)
        jax.eval_shape(lambda pool, src, dst: copy_blocks((pool,), src, dst), pool, ids, ids)

    with pytest.raises(NotImplementedError, match="8-bit pool of 3221225472 bytes"):
        copy(3 * GIB)
    copy(2 * GIB)


@by_kernel
def test_8_bit_floats_are_refused_where_nothing_converts_them(kernel, monkeypatch):
    for capability in ((8, 0), (8, 6)):
        monkeypatch.setattr(device, "capability", lambda capability=capability: capability)
        trace(kernel, dtype="int8")
        message = rf"a pool of float8_e5m2; .* has 8\.{capability[1]}: use int8"
        with pytest.raises(NotImplementedError, match=message):
            trace(kernel, dtype="float8_e5m2")
    for capability in ((8, 9), (9, 0), (10, 0), None):
        monkeypatch.setattr(device, "capability", lambda capability=capability: capability)
        trace(kernel, dtype="float8_e5m2")


@pytest.mark.parametrize("changed", [{"table": (4, 0)}, {"table": (0, 8), "tokens": 0}], ids=str)
@by_kernel
def test_nothing_is_computed_of_nothing(kernel, changed):
    """A grid without programs is no grid, and a table without entries cannot be read."""
    trace(kernel, **changed)
    tokens, table = changed.get("tokens", 4), changed["table"]
    arrays = {
        "q": jnp.full((tokens, 2, 16), jnp.nan),
        "kv": jnp.full((1, 2, 2, 4, 16), jnp.nan),
        "layer": 0,
        "block_tables": jnp.zeros(table, jnp.int32),
        "context_lens": jnp.zeros(table[:1], jnp.int32),
    }
    if kernel == "prefill":
        arrays["query_starts"] = jnp.zeros(table[0] + 1, jnp.int32)
    op = paged_decode if kernel == "decode" else paged_prefill
    out, lse = op(**arrays, sm_scale=1.0, num_kv_heads=1, return_lse=True, interpret=True)
    np.testing.assert_array_equal(out, np.zeros((tokens, 2, 16), np.float32), strict=True)
    np.testing.assert_array_equal(lse, np.full((tokens, 2), -np.inf, np.float32), strict=True)


def test_prefill_of_rows_without_a_token():
    trace("prefill", tokens=0)
