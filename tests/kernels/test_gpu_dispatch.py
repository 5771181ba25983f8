"""Without a named backend, programs for CUDA hold Triton kernels and programs for CPU do not."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from paged_jax import core, ops
from pallas_kernels import compat
from tests.kernels.steps import KV_HEADS, WIDTH, context, make_operands, step

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

# The same sums in another order.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


class Gpu(AbstractDevice):
    """A device that tells its compute capability, as real ones do."""

    compute_capability = "9.0"


class OldGpu(AbstractDevice):
    compute_capability = "8.0"


@pytest.fixture
def operands(rng):
    """A pool of random tokens and arguments of `step`."""
    return make_operands(rng)


@contextlib.contextmanager
def traced_for(kind: type[AbstractDevice]):
    device = kind(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        yield


def lower(fn, *args, platform="cuda", kind=Gpu):
    with traced_for(kind):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_programs_for_cuda_hold_kernels_and_programs_for_cpu_do_not(operands):
    text = lower(step, *operands)
    for kernel in ("copy_blocks", "paged_decode", "paged_decode_join", "paged_prefill"):
        assert f'"{kernel}"' in text
    assert text.count(compat.TRITON_CUSTOM_CALL) == 4
    # Keys and values are written by XLA: what rotates the keys is fused into that.
    assert "scatter" in text
    assert compat.TRITON_CUSTOM_CALL not in lower(step, *operands, platform="cpu")
    assert compat.TRITON_CUSTOM_CALL not in lower(step, *operands, platform="tpu")


def test_a_step_of_interpreted_kernels_is_the_step_of_xla(operands):
    run = functools.partial(step, backend="pallas_triton", interpret=True)
    got, want = jax.jit(run)(*operands), jax.jit(functools.partial(step, backend="xla"))(*operands)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(left, right, **CLOSE)


@pytest.mark.parametrize("dtype", ["float16", "int8", "float8_e4m3fn"])
def test_blocks_of_any_dtype_are_copied_with_their_scales(dtype, rng):
    spec = core.CacheSpec(num_layers=2, num_kv_heads=3, head_dim=40)
    cache = core.create_kv_cache(spec, 9, 4, dtype)
    cache = dataclasses.replace(
        cache,
        kv=jnp.asarray(rng.integers(-9, 9, cache.kv.shape), cache.kv.dtype),
        scales=jnp.asarray(rng.standard_normal(cache.scales.shape, np.float32)),
    )
    src, dst = jnp.array([1, 0, 2, 1]), jnp.array([5, 0, 9, 3])
    want = ops.copy_kv(cache, src, dst, backend="xla")
    got = ops.copy_kv(cache, src, dst, backend="pallas_triton", interpret=True)
    np.testing.assert_array_equal(got.kv.view(jnp.uint8), want.kv.view(jnp.uint8))
    np.testing.assert_array_equal(got.scales, want.scales)
    nothing = jnp.zeros(0, jnp.int32)
    same = ops.copy_kv(cache, nothing, nothing, backend="pallas_triton", interpret=True)
    np.testing.assert_array_equal(same.kv.view(jnp.uint8), cache.kv.view(jnp.uint8))


def decode(cache, q, **options):
    _, tables, lens, _ = context()
    return ops.paged_decode(q, cache, 0, tables, lens, sm_scale=0.1, **options)


def test_pools_that_kernels_refuse_are_served_by_xla_on_cuda_too():
    spec = core.CacheSpec(num_layers=1, num_kv_heads=KV_HEADS, head_dim=40)
    cache, q = core.create_kv_cache(spec, 6, 8, "float32"), jnp.ones((3, 4, 40))
    assert compat.TRITON_CUSTOM_CALL not in lower(decode, cache, q)
    with pytest.raises(NotImplementedError, match="head_dim 40; GPU kernels need a multiple of 16"):
        lower(functools.partial(decode, backend="pallas_triton"), cache, q)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_floats_need_a_device_that_converts_them(dtype):
    spec = core.CacheSpec(num_layers=1, num_kv_heads=KV_HEADS, head_dim=WIDTH)
    cache, q = core.create_kv_cache(spec, 6, 8, dtype), jnp.ones((3, 4, WIDTH), jnp.bfloat16)
    assert compat.TRITON_CUSTOM_CALL in lower(decode, cache, q)
    assert compat.TRITON_CUSTOM_CALL not in lower(decode, cache, q, kind=OldGpu)
    with pytest.raises(NotImplementedError, match=f"{dtype}.* has 8.0: use int8"):
        lower(functools.partial(decode, backend="pallas_triton"), cache, q, kind=OldGpu)
    int8 = core.create_kv_cache(spec, 6, 8, "int8")
    assert compat.TRITON_CUSTOM_CALL in lower(decode, int8, q, kind=OldGpu)


def test_programs_for_cuda_can_be_exported_from_cpu(operands):
    check = jax.export.DisabledSafetyCheck.custom_call(compat.TRITON_CUSTOM_CALL)
    export = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=[check])
    with traced_for(Gpu):
        text = export(*operands).mlir_module()
    assert text.count(f"@{compat.TRITON_CUSTOM_CALL}") == 4
    # For some GPU or other there is XLA's code.
    text = jax.export.export(jax.jit(step), platforms=["cuda"])(*operands).mlir_module()
    assert compat.TRITON_CUSTOM_CALL not in text


def pool_and_queries(width):
    """A pool that suits the GPU's kernels, and for 128 lanes TPU's too, and queries."""
    spec = core.CacheSpec(num_layers=1, num_kv_heads=KV_HEADS, head_dim=width)
    cache = core.create_kv_cache(spec, 6, 8, "float32")
    block = jnp.arange(7.0)[None, :, None, None, None]
    return dataclasses.replace(cache, kv=block + cache.kv), jnp.ones((3, 4, width))


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [16, 128])
def test_64_bit_integers_change_nothing(width):
    cache, q = pool_and_queries(width)
    keys = jnp.ones((3, KV_HEADS, width))
    want = jax.jit(step)(cache, q, keys, keys)
    with jax.enable_x64(True):
        got = jax.jit(step)(cache, q, keys, keys)
        assert compat.TRITON_CUSTOM_CALL in lower(step, cache, q, keys, keys)
        interpreted = functools.partial(decode, backend="pallas_triton", interpret=True)
        np.testing.assert_allclose(interpreted(cache, q), decode(cache, q), **CLOSE)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype


@pytest.mark.parametrize("width", [16, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_what_a_kernel_may_run_has_xla_s_derivative(width):
    cache, q = pool_and_queries(width)

    def moved(fn):
        return jax.jit(lambda x: jax.jvp(fn, (x,), (x,)))(q)

    got, want = (moved(functools.partial(decode, cache, backend=b)) for b in (None, "xla"))
    for left, right in zip(got, want, strict=True):
        np.testing.assert_array_equal(left, right)

    @jax.jit
    @jax.grad
    def slope(weight):  # a loss of what the same weight has made, which is held fixed
        return jnp.sum(jax.lax.stop_gradient(decode(cache, q * weight)) * weight)

    np.testing.assert_allclose(slope(1.0), jnp.sum(decode(cache, q)), rtol=1e-6)
    copied = moved(lambda q: ops.copy_kv(cache, jnp.array([1]), jnp.array([2])).kv.sum() * q)
    assert copied[1].shape == q.shape


def test_a_sink_of_nothing_is_nothing():
    cache, q = pool_and_queries(16)
    options = {"sm_scale": 0.1, "return_lse": True, "sinks": jnp.array([-jnp.inf, 0.0, 1.0, -1e30])}
    lens = jnp.array([0, 2, 0])
    _, tables, _, _ = context()

    def lse(**which):
        return ops.paged_decode(q, cache, 0, tables, lens, **options, **which)[1]

    got = lse(backend="pallas_triton", interpret=True)
    np.testing.assert_allclose(got[:, :3], lse(backend="xla")[:, :3], **CLOSE)
    assert np.all(got[::2, 0] == -np.inf)


def test_blocks_that_are_not_there_are_not_written():
    cache, _ = pool_and_queries(16)
    src, dst = jnp.array([1, 2]), jnp.array([99, 3])
    got = ops.copy_kv(cache, src, dst, backend="pallas_triton", interpret=True).kv
    want = cache.kv.at[:, 3].set(cache.kv[:, 2])
    np.testing.assert_array_equal(got, want)


@pytest.mark.exhaustive
def test_attention_can_be_mapped_over_queries(operands):
    cache, q, *_ = operands
    batch = jnp.stack([q, 2 * q])
    mapped = jax.vmap(functools.partial(decode, cache))
    assert compat.TRITON_CUSTOM_CALL in lower(mapped, batch)
    interpreted = functools.partial(decode, backend="pallas_triton", interpret=True)
    for i in range(2):
        got = jax.jit(interpreted)(cache, batch[i])
        np.testing.assert_allclose(got, jax.jit(mapped)(batch)[i], **CLOSE)


@pytest.mark.exhaustive
def test_heads_can_be_sharded(operands):
    cache, q, *_ = operands
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def local(kv, q):
        mine = dataclasses.replace(cache, kv=kv, num_kv_heads=KV_HEADS // 2)
        return decode(mine, q, backend="pallas_triton", interpret=True)

    heads, pool = P(None, "x"), P(None, None, "x")
    sharded = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(pool, heads), out_specs=heads, check_vma=False)
    )
    np.testing.assert_allclose(sharded(cache.kv, q), decode(cache, q, backend="xla"), **CLOSE)


@pytest.mark.skipif(compat.has_mosaic_gpu(), reason="this JAX has it")
def test_mosaic_gpu_is_refused_where_jax_lacks_it(operands):
    with pytest.raises(NotImplementedError, match="Mosaic GPU kernels need"):
        decode(*operands[:2], backend="mosaic_gpu", interpret=True)
