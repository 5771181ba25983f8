"""Normalisation layers."""

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, the mean of squares in float32.

    Source: Zhang and Sennrich 2019.
    """

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + jnp.float32(self.eps))).astype(x.dtype)
        return normed * self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
