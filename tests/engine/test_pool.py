"""How options are settled: pool size from blocks, bytes or memory, and what is refused."""

import logging
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.config import EngineConfig
from paged_jax.core import CacheSpec
from paged_jax.engine import pool

SPEC = CacheSpec(num_layers=2, num_kv_heads=2, head_dim=8)
BLOCK_BYTES = 2 * 4 * 16 * 8 * 4  # layers, rows, positions, features, bytes


def resolve(max_position=None, **options):
    return pool.resolve(EngineConfig(**options), SPEC, np.float32, max_position)


def test_the_number_of_blocks_is_taken_as_given():
    assert resolve(num_blocks=7, kv_cache_memory_bytes=10**9).num_blocks == 7


def test_bytes_hold_the_pool_and_its_null_block():
    for count in (2, 3, 50):
        config = resolve(kv_cache_memory_bytes=count * BLOCK_BYTES + 5)
        assert config.num_blocks == count - 1
        cache = core.create_kv_cache(SPEC, config.num_blocks, config.block_size, np.float32)
        assert cache.kv.nbytes == count * BLOCK_BYTES


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("latent_dim", [0, 8])
def test_scales_count(name, latent_dim):
    spec = CacheSpec(num_layers=2, num_kv_heads=1, head_dim=12, latent_dim=latent_dim)
    options = EngineConfig(
        kv_cache_dtype=name,
        kv_cache_memory_bytes=100_000,
        max_num_seqs=2048,
        max_num_batched_tokens=2048,
    )
    dtype = jnp.dtype(options.kv_dtype)
    config = pool.resolve(options, spec, dtype, None)
    cache = core.create_kv_cache(spec, config.num_blocks, config.block_size, dtype)
    rows = 1 if latent_dim else 2
    assert cache.block_bytes == 2 * 16 * (rows * 12 + 2 * 4)
    assert 0 <= 100_000 - cache.pool_bytes < cache.block_bytes
    assert config.swap_blocks == 4 * 2**30 // cache.block_bytes


def test_8_bit_blocks_on_tpu_have_whole_lanes_of_scales(monkeypatch):
    monkeypatch.setattr(pool.jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(pool, "_free_bytes", lambda platform: None)
    options = {"num_blocks": 4, "kv_cache_dtype": "int8"}
    assert pool.resolve(EngineConfig(**options), SPEC, np.int8, None).block_size == 128
    with pytest.raises(ValueError, match=r"block_size \(64\) must be a multiple of 128 on TPU"):
        pool.resolve(EngineConfig(**options, block_size=64), SPEC, np.int8, None)


def test_no_more_blocks_than_can_be_used():
    config = resolve(kv_cache_memory_bytes=2**40, max_num_seqs=3, max_model_len=100)
    assert config.num_blocks == 3 * 7
    assert config.max_blocks_per_seq == 7


@pytest.mark.parametrize(
    ("free", "expected"),
    [(100 * BLOCK_BYTES, 50 * BLOCK_BYTES), (2**40, 4 * 2**30)],
)
def test_a_cpu_pool_takes_half_of_free_memory_up_to_4_gib(monkeypatch, free, expected):
    monkeypatch.setattr(pool, "_free_host_bytes", lambda: free)
    config = resolve(max_num_seqs=4096, max_num_batched_tokens=4096, max_model_len=2**20)
    assert config.num_blocks == expected // BLOCK_BYTES - 1


def test_free_memory_is_read_from_this_machine():
    assert 2**24 < pool._free_host_bytes() < 2**50


def test_memory_for_less_than_a_block_is_refused_with_the_arithmetic():
    with pytest.raises(ValueError, match=rf"{BLOCK_BYTES + 1} bytes.*two blocks of {BLOCK_BYTES}"):
        resolve(kv_cache_memory_bytes=BLOCK_BYTES + 1)


@pytest.fixture
def device(monkeypatch):
    """An accelerator of 10 GB, 4 of which are in use; change what it tells."""
    stats = {"bytes_limit": 10**10, "bytes_in_use": 4 * 10**9}
    devices = [SimpleNamespace(memory_stats=lambda: stats)]
    monkeypatch.setattr(pool.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(pool.jax, "local_devices", lambda: devices)
    return stats


def test_an_accelerators_pool_is_its_fraction_less_what_is_in_use(device):
    """C17: what others hold counts, as the weights do; the rest is for activations."""
    many = {"max_num_seqs": 4096, "max_num_batched_tokens": 4096, "max_model_len": 2**20}
    assert resolve(**many).num_blocks == (9 * 10**9 - 4 * 10**9) // BLOCK_BYTES - 1
    half = resolve(gpu_memory_utilization=0.5, **many)
    assert half.num_blocks == (5 * 10**9 - 4 * 10**9) // BLOCK_BYTES - 1
    assert resolve(max_num_seqs=2, max_model_len=64).num_blocks == 8, "all that can be used"
    device["bytes_in_use"] = 9 * 10**9
    with pytest.raises(ValueError, match="must hold two blocks"):
        resolve(**many)


def test_a_pool_larger_than_what_is_left_is_refused(device, monkeypatch):
    """C17: what is asked for wins over the formula, and is checked."""
    most = 6 * 10**9 // BLOCK_BYTES - 1
    many = {"max_num_seqs": 4096, "max_num_batched_tokens": 4096, "max_model_len": 2**20}
    assert resolve(num_blocks=most).num_blocks == most
    with pytest.raises(
        ValueError, match=rf"num_blocks \({most + 1}\) needs .* has 6000000000 left"
    ):
        resolve(num_blocks=most + 1)
    with pytest.raises(ValueError, match="lower num_blocks or kv_cache_memory_bytes"):
        resolve(kv_cache_memory_bytes=7 * 10**9, **many)
    device.clear()
    assert resolve(num_blocks=10**9).num_blocks == 10**9, "the device does not tell"
    with pytest.raises(ValueError, match="does not tell its memory; set num_blocks"):
        resolve(**many)
    monkeypatch.setattr(pool.jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(pool, "_free_host_bytes", lambda: 100 * BLOCK_BYTES)
    with pytest.raises(ValueError, match=r"num_blocks \(100\)"):
        resolve(num_blocks=100)


def test_the_context_defaults_to_the_models_up_to_2048():
    assert resolve(max_position=None).max_model_len == 2048
    assert resolve(max_position=512).max_model_len == 512
    assert resolve(max_position=8192).max_model_len == 2048
    assert resolve(max_position=8192, max_model_len=8192).max_model_len == 8192
    with pytest.raises(ValueError, match=r"max_model_len \(513\) exceeds the model's positions"):
        resolve(max_position=512, max_model_len=513)


def test_a_pool_below_the_context_warns_with_the_longest_that_fits(caplog):
    with caplog.at_level(logging.INFO, "paged_jax"):
        resolve(num_blocks=10, max_model_len=320)
    messages = [record.getMessage() for record in caplog.records]
    assert any("the longest that fits is 160 tokens" in message for message in messages)
    assert "Maximum concurrency for 320 tokens per request: 0.50x" in messages


def test_a_cpu_takes_fewer_tokens_per_dispatch_by_default():
    assert resolve(num_blocks=4).max_num_batched_tokens == 512
    assert resolve(num_blocks=4, max_num_seqs=600).max_num_batched_tokens == 600
    assert resolve(num_blocks=4, max_num_batched_tokens=2048).max_num_batched_tokens == 2048


@pytest.mark.parametrize(
    ("platform", "heads", "dtype", "expected"),
    [
        ("cpu", 8, "float32", 16),
        ("gpu", 8, "bfloat16", 16),
        ("tpu", 8, "bfloat16", 64),  # 64 positions of 16 rows of 128: 256 KiB a copy
        ("tpu", 1, "bfloat16", 128),  # 32 KiB
        ("tpu", 8, "int8", 128),  # scales need whole lanes
    ],
)
def test_blocks_are_as_large_as_the_platform_copies_well(platform, heads, dtype, expected):
    spec = CacheSpec(num_layers=2, num_kv_heads=heads, head_dim=128)
    assert pool.default_block_size(platform, spec, jnp.dtype(dtype)) == expected


def test_float16_pools_are_refused_on_tpu(monkeypatch):
    monkeypatch.setattr(pool.jax, "default_backend", lambda: "tpu")
    with pytest.raises(NotImplementedError, match="float16"):
        pool.resolve(EngineConfig(num_blocks=8), SPEC, np.float16, None)
