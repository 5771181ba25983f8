"""Without a named backend, programs for CPU hold no TPU kernel and programs for TPU do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from paged_jax import core, ops
from tests.hlo import pool_copies
from tests.kernels.steps import HEADS, KV_HEADS, ROWS, WIDTH, context, make_operands, step

KERNELS = ("copy_blocks", "paged_write", "paged_decode", "paged_prefill")


@pytest.fixture
def operands(rng):
    """A pool of random tokens and arguments of `step`."""
    return make_operands(rng)


@functools.cache
def lowered(backend):
    """The program of `step` for CPU, with the pool donated."""
    spec = core.CacheSpec(num_layers=2, num_kv_heads=KV_HEADS, head_dim=WIDTH)
    cache = jax.eval_shape(lambda: core.create_kv_cache(spec, 6, 8, "float32"))
    q, keys = (jax.ShapeDtypeStruct((ROWS, n, WIDTH), jnp.float32) for n in (HEADS, KV_HEADS))
    named = functools.partial(step, backend=backend)
    return jax.jit(named, donate_argnums=0).lower(cache, q, keys, keys)


@functools.cache
def program(backend):
    return lowered(backend).compile()


def run(backend, operands):
    """Runs it on a copy of the pool, which it takes for itself."""
    return program(backend)(*jax.tree.map(jnp.copy, operands))


def assert_same(got, want):
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(left, right)


def test_programs_for_cpu_update_the_pool_in_place_and_hold_no_kernel(operands):
    pool = operands[0].kv
    assert "tpu_custom_call" not in lowered(None).as_text()
    hlo = program(None).as_text()
    assert "conditional" not in hlo
    assert pool_copies(hlo, pool.shape) == []
    assert program(None).memory_analysis().alias_size_in_bytes >= pool.nbytes


def test_a_choice_for_cpu_is_the_xla_backend_to_the_bit(operands):
    assert_same(run(None, operands), run("xla", operands))


def test_programs_for_tpu_hold_every_kernel_when_exported_from_cpu(operands):
    text = export.export(jax.jit(step), platforms=["tpu"])(*operands).mlir_module()
    assert text.count("tpu_custom_call") >= len(KERNELS)
    for kernel in KERNELS:
        assert f'kernel_name = "{kernel}"' in text
    text = export.export(jax.jit(step), platforms=["cpu"])(*operands).mlir_module()
    assert "tpu_custom_call" not in text


def test_pools_that_kernels_refuse_are_served_by_xla_on_tpu_too(operands):
    _, q, keys, values = operands
    spec = core.CacheSpec(num_layers=2, num_kv_heads=KV_HEADS, head_dim=WIDTH)
    for block_size, dtype in ((4, "float32"), (8, "float16"), (8, "int8")):
        cache = core.create_kv_cache(spec, 6, block_size, dtype)
        exported = export.export(jax.jit(step), platforms=["tpu"])(cache, q, keys, values)
        assert "tpu_custom_call" not in exported.mlir_module()


@pytest.mark.exhaustive
def test_attention_can_be_mapped_over_queries(operands):
    cache, q, *_ = operands
    _, tables, lens, starts = context()

    def one(q):
        out = ops.paged_decode(q, cache, 1, tables, lens, sm_scale=0.1)
        return out + ops.paged_prefill(q, cache, 1, tables, lens, starts, sm_scale=0.1)

    batch = jnp.stack([q, 2 * q])
    out = jax.jit(jax.vmap(one))(batch)
    for i in range(2):
        np.testing.assert_allclose(out[i], jax.jit(one)(batch[i]), rtol=1e-6, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_heads_can_be_sharded(kind, operands):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    heads, pool = P(None, "x"), P(None, None, "x")
    cache_spec = dataclasses.replace(operands[0], kv=pool, scales=P())

    def local(cache, *tokens):
        cache, out = step(dataclasses.replace(cache, num_kv_heads=KV_HEADS // 2), *tokens)
        return cache.kv, out

    specs = (cache_spec, heads, heads, heads)
    sharded_step = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(pool, heads), check_vma=False)
    )
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    sharded = jax.tree.map(jax.device_put, operands, shardings)
    want, out = run("xla", operands)
    assert_same(sharded_step(*sharded), (want.kv, out))


@pytest.mark.parametrize("op", ["write", "copy", "decode", "prefill"])
def test_what_a_named_kernel_cannot_serve_is_refused(op, operands):
    _, q, keys, values = operands
    slots, tables, lens, starts = context()
    spec = core.CacheSpec(num_layers=1, num_kv_heads=KV_HEADS, head_dim=WIDTH)

    def call(cache, **options):
        calls = {
            "write": lambda: ops.write_kv(cache, 0, keys, values, slots, **options),
            "copy": lambda: ops.copy_kv(cache, tables[:, 0], tables[:, 1], **options),
            "decode": lambda: ops.paged_decode(q, cache, 0, tables, lens, sm_scale=1.0, **options),
            "prefill": lambda: ops.paged_prefill(
                q, cache, 0, tables, lens, starts, sm_scale=1.0, **options
            ),
        }
        return jax.eval_shape(calls[op])

    half = core.create_kv_cache(spec, 6, 8, "float16")
    with pytest.raises(NotImplementedError, match="float16"):
        call(half, backend="pallas_tpu")
    call(half)
    for backend in (None, "xla"):
        with pytest.raises(ValueError, match="interpret needs a backend that is a Pallas kernel"):
            call(half, backend=backend, interpret=True)
    if op == "copy":  # whole blocks of any shape
        return
    refused = {
        "block_size 4": core.create_kv_cache(spec, 6, 4, "float32"),
        "block_size 64 with an 8-bit pool": core.create_kv_cache(spec, 6, 64, "int8"),
    }
    narrow = dataclasses.replace(spec, head_dim=96)
    refused["multiple of 128"] = core.create_kv_cache(narrow, 6, 8, "float32", layout="split")
    for message, cache in refused.items():
        width = cache.head_dim
        q, keys, values = (x[..., :width] for x in (q, keys, values))
        with pytest.raises(NotImplementedError, match=message):
            call(cache, backend="pallas_tpu")
        call(cache)


def test_a_pool_can_be_mapped_over(operands):
    cache, q, keys, values = operands
    slots, tables, lens, _ = context()

    def one(keys):
        written = ops.write_kv(cache, 0, keys, values, slots)
        return ops.paged_decode(q[: len(lens)], written, 0, tables, lens, sm_scale=0.1)

    batch = jnp.stack([keys, 2 * keys])
    mapped = jax.jit(jax.vmap(one))
    for out, each in zip(mapped(batch), batch, strict=True):
        np.testing.assert_allclose(out, jax.jit(one)(each), rtol=1e-6, atol=1e-6)
    exported = jax.export.export(mapped, platforms=["tpu"])(batch)
    assert "tpu_custom_call" in exported.mlir_module()


def test_outside_of_shard_map_an_explicit_mesh_gets_xla(operands):
    cache, q, _, _ = operands
    _, tables, lens, _ = context()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])

    def decode(q, cache):
        return ops.paged_decode(q, cache, 0, tables, lens, sm_scale=0.1)

    want = jax.jit(decode)(q[: len(lens)], cache)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(decode)(q[: len(lens)], cache), want)


def test_lists_that_scalar_memory_cannot_hold_get_xla():
    spec = core.CacheSpec(num_layers=1, num_kv_heads=8, head_dim=256)
    cache = jax.eval_shape(lambda: core.create_kv_cache(spec, 2048, 128, "float32"))
    rows = 1024
    shapes = (
        jax.ShapeDtypeStruct((rows, 8, 256), jnp.float32),
        cache,
        jax.ShapeDtypeStruct((rows, 1024), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )

    def decode(q, cache, tables, lens, backend=None):
        return ops.paged_decode(q, cache, 0, tables, lens, sm_scale=0.1, backend=backend)

    assert jax.eval_shape(decode, *shapes).shape == (rows, 8, 256)
    with pytest.raises(NotImplementedError, match="1024 rows of 131072 tokens"):
        jax.eval_shape(lambda *args: decode(*args, backend="pallas_tpu"), *shapes)
