"""Rotary position embedding."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rope_tables(
    positions: Int[Array, " T"], inv_freq: Float[Array, "*T half"]
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Cosines and sines of the angles `positions * inv_freq`, in float32.

    Compute them once per step and hand them to every layer.

    Args:
      positions: Absolute positions.
      inv_freq: Angle per position of each pair of features; [T, half] where it differs by token.
    """
    inv_freq = inv_freq.reshape(-1, inv_freq.shape[-1])
    angle = positions.astype(jnp.float32)[:, None] * inv_freq
    # XLA:CPU fuses what it can recompute into every user, through an optimization barrier too:
    # each layer would compute (and compile) its own sines three times. It does not look into a
    # branch that depends on data.
    return jax.lax.cond(
        jnp.any(positions >= 0),
        lambda: (jnp.cos(angle), jnp.sin(angle)),
        lambda: (jnp.ones_like(angle), jnp.zeros_like(angle)),
    )


def rope(
    x: Float[Array, "*B T H D"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "*B T H D"]:
    """Rotates the halves of each head: (a, b) -> (a cos - b sin, b cos + a sin).

    Pair i joins features i and i + D/2, the order of Hugging Face's checkpoints.

    Args:
      x: Queries or keys.
      cos: From `rope_tables`.
      sin: From `rope_tables`.
    Returns: x's dtype; the rotation is computed in float32.
    Source: Su et al. 2021, "RoFormer".
    """
    shape = (1,) * (x.ndim - 3) + (cos.shape[0], 1, cos.shape[1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
