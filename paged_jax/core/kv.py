"""The KV pool: keys and values of every layer in fixed-size blocks.

The pool is one array that is never sliced per layer: every function takes the whole pool and a
layer index and returns the pool with its change, so that XLA updates it in place.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.core.state import BlockState

KV_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What a model keeps per token: the part of a KV pool's shape that the model decides."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every layer; row 2h of axis 2 is K and row 2h + 1 is V of head h."""

    kv: jax.Array  # [L, N+1, 2K, P, C], C = D or D padded to the lanes of the device
    layout: str = jax.tree.static()
    num_kv_heads: int = jax.tree.static()
    head_dim: int = jax.tree.static()

    @property
    def num_layers(self) -> int:
        """Layers L."""
        return self.kv.shape[0]

    @property
    def num_blocks(self) -> int:
        """Usable blocks N, the null block not counted."""
        return self.kv.shape[1] - 1

    @property
    def block_size(self) -> int:
        """Token positions per block P."""
        return self.kv.shape[3]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.kv.nbytes // self.kv.shape[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PagedCache:
    """The pair that users pass around: who owns which block, and what the blocks hold."""

    blocks: BlockState
    kv: KVCache


def create_kv_cache(
    spec: CacheSpec, num_blocks: int, block_size: int, dtype: Any, layout: str = "auto"
) -> KVCache:
    """Returns a zeroed pool of `num_blocks` usable blocks and the null block.

    Args:
      spec: Layers, KV heads and head dim of the model.
      num_blocks: Usable blocks N.
      block_size: Token positions per block P.
      dtype: float32, bfloat16 or float16.
      layout: "auto" chooses by platform; "split" is what every platform reads.
    Raises: ValueError for a size below 1 or an unknown layout; NotImplementedError for a dtype
      or layout that is not built yet.
    """
    return KVCache(
        kv=jnp.zeros(kv_shape(spec, num_blocks, block_size, layout), check_kv_dtype(dtype)),
        layout="split",
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )


def kv_shape(
    spec: CacheSpec, num_blocks: int, block_size: int, layout: str = "auto"
) -> tuple[int, int, int, int, int]:
    """Shape `[L, N+1, 2K, P, C]` of a pool; raises as `create_kv_cache` does."""
    if layout in ("packed", "latent"):
        raise NotImplementedError(f"layout {layout!r} is not built yet; use 'split'")
    if layout not in ("auto", "split"):
        raise ValueError(f"layout ({layout!r}) must be 'auto', 'split', 'packed' or 'latent'")
    if num_blocks < 1 or block_size < 1:
        raise ValueError(
            f"num_blocks ({num_blocks}) and block_size ({block_size}) must be at least 1"
        )
    # TPU tiles are 128 lanes wide: a narrower minor axis would be relaid out on every call.
    lanes = 128 if jax.default_backend() == "tpu" else 1
    width = -(-spec.head_dim // lanes) * lanes
    return (spec.num_layers, num_blocks + 1, 2 * spec.num_kv_heads, block_size, width)


def check_kv_dtype(dtype: Any) -> jnp.dtype:
    """Normalises a pool dtype; NotImplementedError for one that pools cannot hold yet."""
    dtype = jnp.dtype(dtype)
    if dtype.name not in KV_DTYPES:
        raise NotImplementedError(f"KV dtype {dtype.name} is not built; use {', '.join(KV_DTYPES)}")
    return dtype


def write(
    cache: KVCache, layer: jax.Array | int, keys: jax.Array, values: jax.Array, slots: jax.Array
) -> KVCache:
    """Writes new tokens of one layer into their slots.

    Args:
      layer: Layer index, a scalar.
      keys: [T, K, D]; cast to the pool's dtype.
      values: [T, K, D].
      slots: i32[T], `block * P + offset` from `slot_mapping`; slot 0 for padding, whose writes
        land in the null block.
    """
    tokens, heads, width = keys.shape
    rows = jnp.stack([keys, values], axis=2).reshape(tokens, 2 * heads, width)
    rows = rows.astype(cache.kv.dtype)
    if width < cache.kv.shape[4]:
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, cache.kv.shape[4] - width)))
    block, offset = slots // cache.block_size, slots % cache.block_size
    kv = cache.kv.at[layer, block[:, None], jnp.arange(2 * heads)[None, :], offset[:, None]].set(
        rows, mode="promise_in_bounds"
    )
    return dataclasses.replace(cache, kv=kv)


def copy_blocks(cache: KVCache, src: jax.Array, dst: jax.Array) -> KVCache:
    """Copies whole blocks of all layers; costs nothing when there is nothing to copy.

    All sources are read as they were before the call, because a block that is copied from is
    owned and a block that is copied to was free.

    Args:
      src: i32[S], blocks to read.
      dst: i32[S], blocks to write; entries with dst 0 are padding.
    """
    is_real = dst > 0
    order = jnp.nonzero(is_real, size=dst.shape[0], fill_value=0)[0]

    def body(i, kv):
        block = jax.lax.dynamic_slice_in_dim(kv, src[order[i]], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(kv, block, dst[order[i]], axis=1)

    kv = jax.lax.fori_loop(0, jnp.sum(is_real, dtype=jnp.int32), body, cache.kv)
    return dataclasses.replace(cache, kv=kv)


def gather(
    cache: KVCache, layer: jax.Array | int, table: jax.Array, length: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Dense view of one row's keys and values in one layer.

    Args:
      table: i32[M], the row of `block_tables`.
      length: Tokens of the row.
    Returns: (keys, values), each [M * P, K, D] in the pool's dtype; positions at or past
      `length` are zero whatever the blocks hold.
    """
    blocks = cache.kv[layer, table]  # [M, 2K, P, C]
    rows = jnp.moveaxis(blocks, 1, 2)[..., : cache.head_dim]
    rows = rows.reshape(-1, cache.num_kv_heads, 2, cache.head_dim)
    is_live = jnp.arange(rows.shape[0]) < length
    rows = jnp.where(is_live[:, None, None, None], rows, jnp.zeros((), rows.dtype))
    return rows[:, :, 0], rows[:, :, 1]
