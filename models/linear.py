"""Matrix products with Hugging Face's weight order."""

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.models.parallel import Share


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Full float32 products for float32 weights, on every device; the default for others."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


class Linear(nnx.Module):
    """y = x W^T + b with weight [out, in]: the order of checkpoints, and the fastest on CPU."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        has_bias: bool = False,
        share: Share | None = None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        """With a share, each rank has some of the `in_features`, and gets the sum of all."""
        self.share = share
        scale = in_features**-0.5
        shape = (out_features, in_features)
        weight = scale * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.weight = nnx.Param(weight.astype(dtype))
        self.bias = nnx.Param(jnp.zeros(out_features, dtype)) if has_bias else None

    def __call__(self, x: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
        y = product(x, self.weight[...], out_dtype=out_dtype)
        if self.share is not None:
            y = self.share.sum(y)
        if self.bias is not None:
            y = y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,)).astype(y.dtype)
        return y


def product(x: jax.Array, weight: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [..., in] times weight [out, in], giving [..., out]."""
    return jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=matmul_precision(weight.dtype),
        preferred_element_type=out_dtype,
    )
