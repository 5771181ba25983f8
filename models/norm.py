"""Normalisation layers."""

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.models.parallel import Share
from paged_jax.models.spec import NormSpec


class RMSNorm(nnx.Module):
    """x / rms(x) * (weight + offset), the mean of squares in float32.

    Source: Zhang and Sennrich 2019.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        offset: float = 0.0,
        dtype: jnp.dtype,
        share: Share | None = None,
        whole: int = 0,
    ) -> None:
        """With a share, each rank has some of the features of a vector, whose squares sum to those
        of `whole` features."""
        self.weight = nnx.Param(jnp.full(size, 1.0 - offset, dtype))
        self.eps = eps
        self.offset = offset
        self.share, self.whole = share, whole

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        if self.share is None:
            mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        else:
            squares = self.share.sum(jnp.sum(wide * wide, axis=-1, keepdims=True))
            mean_square = squares / jnp.float32(self.whole)
        normed = wide * jax.lax.rsqrt(mean_square + jnp.float32(self.eps))
        weight = _as_row(self.weight[...], x.ndim)
        if self.offset:
            # A sum with 1 loses bits in bfloat16, so here the product is wide as well.
            return (normed * (weight.astype(jnp.float32) + self.offset)).astype(x.dtype)
        return normed.astype(x.dtype) * weight


class LayerNorm(nnx.Module):
    """(x - mean(x)) / std(x) * weight + bias, in float32.

    Source: Ba et al. 2016.
    """

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.bias = nnx.Param(jnp.zeros(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(variance + jnp.float32(self.eps))
        weight, bias = _as_row(self.weight[...], x.ndim), _as_row(self.bias[...], x.ndim)
        return (normed * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def make_norm(
    spec: NormSpec, size: int, *, dtype: jnp.dtype, share: Share | None = None, whole: int = 0
) -> RMSNorm | LayerNorm:
    """The layer that a spec describes, over vectors of `size` features; for the rest see there."""
    if spec.kind == "layer":
        if share is not None:
            raise NotImplementedError("a LayerNorm over all heads cannot be divided")
        return LayerNorm(size, eps=spec.eps, dtype=dtype)
    return RMSNorm(size, eps=spec.eps, offset=spec.offset, dtype=dtype, share=share, whole=whole)


def _as_row(values: jax.Array, ndim: int) -> jax.Array:
    return values.reshape((1,) * (ndim - 1) + (-1,))
