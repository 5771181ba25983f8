"""Pools that are large and filled at once."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

NUM_DIFFERENT = 61
"""Blocks that differ; others repeat them. A prime, so that neighbours and layers differ."""


@functools.partial(jax.jit, static_argnums=(0, 1))
def filled(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Blocks [L, N, ...] that differ from their neighbours; no float32 copy of the pool is made."""
    few = jax.random.normal(jax.random.key(1), (NUM_DIFFERENT, *shape[2:]), jnp.float32)
    few = (few if dtype != jnp.int8 else 50 * few).astype(dtype)
    return few[jnp.arange(math.prod(shape[:2])).reshape(shape[:2]) % NUM_DIFFERENT]
