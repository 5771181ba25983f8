"""The KV pool: keys and values of every layer in fixed-size blocks.

The pool is one array that is never sliced per layer: every function takes the whole pool and a
layer index and returns the pool with its change, so that XLA updates it in place.
"""

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.core.state import BlockState, as_i32, as_lists
from paged_jax.shapes import ceil_div

KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")

LANES = 128
"""Width of a TPU register, and of a pool row in layout "packed"."""

PACKED_HEAD_DIMS = (32, 64)


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What a model keeps per token: the part of a KV pool's shape that the model decides."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int = 0
    """Of multi-head latent attention, where one head of `head_dim` features is both key and value:
    its leading features that values are made of. 0: keys and values are apart."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every layer: pool rows 2j are keys and 2j + 1 values of the same heads.

    layout     pool rows R       row 2j and 2j + 1 hold         width C
    "split"    2K                head j                         D, or D padded to the lanes of a TPU
    "packed"   2 ceil(K / r)     heads rj .. rj + r - 1         128 = r D
    "latent"   1                 the one latent head            D, or D padded to the lanes of a TPU

    A latent head is key and value in one, so its pool has one row and no pairs.
    """

    kv: jax.Array  # [L, N+1, R, P, C]
    scales: jax.Array  # f32[L, N+1, 2K, P] of 8-bit pools (2K padded on TPU); else f32[0]
    layout: str = jax.tree.static()
    num_kv_heads: int = jax.tree.static()
    head_dim: int = jax.tree.static()
    tags: jax.Array | None = None  # i32[N+1, P], see `with_tags`

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
    def heads_per_row(self) -> int:
        """Heads side by side in a pool row."""
        return LANES // self.head_dim if self.layout == "packed" else 1

    @property
    def is_quantized(self) -> bool:
        """Whether the pool holds 8-bit numbers and a scale per token and head."""
        return self.kv.dtype.itemsize == 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.block_bytes // self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.pool_bytes // self.kv.shape[1]

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool, scales and the null block included."""
        return self.kv.nbytes + self.scales.nbytes


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PagedCache:
    """The pair that users pass around: who owns which block, and what the blocks hold."""

    blocks: BlockState
    kv: KVCache


def create_kv_cache(
    spec: CacheSpec,
    num_blocks: int,
    block_size: int,
    dtype: Any,
    layout: str = "auto",
    platform: str | None = None,
) -> KVCache:
    """Returns a zeroed pool of `num_blocks` usable blocks and the null block.

    Args:
      spec: Layers, KV heads and head dim of the model.
      num_blocks: Usable blocks N.
      block_size: Token positions per block P.
      dtype: float32, bfloat16 or float16; int8, float8_e4m3fn or float8_e5m2 with scales.
      layout: "auto" chooses by model and platform; every layout is read everywhere.
      platform: Whose registers rows are padded to ("cpu", "gpu", "tpu"); None: the default backend.
    Raises: ValueError for a size below 1, an unknown layout, or one that cannot hold the model's
      heads; NotImplementedError for a dtype that is not built yet.
    """
    layout, dtype = choose_layout(spec, layout, platform), check_kv_dtype(dtype)
    return KVCache(
        kv=jnp.zeros(kv_shape(spec, num_blocks, block_size, layout, platform), dtype),
        scales=jnp.zeros(scales_shape(spec, num_blocks, block_size, dtype, platform), jnp.float32),
        layout=layout,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )


def choose_layout(spec: CacheSpec, layout: str = "auto", platform: str | None = None) -> str:
    """Settles "auto"; raises as `create_kv_cache` does."""
    if layout not in ("auto", "split", "packed", "latent"):
        raise ValueError(f"layout ({layout!r}) must be 'auto', 'split', 'packed' or 'latent'")
    if spec.latent_dim:
        if layout not in ("auto", "latent"):
            raise ValueError(f"layout ({layout!r}) must be 'latent' for a model with latent heads")
        return "latent"
    if layout == "latent":
        raise ValueError("layout 'latent' must have a model with latent heads; use 'split'")
    if layout == "auto":
        # The kernels for 128 lanes then serve narrow heads unchanged.
        is_narrow = spec.head_dim in PACKED_HEAD_DIMS
        return "packed" if is_narrow and _is_tpu(platform) else "split"
    if layout == "packed" and spec.head_dim not in PACKED_HEAD_DIMS:
        raise ValueError(
            f"head_dim ({spec.head_dim}) must be one of {PACKED_HEAD_DIMS} in layout 'packed'"
        )
    return layout


def kv_shape(
    spec: CacheSpec,
    num_blocks: int,
    block_size: int,
    layout: str = "auto",
    platform: str | None = None,
) -> tuple[int, int, int, int, int]:
    """Shape `[L, N+1, R, P, C]` of a pool; raises as `create_kv_cache` does."""
    layout = choose_layout(spec, layout, platform)
    if num_blocks < 1 or block_size < 1:
        raise ValueError(
            f"num_blocks ({num_blocks}) and block_size ({block_size}) must be at least 1"
        )
    if layout == "packed":
        rows, width = 2 * ceil_div(spec.num_kv_heads, LANES // spec.head_dim), LANES
    else:
        # TPU tiles are 128 lanes wide: a narrower minor axis would be relaid out on every call.
        lanes = LANES if _is_tpu(platform) else 1
        rows = 1 if layout == "latent" else 2 * spec.num_kv_heads
        width = -(-spec.head_dim // lanes) * lanes
    return (spec.num_layers, num_blocks + 1, rows, block_size, width)


def scales_shape(
    spec: CacheSpec, num_blocks: int, block_size: int, dtype: Any, platform: str | None = None
) -> tuple[int, ...]:
    """Shape `[L, N+1, 2K, P]` of the scales of an 8-bit pool, `[0]` of another.

    On TPU 2K is padded to a multiple of 8 unless it is 2 or 4: for 6, 10, 12, 14 and 20 XLA chooses
    a layout with the blocks innermost and copies all scales before and after every kernel.
    """
    if jnp.dtype(dtype).itemsize > 1:
        return (0,)
    rows = 2 * spec.num_kv_heads
    if _is_tpu(platform) and rows > 4:
        rows = 8 * ceil_div(rows, 8)
    return (spec.num_layers, num_blocks + 1, rows, block_size)


def _is_tpu(platform: str | None) -> bool:
    return (platform or jax.default_backend()) == "tpu"


def check_kv_dtype(dtype: Any) -> jnp.dtype:
    """Normalises a pool dtype; NotImplementedError for one that pools cannot hold yet."""
    dtype = jnp.dtype(dtype)
    if dtype.name not in KV_DTYPES:
        raise NotImplementedError(f"KV dtype {dtype.name} is not built; use {', '.join(KV_DTYPES)}")
    return dtype


def check_layer(cache: KVCache, layer: jax.Array | int) -> None:
    """ValueError for a layer out of range, where its value is known; TypeError for a fraction."""
    try:
        index = operator.index(layer)
    except jax.errors.TracerIntegerConversionError:
        return
    if not 0 <= index < cache.num_layers:
        raise ValueError(f"layer ({layer}) must be in 0..{cache.num_layers - 1}")


def quantize(heads: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """8-bit numbers and the factor that gives the heads back: the largest magnitude fits exactly.

    Args:
      heads: [..., D].
      dtype: int8, float8_e4m3fn or float8_e5m2.
    Returns: ([..., D] in `dtype`, f32 [...]); infinities saturate, and heads whose factor would be
      subnormal become zero.
    """
    is_int = jnp.issubdtype(dtype, jnp.integer)
    largest = jnp.float32(jnp.iinfo(dtype).max if is_int else jnp.finfo(dtype).max)
    heads = heads.astype(jnp.float32)
    magnitude = jnp.minimum(jnp.max(jnp.abs(heads), axis=-1), jnp.finfo(jnp.float32).max)
    scale = magnitude / largest
    # A subnormal factor is zero where they are flushed, and 0 / 0 is NaN.
    scale = jnp.where(scale >= jnp.finfo(jnp.float32).tiny, scale, 1.0)
    scaled = jnp.clip(heads / scale[..., None], -largest, largest)
    return (jnp.round(scaled) if is_int else scaled).astype(dtype), scale


def to_pool_rows(cache: KVCache, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Lays heads [..., K, D] of one position out as pool rows [..., R, C] in the pool's dtype."""
    *outer, heads, dim = keys.shape
    if cache.layout == "latent":
        width = cache.kv.shape[4]
        return jnp.pad(keys.astype(cache.kv.dtype), [(0, 0)] * (keys.ndim - 1) + [(0, width - dim)])
    rows, width = cache.kv.shape[2], cache.kv.shape[4]
    missing = rows // 2 * cache.heads_per_row - heads  # packed rows hold r heads each
    pairs = jnp.stack([keys, values], axis=-3).astype(cache.kv.dtype)  # [..., 2, K, D]
    pairs = jnp.pad(pairs, [(0, 0)] * (len(outer) + 1) + [(0, missing), (0, 0)])
    pairs = pairs.reshape(*outer, 2, rows // 2, cache.heads_per_row * dim)
    pairs = jnp.pad(pairs, [(0, 0)] * (len(outer) + 2) + [(0, width - pairs.shape[-1])])
    return jnp.swapaxes(pairs, -3, -2).reshape(*outer, rows, width)


def from_pool_rows(cache: KVCache, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `to_pool_rows`: [..., R, C] to keys and values [..., K, D]."""
    *outer, count, _ = rows.shape
    if cache.layout == "latent":
        return rows[..., : cache.head_dim], rows[..., : cache.head_dim]
    per_row, dim = cache.heads_per_row, cache.head_dim
    pairs = rows[..., : per_row * dim].reshape(*outer, count // 2, 2, per_row * dim)
    keys, values = pairs[..., 0, :], pairs[..., 1, :]
    shape = (*outer, count // 2 * per_row, dim)
    heads = slice(cache.num_kv_heads)
    return keys.reshape(shape)[..., heads, :], values.reshape(shape)[..., heads, :]


def write(
    cache: KVCache, layer: jax.Array | int, keys: jax.Array, values: jax.Array, slots: jax.Array
) -> KVCache:
    """Writes new tokens of one layer into their slots.

    Args:
      layer: Layer index, a scalar.
      keys: [T, K, D]; cast to the pool's dtype, or quantised with a scale per token and head.
      values: [T, K, D].
      slots: i32[T], `block * P + offset` from `slot_mapping`; slot 0 for padding, whose writes
        land in the null block.
    Raises: ValueError for a layer that is a Python integer out of range.
    """
    check_layer(cache, layer)
    slots, scales = as_i32(slots, "slots"), cache.scales
    block, offset = slots // cache.block_size, slots % cache.block_size
    rows, factors = to_pool(cache, keys, values)
    if factors is not None:
        pair = jnp.arange(factors.shape[1])
        scales = scales.at[layer, block[:, None], pair[None, :], offset[:, None]].set(
            factors, mode="promise_in_bounds"
        )
    row = jnp.arange(cache.kv.shape[2])
    kv = cache.kv.at[layer, block[:, None], row[None, :], offset[:, None]].set(
        rows, mode="promise_in_bounds"
    )
    return dataclasses.replace(cache, kv=kv, scales=scales)


def to_pool(
    cache: KVCache, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """What a pool stores of heads [..., K, D]: rows [..., R, C], f32[..., 2K] scales if 8-bit."""
    if not cache.is_quantized:
        return to_pool_rows(cache, keys, values), None
    keys, key_scales = quantize(keys, cache.kv.dtype)
    values, value_scales = quantize(values, cache.kv.dtype)
    scales = jnp.stack([key_scales, value_scales], axis=-1).reshape(*keys.shape[:-2], -1)
    return to_pool_rows(cache, keys, values), scales


def copy_blocks(cache: KVCache, src: jax.Array, dst: jax.Array) -> KVCache:
    """Copies whole blocks of all layers; costs nothing when there is nothing to copy.

    All sources are read as they were before the call, because a block that is copied from is
    owned and a block that is copied to was free.

    Args:
      src: i32[S], blocks to read.
      dst: i32[S], blocks to write; entries with dst 0 are padding.
    """
    src, dst = as_lists(src=src, dst=dst)
    if not dst.size:
        return cache
    is_real = dst > 0
    order = jnp.nonzero(is_real, size=dst.shape[0], fill_value=0)[0]

    def body(i, pools):
        def copy(pool):
            block = jax.lax.dynamic_slice_in_dim(pool, src[order[i]], 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(pool, block, dst[order[i]], axis=1)

        return jax.tree.map(copy, pools)

    pools = (cache.kv, cache.scales) if cache.is_quantized else (cache.kv,)
    kv, *scales = jax.lax.fori_loop(0, jnp.sum(is_real, dtype=jnp.int32), body, pools)
    scales = scales[0] if scales else cache.scales
    tags = copy_tags(cache.tags, src, dst)
    return dataclasses.replace(cache, kv=kv, scales=scales, tags=tags)


def copy_tags(tags: jax.Array | None, src: jax.Array, dst: jax.Array) -> jax.Array | None:
    """Tags i32[N+1, P] after `copy_blocks`; None if there are none."""
    if tags is None:
        return None
    is_real = dst > 0
    target = jnp.where(is_real, dst, tags.shape[0])
    return tags.at[target].set(tags[jnp.where(is_real, src, 0)], mode="drop")


def gather(
    cache: KVCache, layer: jax.Array | int, table: jax.Array, length: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Dense view of one row's keys and values in one layer.

    Args:
      table: i32[M], the row of `block_tables`.
      length: Tokens of the row.
    Returns: (keys, values), each [M * P, K, D] in the pool's dtype, or in float32 with the scales
      of an 8-bit pool applied; positions at or past `length` are zero whatever the blocks hold.
    """
    check_layer(cache, layer)
    table = as_i32(table, "table")
    rows = jnp.moveaxis(cache.kv[layer, table], 1, 2)  # [M, P, R, C]
    keys, values = from_pool_rows(cache, rows.reshape(-1, *rows.shape[2:]))
    if cache.is_quantized:
        scales = jnp.moveaxis(cache.scales[layer, table], 1, 2)  # [M, P, 2K]
        scales = scales[..., : 2 * cache.num_kv_heads].reshape(-1, cache.num_kv_heads, 2)
        keys = keys.astype(jnp.float32) * scales[..., 0, None]
        values = values.astype(jnp.float32) * scales[..., 1, None]
    is_live = (jnp.arange(keys.shape[0]) < length)[:, None, None]
    zero = jnp.zeros((), keys.dtype)
    return jnp.where(is_live, keys, zero), jnp.where(is_live, values, zero)
