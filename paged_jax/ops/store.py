"""Writing and copying in the KV pool: argument checks and the choice of a backend."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paged_jax import core
from paged_jax.core import KVCache
from paged_jax.ops import kernels, tpu
from paged_jax.ops.dispatch import Backend, check_backend, run


def write_kv(
    cache: KVCache,
    layer: Int[Array, ""] | int,
    keys: Float[Array, "T K D"],
    values: Float[Array, "T K D"],
    slots: Int[Array, " T"],
    *,
    backend: Backend | None = None,
    interpret: Any = False,
) -> KVCache:
    """Writes the keys and values of new tokens into their slots of one layer.

    Args:
      cache: The whole pool.
      layer: Layer to write.
      keys: Cast to the pool's dtype, or quantised with a scale per token and head.
      values: As keys.
      slots: `block * P + offset`; slot 0 for padding, which may or may not be stored there.
      backend: A named backend runs or raises; None chooses by platform and shape.
      interpret: Of a kernel that is named, as in `pallas_call`.
    Raises: ValueError if K or D is not the pool's; NotImplementedError for what a named backend
      cannot serve.
    """
    check_backend(backend, interpret)
    core.check_layer(cache, layer)
    slots = core.as_i32(slots, "slots")
    expected = (slots.shape[0], cache.num_kv_heads, cache.head_dim)
    if keys.shape != expected or values.shape != expected:
        raise ValueError(
            f"keys {keys.shape} and values {values.shape} must have shape {expected} "
            "(slots, num_kv_heads, head_dim)"
        )
    if not (
        jnp.issubdtype(keys.dtype, jnp.floating) and jnp.issubdtype(values.dtype, jnp.floating)
    ):
        raise ValueError(f"keys ({keys.dtype}) and values ({values.dtype}) must be floating point")

    # Tags are no concern of a kernel, and need not pass through it.
    bare = dataclasses.replace(cache, tags=None)
    written = run(
        backend,
        cache,
        cache.num_kv_heads,
        core.write,
        # On GPU it is XLA's scatter, into which what makes the keys is fused.
        {"pallas_tpu": functools.partial(tpu.write_kv, interpret=interpret)},
        bare,
        jnp.asarray(layer, jnp.int32),
        keys,
        values,
        slots,
    )
    return dataclasses.replace(written, tags=cache.tags)


def copy_kv(
    cache: KVCache,
    src: Int[Array, " S"],
    dst: Int[Array, " S"],
    *,
    backend: Backend | None = None,
    interpret: Any = False,
) -> KVCache:
    """Copies whole blocks of all layers; costs nothing when there is nothing to copy.

    Args:
      cache: The whole pool.
      src: Blocks to read; none of them is written in the same call.
      dst: Blocks to write; entries with dst 0 are padding.
      backend: A named backend runs or raises; None chooses by platform and shape.
      interpret: Of a kernel that is named, as in `pallas_call`.
    """
    check_backend(backend, interpret)
    src, dst = core.as_lists(src=src, dst=dst)
    bare = dataclasses.replace(cache, tags=None)
    copied = run(
        backend,
        cache,
        cache.num_kv_heads,
        core.copy_blocks,
        kernels.by_backend(kernels.copy_kv, interpret=interpret),
        bare,
        src,
        dst,
    )
    return dataclasses.replace(copied, tags=core.copy_tags(cache.tags, src, dst))
