"""Rotary position embedding."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rope(
    x: Float[Array, "*B T H D"], positions: Int[Array, " T"], inv_freq: Float[Array, " D/2"]
) -> Float[Array, "*B T H D"]:
    """Rotates the halves of each head: (a, b) -> (a cos - b sin, b cos + a sin).

    Angles are `positions * inv_freq` in float32; pair i joins features i and i + D/2, the order
    of Hugging Face's checkpoints.

    Args:
      x: Queries or keys.
      positions: Absolute positions.
      inv_freq: Angle per position of each pair.
    Returns: x's dtype.
    Source: Su et al. 2021, "RoFormer".
    """
    angle = positions.astype(jnp.float32)[:, None] * inv_freq[None, :]
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    shape = (1,) * (x.ndim - 3) + cos.shape
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
