"""How query heads meet the rows of a pool: what the GPU kernels share and what they refuse."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import device

MIN_ROWS = 16
"""Rows of the smallest tile that tensor cores multiply."""

INT8_HOLE = range((2 << 30) + 1, (4 << 30) + 1)
"""Bytes of pools of 1-byte numbers whose offsets Pallas computes in 32 bits, with a sign."""

FP8_CAPABILITY = (8, 9)
"""The first compute capability that Triton converts 8-bit floats on: Ada and Hopper."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Static numbers of one call; KV head k is in pool rows 2(k // r) and 2(k // r) + 1."""

    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    per_row: int  # r, KV heads side by side in a pool row

    @property
    def group(self) -> int:
        """Query heads per KV head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(first lane, lanes) of the powers of two that a head is cut into.

        Padding it instead would load lane by lane.
        """
        found, first = [], 0
        while first < self.head_dim:
            width = 1 << (self.head_dim - first).bit_length() - 1
            found.append((first, width))
            first += width
        return tuple(found)

    def place(self, kv_head: Any) -> tuple[Any, Any]:
        """Row of a head's keys in the pool, and its first lane there."""
        if self.per_row == 1:
            return 2 * kv_head, 0
        return 2 * (kv_head // self.per_row), kv_head % self.per_row * self.head_dim


def heads_of(
    queries: tuple[int, ...], kv: jax.Array, num_kv_heads: int, scales: jax.Array | None = None
) -> Heads:
    """Checks that H query heads of D fit a pool [L, N+1, R, P, C] with K heads.

    Raises: NotImplementedError for a shape or dtype that the kernels cannot serve; ValueError for
      numbers that do not fit together.
    """
    num_heads, head_dim = queries
    rows, width = kv.shape[2], kv.shape[4]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
        )
    per_row = 1 if rows == 2 * num_kv_heads else width // head_dim
    if head_dim > width or rows != 2 * -(-num_kv_heads // per_row):
        raise ValueError(
            f"a pool with {rows} rows of {width} cannot hold {num_kv_heads} heads of {head_dim}"
        )
    if head_dim % MIN_ROWS:
        raise NotImplementedError(f"head_dim {head_dim}; GPU kernels need a multiple of {MIN_ROWS}")
    check_pool(kv, scales)
    return Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, per_row=per_row)


def check_pool(kv: jax.Array, scales: jax.Array | None) -> None:
    """NotImplementedError for a pool that no kernel can serve."""
    check_offsets(kv)
    if kv.dtype.itemsize > 1:
        return
    if scales is None:
        raise ValueError(f"a pool of {kv.dtype.name} needs scales")
    capability = device.capability()
    is_float = jnp.issubdtype(kv.dtype, jnp.floating)
    if is_float and capability is not None and capability < FP8_CAPABILITY:
        raise NotImplementedError(
            f"a pool of {kv.dtype.name}; GPU kernels convert 8-bit floats from compute capability "
            f"{FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} on, and this device has "
            f"{capability[0]}.{capability[1]}: use int8"
        )


def check_offsets(pool: jax.Array) -> None:
    """NotImplementedError for a pool that Pallas cannot address."""
    if pool.dtype.itemsize == 1 and pool.size in INT8_HOLE:
        raise NotImplementedError(
            f"8-bit pool of {pool.size} bytes; GPU kernels take at most {INT8_HOLE.start - 1} or "
            f"more than {INT8_HOLE.stop - 1}"
        )


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def compute_dtypes(q: jax.Array, kv: jax.Array) -> tuple[Any, Any]:
    """Dtypes of the products with keys and with values.

    Half precision where both sides have it. Values of 8 bits are multiplied in bfloat16: their
    weights carry a scale, which float16 may not hold.
    """
    if q.dtype == jnp.float32 or kv.dtype == jnp.float32:
        return jnp.float32, jnp.float32
    if kv.dtype.itemsize == 1:
        return q.dtype, jnp.bfloat16
    return (kv.dtype, kv.dtype) if q.dtype == kv.dtype else (jnp.float32, jnp.float32)
