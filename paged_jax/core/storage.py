"""Blocks outside the pool: host images for swapping, and checkpoints of a whole cache."""

import dataclasses
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from paged_jax.core.kv import (
    CacheSpec,
    KVCache,
    PagedCache,
    create_kv_cache,
    from_pool_rows,
    to_pool,
    to_pool_rows,
)
from paged_jax.core.state import BlockState, as_i32

FORMAT = 1
"""Version of the files that `save_cache` writes."""


def swap_out(cache: KVCache, ids: ArrayLike) -> KVCache:
    """Reads blocks back to the host.

    Args:
      ids: i32[B], blocks to read.
    Returns: A host image: a `KVCache` of numpy arrays `[L, B, R, P, C]`, scales and tags included,
      that hold these blocks and no null block, in the order of `ids`.
    Raises: ValueError for an id out of range.
    """
    _check_ids(cache, ids)
    return jax.device_get(_take(cache, jnp.asarray(ids, jnp.int32)))


def swap_in(cache: KVCache, ids: ArrayLike, image: KVCache) -> KVCache:
    """Writes a host image into blocks of a pool, which may have another layout or dtype.

    Runs under `jit`; donate `cache` there, since a pool that is not donated is copied.

    Args:
      ids: i32[B], blocks to write, in the order of the image; 0 is padding.
      image: From `swap_out`.
    Raises: ValueError when the image does not belong to this model or block size, has another
      number of blocks than there are ids, or for an id out of range that the host knows.
    """
    if not isinstance(ids, jax.Array):
        _check_ids(cache, ids)
    ids = as_i32(ids, "ids")
    _check_image(cache, image, ids.shape[0])
    image = _convert(image, cache)
    # An id below 0 would wrap to the last block; it is dropped as one above N is.
    ids = jnp.where(ids < 0, cache.num_blocks + 1, ids)
    tags = cache.tags
    if tags is not None:
        tags = tags.at[ids].set(0 if image.tags is None else image.tags, mode="drop")
    kv, scales = cache.kv.at[:, ids].set(image.kv, mode="drop"), cache.scales
    if cache.is_quantized:
        scales = scales.at[:, ids].set(image.scales, mode="drop")
    return dataclasses.replace(cache, kv=kv, scales=scales, tags=tags)


def save_cache(path: str | PathLike[str], cache: PagedCache) -> None:
    """Writes a cache to a new directory with Orbax: block state whole, KV of used blocks only.

    Shadow tags are not written.

    Args:
      path: A directory that does not exist yet.
    Raises: ValueError when something is there already.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    if path.exists():
        raise ValueError(f"path ({path}) must not exist yet")
    blocks = jax.device_get(cache.blocks)
    image = swap_out(cache.kv, _used(blocks))
    arrays = {name: getattr(blocks, name) for name in _BLOCK_ARRAYS}
    meta = {
        "format": FORMAT,
        "block_size": blocks.block_size,
        "layout": image.layout,
        "num_kv_heads": image.num_kv_heads,
        "head_dim": image.head_dim,
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            path,
            ocp.args.Composite(
                blocks=ocp.args.StandardSave(arrays),
                kv=ocp.args.StandardSave(_pools(image)),
                meta=ocp.args.JsonSave(meta),
            ),
        )


def restore_cache(
    path: str | PathLike[str], *, layout: str = "auto", dtype: Any | None = None
) -> PagedCache:
    """Reads what `save_cache` wrote: same block ids, same free stack, same KV.

    Args:
      path: Directory of the checkpoint.
      layout: Layout of the new pool, whatever that of the saved one; see `create_kv_cache`.
      dtype: Dtype of the new pool; None keeps the saved one.
    Raises: ValueError for a directory that `save_cache` did not write.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    if not all((path / item).is_dir() for item in ("blocks", "kv", "meta")):
        raise ValueError(f"path ({path}) must be a directory that save_cache wrote")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        read = checkpointer.restore(
            path,
            ocp.args.Composite(
                blocks=ocp.args.StandardRestore(),
                kv=ocp.args.StandardRestore(),
                meta=ocp.args.JsonRestore(),
            ),
        )
    meta = read["meta"]
    if meta.get("format") != FORMAT:
        raise ValueError(
            f"path ({path}) has format {meta.get('format')}; this version reads {FORMAT}"
        )
    arrays = {name: jnp.asarray(read["blocks"][name]) for name in _BLOCK_ARRAYS}
    blocks = BlockState(**arrays, block_size=meta["block_size"])
    heads = {"num_kv_heads": meta["num_kv_heads"], "head_dim": meta["head_dim"]}
    latent_dim = meta["head_dim"] if meta["layout"] == "latent" else 0
    pools = {"scales": np.zeros(0, np.float32), **read["kv"]}
    image = KVCache(**pools, layout=meta["layout"], **heads)
    pool = create_kv_cache(
        CacheSpec(num_layers=image.num_layers, latent_dim=latent_dim, **heads),
        blocks.num_blocks,
        blocks.block_size,
        image.kv.dtype if dtype is None else dtype,
        layout,
    )
    return PagedCache(blocks=blocks, kv=_put(pool, _used(blocks), image))


_BLOCK_ARRAYS = tuple(
    field.name for field in dataclasses.fields(BlockState) if field.name != "block_size"
)


def _used(blocks: BlockState) -> np.ndarray:
    """Ids of the blocks that somebody owns, ascending; the null block where there is none."""
    used = np.flatnonzero(np.asarray(blocks.refcounts)).astype(np.int32)
    return used if used.size else np.zeros(1, np.int32)  # Orbax stores no empty arrays


@jax.jit
def _take(cache: KVCache, ids: jax.Array) -> KVCache:
    tags = None if cache.tags is None else cache.tags[ids]
    scales = cache.scales[:, ids] if cache.is_quantized else cache.scales
    return dataclasses.replace(cache, kv=cache.kv[:, ids], scales=scales, tags=tags)


_put = jax.jit(swap_in, donate_argnums=0)


def _pools(image: KVCache) -> dict[str, jax.Array]:
    """The arrays to store: Orbax stores no empty ones."""
    return {"kv": image.kv, **({"scales": image.scales} if image.is_quantized else {})}


def _convert(image: KVCache, like: KVCache) -> KVCache:
    """An image in the layout and dtype of a pool."""
    kv, scales = jnp.asarray(image.kv), jnp.asarray(image.scales)
    if image.is_quantized:
        scales = scales[:, :, : 2 * image.num_kv_heads]
    is_same_layout = image.layout == like.layout and kv.shape[2:] == like.kv.shape[2:]
    if is_same_layout and (kv.dtype == like.kv.dtype or not like.is_quantized | image.is_quantized):
        return dataclasses.replace(
            image, kv=kv.astype(like.kv.dtype), scales=_pad_scales(scales, like)
        )
    keys, values = from_pool_rows(image, jnp.moveaxis(kv, 2, 3))  # [L, B, P, K, D]
    if kv.dtype != like.kv.dtype:
        if image.is_quantized:
            pairs = jnp.moveaxis(scales, 2, 3).reshape(*keys.shape[:-1], 2)
            keys = keys.astype(jnp.float32) * pairs[..., 0, None]
            values = values.astype(jnp.float32) * pairs[..., 1, None]
        rows, factors = to_pool(like, keys, values)
        scales = scales if factors is None else jnp.moveaxis(factors, 3, 2)
    else:  # 8-bit numbers keep their scales
        rows = to_pool_rows(like, keys, values)
    kv = jnp.moveaxis(rows, 3, 2)
    scales = _pad_scales(scales, like)
    return dataclasses.replace(image, kv=kv, scales=scales, layout=like.layout)


def _pad_scales(scales: jax.Array, like: KVCache) -> jax.Array:
    """Scales [L, B, 2K, P] with the rows that a pool has on its platform."""
    if not like.is_quantized:
        return scales
    missing = like.scales.shape[2] - scales.shape[2]
    return jnp.pad(scales, [(0, 0), (0, 0), (0, missing), (0, 0)])


def _check_ids(cache: KVCache, ids: ArrayLike) -> None:
    host = np.asarray(ids)
    wrong = host[(host < 0) | (host > cache.num_blocks)]
    if wrong.size:
        raise ValueError(f"id {wrong[0]} must be in 0..{cache.num_blocks}")


def _check_image(cache: KVCache, image: KVCache, num_ids: int) -> None:
    if image.kv.shape[1] != num_ids:
        raise ValueError(f"ids ({num_ids}) must be as many as image blocks ({image.kv.shape[1]})")
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
        theirs, ours = getattr(image, name), getattr(cache, name)
        if theirs != ours:
            raise ValueError(f"{name} of the image ({theirs}) must be that of the pool ({ours})")
