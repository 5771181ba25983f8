"""How query heads meet the rows of a pool: the shapes that decode and prefill share.

A pool row holds one head, or `r` narrow heads side by side (layout "packed"). In the second case a
query is laid out over all lanes of the row with zeros outside its own, so that one kernel for 128
lanes serves both: a pool row is then one head with r times as many queries.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

LANES = 128
SUBLANES = 8
"""Rows of a register. 8-bit tiles in HBM hold 32 rows, of which 8 are still contiguous."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Static numbers of one call; pool head j is rows 2j (keys) and 2j + 1 (values) of the pool."""

    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    per_row: int  # r, KV heads side by side in a pool row
    pool_heads: int  # J = ceil(K / r)
    width: int  # C, lanes of a pool row

    @property
    def group(self) -> int:
        """Query heads per KV head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def queries(self) -> int:
        """Query heads per pool head, r * G."""
        return self.per_row * self.group


def heads_of(
    queries: tuple[int, ...], kv: jax.Array, num_kv_heads: int, scales: jax.Array | None = None
) -> Heads:
    """Checks that H query heads of D fit a pool [L, N+1, R, P, C] with K heads.

    Raises: NotImplementedError for a shape or dtype that the kernels cannot serve; ValueError for
      numbers that do not fit together.
    """
    num_heads, head_dim = queries
    check_pool(kv, scales)
    rows, width = kv.shape[2], kv.shape[4]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
        )
    # One head alone in a row is the same bytes in both layouts.
    per_row = 1 if rows == 2 * num_kv_heads else width // head_dim
    if head_dim > width or rows != 2 * -(-num_kv_heads // per_row):
        raise ValueError(
            f"a pool with {rows} rows of {width} cannot hold {num_kv_heads} heads of {head_dim}"
        )
    return Heads(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        per_row=per_row,
        pool_heads=rows // 2,
        width=width,
    )


def check_pool(kv: jax.Array, scales: jax.Array | None) -> None:
    """NotImplementedError for a pool that no kernel can serve."""
    block_size, width = kv.shape[3:]
    if kv.dtype == jnp.float16:
        raise NotImplementedError("float16 pools do not load in TPU kernels; use bfloat16")
    if width % LANES:
        raise NotImplementedError(f"pool rows of {width} lanes; TPU kernels need a multiple of 128")
    if block_size % SUBLANES:
        raise NotImplementedError(f"block_size {block_size}; TPU kernels need a multiple of 8")
    if scales is not None:
        check_scales(scales)


def check_scales(scales: jax.Array) -> None:
    """NotImplementedError for scales [L, N+1, 2K, P] that no kernel can serve."""
    rows, block_size = scales.shape[2:4]
    if block_size % LANES:
        raise NotImplementedError(
            f"block_size {block_size} with an 8-bit pool; TPU kernels need a multiple of 128"
        )
    # Seen for 6, 10, 12, 14 and 20: XLA's own layout of the pool then has its blocks inside, and
    # each call would copy the pool there and back.
    if rows not in (2, 4) and rows % SUBLANES:
        raise NotImplementedError(
            f"{rows} scales per token; TPU kernels need 2, 4 or a multiple of 8: pad 2K"
        )


def compute_dtype(q: jax.Array, kv: jax.Array) -> Any:
    """bfloat16 where queries are, else float32, in which products take several passes."""
    is_half = q.dtype == jnp.bfloat16 and kv.dtype != jnp.float32
    return jnp.bfloat16 if is_half else jnp.float32


def to_pool_heads(x: jax.Array, heads: Heads) -> jax.Array:
    """[T, H, D] to [T, J, r * G, C]: each query in the lanes of its own head, zeros elsewhere."""
    tokens = x.shape[0]
    x = x.reshape(tokens, heads.num_kv_heads, heads.group, heads.head_dim)
    if heads.per_row == 1:
        return jnp.pad(x, [(0, 0)] * 3 + [(0, heads.width - heads.head_dim)])
    missing = heads.pool_heads * heads.per_row - heads.num_kv_heads
    x = jnp.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)])
    x = x.reshape(tokens, heads.pool_heads, heads.per_row, heads.group, 1, heads.head_dim)
    own = jnp.eye(heads.per_row, dtype=bool)[:, None, :, None]
    x = jnp.where(own, x, jnp.zeros((), x.dtype))
    return x.reshape(tokens, heads.pool_heads, heads.queries, heads.width)


def from_pool_heads(x: jax.Array, heads: Heads) -> jax.Array:
    """The inverse of `to_pool_heads`: [T, J, r * G, C] to [T, H, D]."""
    tokens = x.shape[0]
    if heads.per_row == 1:
        return x[..., : heads.head_dim].reshape(tokens, heads.num_heads, heads.head_dim)
    shape = (tokens, heads.pool_heads, heads.per_row, heads.group, heads.per_row, heads.head_dim)
    x = x.reshape(shape)
    own = jnp.stack([x[:, :, i, :, i] for i in range(heads.per_row)], axis=2)
    flat = own.reshape(tokens, -1, heads.head_dim)
    return flat[:, : heads.num_heads]


def per_head(x: jax.Array, heads: Heads) -> jax.Array:
    """A number per query head [.., H] as [.., J, r * G]; heads that fill a row up get 0."""
    missing = heads.pool_heads * heads.queries - heads.num_heads
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], heads.pool_heads, heads.queries)
