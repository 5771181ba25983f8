"""A step of paged decode to time: its arrays, the bytes it must move, and what must come out.

Every row is of the same length. Blocks are shuffled, and all layers share block tables. Logits have
no factor (`SM_SCALE` is 1): queries are small instead, so that no rival multiplies them first.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from pools import filled

from paged_jax.core import KVCache
from pallas_kernels.reference import attention_reference

SM_SCALE = 1.0
COLD_BYTES = 256 << 20
"""Layers are as many as hold this, so that none is found in the second-level cache."""
MAX_LAYERS = 64
NUM_CALLS = 32
TOLERANCE = 0.02
"""Root mean square of the error, as a fraction of the outputs': a kernel in bfloat16 makes 0.005,
one that reads a wrong block among 2048 of 16 tokens 0.03."""
CHECKED_ROWS = 2
"""The oracle takes seconds a row."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Heads and dtypes."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    pool_dtype: str = "bfloat16"

    @property
    def is_quantized(self) -> bool:
        """Whether the pool holds 8-bit numbers and scales."""
        return jnp.dtype(self.pool_dtype).itemsize == 1

    @property
    def token_bytes(self) -> int:
        """Keys, values and scales of a token in one layer."""
        scale_bytes = 4 if self.is_quantized else 0
        row_bytes = self.head_dim * jnp.dtype(self.pool_dtype).itemsize + scale_bytes
        return 2 * self.num_kv_heads * row_bytes


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much a step has to do."""

    shape: Shape
    batch: int
    length: int
    block_size: int

    @property
    def blocks_per_row(self) -> int:
        """Blocks of a row, M."""
        return -(-self.length // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of all rows, N: the pool has these and the null block."""
        return self.batch * self.blocks_per_row

    @property
    def layer_bytes(self) -> int:
        """Bytes of the pool in one layer."""
        return (self.num_blocks + 1) * self.block_size * self.shape.token_bytes

    @property
    def num_layers(self) -> int:
        """Layers of the pool, L."""
        return min(MAX_LAYERS, max(1, -(-COLD_BYTES // self.layer_bytes)))

    @property
    def num_calls(self) -> int:
        """Layers of the model; it takes those of the pool in turn."""
        return max(NUM_CALLS, self.num_layers)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all layers of the pool."""
        return self.num_layers * self.layer_bytes

    @property
    def step_bytes(self) -> int:
        """What one layer of a step must read and write.

        Live keys and values with their scales, queries, outputs, tables and lengths.
        """
        shape = self.shape
        query_bytes = shape.num_heads * shape.head_dim * jnp.dtype(shape.dtype).itemsize
        row_bytes = self.length * shape.token_bytes + 2 * query_bytes + 4 * self.blocks_per_row + 4
        return self.batch * row_bytes


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """What rivals are made of."""

    q: jax.Array  # [S, H, D]
    cache: KVCache
    block_tables: jax.Array  # i32[S, M], a permutation of 1 .. N
    context_lens: jax.Array  # i32[S]


def build(load: Load) -> Arrays:
    """Random arrays, the same each time."""
    shape = load.shape
    rng = np.random.default_rng(0)
    tables = 1 + rng.permutation(load.num_blocks).reshape(load.batch, -1)
    pool = (load.num_layers, load.num_blocks + 1, 2 * shape.num_kv_heads, load.block_size)
    scales = jnp.zeros(0, jnp.float32)
    if shape.is_quantized:
        scales = jnp.full(pool, 0.02, jnp.float32)
    q = jax.random.normal(jax.random.key(0), (load.batch, shape.num_heads, shape.head_dim))
    return Arrays(
        q=(q * shape.head_dim**-0.5).astype(shape.dtype),
        cache=KVCache(
            kv=filled((*pool, shape.head_dim), jnp.dtype(shape.pool_dtype)),
            scales=scales,
            layout="split",
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        ),
        block_tables=jnp.asarray(tables, jnp.int32),
        context_lens=jnp.full(load.batch, load.length, jnp.int32),
    )


def checked_rows(load: Load) -> list[int]:
    """Rows that are compared with the oracle: the first ones and the last."""
    return sorted({*range(min(CHECKED_ROWS - 1, load.batch)), load.batch - 1})


def expected(load: Load, arrays: Arrays) -> np.ndarray:
    """Outputs f32[rows, H, D] of the oracle in layer 0, for `checked_rows`."""
    rows = np.array(checked_rows(load))
    blocks = arrays.block_tables[rows].reshape(-1)
    layer = jnp.zeros_like(blocks)
    scales = arrays.cache.scales[layer, blocks][None] if load.shape.is_quantized else None
    out, _ = attention_reference(
        arrays.q[rows],
        arrays.cache.kv[layer, blocks][None],  # only what the rows name leaves the device
        0,
        np.arange(len(blocks)).reshape(len(rows), -1),
        np.asarray(arrays.context_lens)[rows],
        np.arange(len(rows) + 1),
        SM_SCALE,
        scales=scales,
    )
    return np.asarray(out)


def error_of(load: Load, out: np.ndarray, want: np.ndarray) -> float:
    """Error of outputs [S, H, D] as a fraction; infinite if one of them is not a number."""
    if not np.isfinite(out).all():
        return math.inf
    error = out[checked_rows(load)].astype(np.float32) - want
    return float(np.sqrt(np.mean(error**2) / np.mean(want**2)))
