"""How large the KV pool is, and every other choice left open by the options."""

import logging
import os
from typing import Any

import jax
import numpy as np

from paged_jax.config import EngineConfig, ResolvedConfig
from paged_jax.core import CacheSpec, kv_shape
from paged_jax.engine.memory import Budget, StepShape, block_bytes, state_bytes, step_bytes
from paged_jax.shapes import ceil_div

_logger = logging.getLogger("paged_jax")

_DEFAULT_MODEL_LEN = 2048
_CPU_POOL_BYTES = 4 * 2**30
_TPU_COPY_BYTES = 96 * 2**10
"""A block of one layer is one copy: smaller ones take longer to issue than to arrive."""


def served_length(max_model_len: int | None, max_position: int | None) -> int:
    """Longest sequence that is served: what the user asked for, or what a model has up to 2048.

    Raises: ValueError for more than the model's positions.
    """
    if max_model_len is None:
        return min(_DEFAULT_MODEL_LEN, max_position or _DEFAULT_MODEL_LEN)
    if max_position is not None and max_model_len > max_position:
        raise ValueError(
            f"max_model_len ({max_model_len}) exceeds the model's positions ({max_position})"
        )
    return max_model_len


def resolve(
    config: EngineConfig,
    spec: CacheSpec,
    kv_dtype: Any,
    max_position: int | None,
    num_ranks: int = 1,
    step: StepShape | None = None,
) -> ResolvedConfig:
    """Settles every option.

    Args:
      config: What the user asked for.
      spec: What the model keeps per token; of a divided one, a rank.
      kv_dtype: Dtype of the pool.
      max_position: Most positions of the model; None: any number.
      num_ranks: Devices that keep so much each.
      step: For what an accelerator needs beside weights and pool; None: nothing.
    Raises: ValueError when an option contradicts the model or the memory.
    """
    platform = jax.default_backend()
    model_len = served_length(config.max_model_len, max_position)
    block_size = config.block_size or default_block_size(platform, spec, kv_dtype)
    check_block_size(platform, block_size, kv_dtype)
    if platform == "tpu" and np.dtype(kv_dtype) == np.float16:
        raise NotImplementedError("TPU kernels do not read float16 pools; use bfloat16")
    tokens = config.max_num_batched_tokens or default_tokens(platform, config.max_num_seqs)

    per_block = block_bytes(spec, block_size, kv_dtype)
    if platform == "cpu":
        per_block *= num_ranks  # all ranks are in one memory
    most_blocks = config.max_num_seqs * ceil_div(model_len, block_size)
    num_blocks = config.num_blocks
    if num_blocks is None:
        available, why = config.kv_cache_memory_bytes, ""
        if available is None and platform == "cpu":
            # MemAvailable counts the page cache that the kernel would give back; sysconf does not.
            available = min(_CPU_POOL_BYTES, _free_host_bytes() // 2)
        elif available is None:
            limit, in_use = _device_bytes()
            budget = Budget(
                limit=limit,
                utilization=config.gpu_memory_utilization,
                in_use=in_use,
                **beside_pool(step, num_ranks, config.max_num_seqs, tokens, model_len, block_size),
            )
            available, why = budget.available, f" ({budget.arithmetic()})"
        # One block more than can be used is the null block.
        num_blocks = min(available // per_block - 1, most_blocks)
        if num_blocks < 1:
            raise ValueError(
                f"the KV pool ({available} bytes) must hold two blocks of {per_block} bytes{why}; "
                "raise kv_cache_memory_bytes or set num_blocks"
            )
    needed, free = (num_blocks + 1) * per_block, _free_bytes(platform)
    if free is not None and needed > free:
        raise ValueError(
            f"num_blocks ({num_blocks}) needs {needed} bytes with the null block, and the device "
            f"has {free} left; lower num_blocks or kv_cache_memory_bytes"
        )
    longest = num_blocks * block_size
    if longest < model_len:
        _logger.warning(
            "the KV pool cannot hold one request of max_model_len (%d); "
            "the longest that fits is %d tokens",
            model_len,
            longest,
        )
    _logger.info(
        "KV pool: %d blocks of %d tokens, %.1f MiB",
        num_blocks,
        block_size,
        (num_blocks + 1) * per_block / 2**20,
    )
    _logger.info(
        "Maximum concurrency for %d tokens per request: %.2fx",
        model_len,
        num_blocks / ceil_div(model_len, block_size),
    )
    return ResolvedConfig(
        max_model_len=model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=tokens,
        scheduling_policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        enable_prefix_caching=config.enable_prefix_caching,
        decode_steps=config.decode_steps,
        swap_blocks=int(config.swap_space * 2**30) // per_block,
    )


def beside_pool(
    step: StepShape | None,
    num_ranks: int,
    max_num_seqs: int,
    tokens: int,
    model_len: int,
    block_size: int,
) -> dict[str, int]:
    """Fields of `Budget` for a step of settled sizes and as many blocks as it can use."""
    if step is None:
        return {}
    num_blocks = max_num_seqs * ceil_div(model_len, block_size)
    vocab_size = step.vocab_size * num_ranks
    return {
        "step": step_bytes(step, max_num_seqs, tokens),
        "states": state_bytes(max_num_seqs, model_len, block_size, num_blocks, vocab_size),
    }


def default_tokens(platform: str, max_num_seqs: int) -> int:
    """`max_num_batched_tokens` where nobody says: a CPU is at its limit with far fewer tokens, and
    padding costs it more."""
    return max(max_num_seqs, 512 if platform == "cpu" else 2048)


def check_block_size(platform: str, block_size: int, kv_dtype: Any) -> None:
    """Raises: ValueError for a size that the kernels of a platform do not take."""
    if platform == "tpu" and block_size % 8:
        raise ValueError(f"block_size ({block_size}) must be a multiple of 8 on TPU")
    if platform == "tpu" and np.dtype(kv_dtype).itemsize == 1 and block_size % 128:
        raise ValueError(
            f"block_size ({block_size}) must be a multiple of 128 on TPU where the pool is "
            f"{np.dtype(kv_dtype).name}"
        )


def default_block_size(platform: str, spec: CacheSpec, kv_dtype: Any) -> int:
    """`block_size` where nobody says."""
    if platform != "tpu":
        return 16
    if np.dtype(kv_dtype).itemsize == 1:
        return 128
    *_, rows, size, width = kv_shape(spec, 1, 64, platform=platform)
    return 64 if rows * size * width * np.dtype(kv_dtype).itemsize >= _TPU_COPY_BYTES else 128


def _device_bytes() -> tuple[int, int]:
    stats = _device_stats()
    if stats is None:
        raise ValueError("the device does not tell its memory; set num_blocks")
    return stats


def _free_bytes(platform: str) -> int | None:
    """None where the device does not tell."""
    if platform == "cpu":
        return _free_host_bytes()
    stats = _device_stats()
    return None if stats is None else stats[0] - stats[1]


def _device_stats() -> tuple[int, int] | None:
    """Bytes that JAX may use on the first device, and those that it does."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return (stats["bytes_limit"], stats["bytes_in_use"]) if "bytes_limit" in stats else None


def _free_host_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
