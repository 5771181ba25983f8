"""Sizes of tiles and buffers."""

from dataclasses import dataclass

import jax

from pallas_kernels.tpu.heads import LANES, Heads

SMEM_LIST_BYTES = 320 * 1024


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How `paged_decode` is cut up."""

    block_tokens: int
    """Keys per item: a multiple of the pool's block_size."""
    heads_per_tile: int
    """Pool heads that share a tile of query rows; divides their number."""
    num_buffers: int = 2
    """Items in VMEM at a time: one is computed, the others are on their way."""
    num_cores: int = 1
    """TensorCores that share the list (v4 and v5p have two a device)."""
    vmem_limit_bytes: int | None = None


def decode_config(heads: Heads, kv: jax.Array, *, max_tokens: int) -> DecodeConfig:
    """Heuristics."""
    block_size = kv.shape[3]
    row_bytes = 2 * heads.pool_heads * heads.width * kv.dtype.itemsize
    tokens = max(LANES, min(2048, (4 << 20) // row_bytes))
    tokens = min(tokens, max_tokens)
    unit = max(block_size, LANES)
    tokens = max(unit, tokens // unit * unit)
    hp = 1
    for n in range(1, heads.pool_heads + 1):
        if heads.pool_heads % n == 0 and n * heads.queries <= 8:
            hp = n
    return DecodeConfig(block_tokens=tokens, heads_per_tile=hp, vmem_limit_bytes=64 << 20)


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """How `paged_prefill` is cut up."""

    tile_tokens: int
    """Query tokens per tile: a power of two."""
    chunk_tokens: int
    """Keys per chunk: a multiple of the pool's block_size."""
    heads_per_step: int
    """Pool heads per grid step: copied by one descriptor a block; divides their number."""
    vmem_limit_bytes: int | None = None


def prefill_config(
    heads: Heads, kv: jax.Array, *, num_tokens: int, max_tokens: int
) -> PrefillConfig:
    """Heuristics."""
    block_size = kv.shape[3]
    tile = 16
    while tile < min(256, num_tokens) and 2 * tile * heads.queries <= 512:
        tile *= 2
    unit = max(block_size, LANES)
    chunk = max(unit, min(512, max_tokens) // unit * unit)
    pair_bytes = 2 * block_size * heads.width * kv.dtype.itemsize
    steps = 1 if pair_bytes >= 32 << 10 else heads.pool_heads
    return PrefillConfig(
        tile_tokens=tile, chunk_tokens=chunk, heads_per_step=steps, vmem_limit_bytes=64 << 20
    )
