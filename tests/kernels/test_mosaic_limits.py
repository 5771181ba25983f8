"""GPU attention in Mosaic GPU at the edges of what it serves: what is refused by name."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import compat
from pallas_kernels.gpu import device
from pallas_kernels.gpu.config import MosaicDecodeConfig, MosaicPrefillConfig
from pallas_kernels.gpu.mosaic_decode import paged_decode
from pallas_kernels.gpu.mosaic_prefill import paged_prefill

by_kernel = pytest.mark.parametrize("kernel", ["decode", "prefill"])
needs_backend = pytest.mark.skipif(
    not compat.has_mosaic_gpu(), reason="this JAX is older than the backend's first, 0.12"
)


def trace(
    kernel,
    *,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    pool=(2, 9, 4, 16, 128),
    dtype="bfloat16",
    q_dtype="bfloat16",
    has_scales=True,
    tokens=4,
    table=(4, 8),
):
    """Shapes that come out, of arrays without memory."""
    is_8_bit = jnp.dtype(dtype).itemsize == 1
    arrays = {
        "q": jax.ShapeDtypeStruct((tokens, num_heads, head_dim), jnp.dtype(q_dtype)),
        "kv": jax.ShapeDtypeStruct(pool, jnp.dtype(dtype)),
        "scales": jax.ShapeDtypeStruct(pool[:-1], jnp.float32) if is_8_bit and has_scales else None,
        "block_tables": jax.ShapeDtypeStruct(table, jnp.int32),
        "context_lens": jax.ShapeDtypeStruct(table[:1], jnp.int32),
        "layer": jax.ShapeDtypeStruct((), jnp.int32),
    }
    if kernel == "prefill":
        arrays["query_starts"] = jax.ShapeDtypeStruct((table[0] + 1,), jnp.int32)
    options = {"sm_scale": 1.0, "num_kv_heads": num_kv_heads, "return_lse": True}
    op = paged_decode if kernel == "decode" else paged_prefill
    out, lse = jax.eval_shape(lambda arrays: op(**arrays, **options), arrays)
    assert (out.shape, out.dtype) == (arrays["q"].shape, arrays["q"].dtype)
    assert (lse.shape, lse.dtype) == (arrays["q"].shape[:2], jnp.float32)


REFUSALS = {
    "head_dim": ({"head_dim": 96, "pool": (2, 9, 4, 16, 96)}, "head_dim 96; .* 64, 128, 256"),
    "group": ({"num_heads": 34}, "17 query heads per KV head; .* 16 at most"),
    "queries": ({"q_dtype": "float32"}, "queries of float32; .* bfloat16 and float16"),
    "pool": ({"dtype": "float32"}, "queries of bfloat16 and a pool of float32"),
    "mixed": ({"dtype": "float16"}, "queries of bfloat16 and a pool of float16"),
    "small_block": ({"pool": (2, 9, 4, 4, 128)}, "block_size 4; .* powers of two from 8 on"),
    "odd_block": ({"pool": (2, 9, 4, 24, 128)}, "block_size 24; .* powers of two from 8 on"),
}


@needs_backend
@pytest.mark.parametrize("name", REFUSALS)
@by_kernel
def test_what_is_not_served_is_refused_by_name(kernel, name):
    changed, message = REFUSALS[name]
    trace(kernel)
    with pytest.raises(NotImplementedError, match=message):
        trace(kernel, **changed)


@needs_backend
@by_kernel
def test_an_8_bit_pool_needs_scales(kernel):
    trace(kernel, dtype="int8")
    with pytest.raises(ValueError, match="a pool of int8 needs scales"):
        trace(kernel, dtype="int8", has_scales=False)


@needs_backend
@pytest.mark.parametrize(
    ("kernel", "refused", "served"),
    [("decode", (8, 0), (10, 0)), ("decode", (12, 0), (9, 0)), ("prefill", (10, 0), (9, 0))],
)
def test_other_generations_are_refused(kernel, refused, served, monkeypatch):
    monkeypatch.setattr(device, "capability", lambda: served)
    trace(kernel)
    monkeypatch.setattr(device, "capability", lambda: refused)
    with pytest.raises(NotImplementedError, match=rf"compute capability {refused[0]}\.0; .* 9\.x"):
        trace(kernel)


@needs_backend
@pytest.mark.parametrize("changed", [{"table": (4, 0)}, {"table": (0, 8), "tokens": 0}], ids=str)
@by_kernel
def test_nothing_is_computed_of_nothing(kernel, changed):
    trace(kernel, **changed)


@by_kernel
def test_an_older_jax_is_refused_by_name(kernel, monkeypatch):
    monkeypatch.setattr(compat, "has_mosaic_gpu", lambda: False)
    with pytest.raises(NotImplementedError, match=f"JAX {jax.__version__}; .* 0[.]12 or later"):
        trace(kernel)


@pytest.mark.skipif(compat.has_mosaic_gpu(), reason="this JAX has the backend")
@by_kernel
def test_this_jax_is_refused(kernel):
    with pytest.raises(NotImplementedError, match=r"0\.12 or later"):
        trace(kernel)


@pytest.mark.parametrize("config", [MosaicDecodeConfig, MosaicPrefillConfig])
def test_a_stage_is_whole_lines_of_weights(config):
    assert config(block_k=128).block_k == 128
    for block_k in (32, 96, 0):
        with pytest.raises(ValueError, match=rf"block_k \({block_k}\)"):
            config(block_k=block_k)
    with pytest.raises(ValueError, match=r"num_stages \(0\)"):
        config(num_stages=0)
