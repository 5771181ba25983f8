"""Feed-forward layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.models.linear import Linear
from paged_jax.models.parallel import Share
from paged_jax.models.spec import MLPSpec

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)), gate and up in one product; without a gate down(act(up(x))).

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def __init__(
        self,
        spec: MLPSpec,
        hidden_size: int,
        *,
        share: Share | None = None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = {"has_bias": spec.has_bias, "dtype": dtype, "rngs": rngs}
        self.spec = spec
        own = spec.size if share is None else share.width(spec.size)
        self.gate_up = Linear(hidden_size, (1 + spec.is_gated) * own, **sizes)
        self.down = Linear(own, hidden_size, share=share, **sizes)

    def __call__(self, x: jax.Array) -> jax.Array:
        activation = ACTIVATIONS[self.spec.activation]
        if not self.spec.is_gated:
            return self.down(activation(self.gate_up(x)))
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(activation(gate) * up)
