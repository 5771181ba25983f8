"""Feed-forward layers."""

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.models.linear import Linear
from paged_jax.models.spec import DecoderSpec


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), gate and up fused into one product.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def __init__(self, spec: DecoderSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        sizes = {"has_bias": spec.has_mlp_bias, "dtype": dtype, "rngs": rngs}
        self.gate_up = Linear(spec.hidden_size, 2 * spec.mlp_size, **sizes)
        self.down = Linear(spec.mlp_size, spec.hidden_size, **sizes)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)
