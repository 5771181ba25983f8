"""What attention computes, as every kernel sees it; logits are exponents of 2 throughout."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)

MASKED = -1e30
"""Finite, so that a difference of two masked maxima is 0 and not NaN."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is computed; see `pallas_kernels.tpu.decode.paged_decode`."""

    sm_scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    @property
    def factor(self) -> float:
        """Factor on products of queries and keys before `cap`."""
        return self.sm_scale * LOG2E if self.soft_cap is None else self.sm_scale / self.soft_cap

    def cap(self, scaled: jax.Array) -> jax.Array:
        """Scaled products as logits in base 2."""
        if self.soft_cap is None:
            return scaled
        return jnp.tanh(scaled) * jnp.float32(self.soft_cap * LOG2E)

    def first_seen(self, position: jax.Array) -> jax.Array | int:
        """The first key that a query at this position sees."""
        if self.sliding_window is None:
            return 0
        return jnp.maximum(position + 1 - self.sliding_window, 0)


def base2_sinks(sinks: jax.Array) -> jax.Array:
    """Logits of sinks in base 2, finite: an infinite one less itself would be NaN."""
    sinks = jnp.maximum(jnp.asarray(sinks, jnp.float32) * LOG2E, MASKED)
    return jnp.minimum(sinks, jnp.finfo(jnp.float32).max)
