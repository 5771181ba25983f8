"""Division of scalars in kernels."""

from typing import Any

import jax
import jax.numpy as jnp


def divide(a: Any, b: int) -> jax.Array:
    """a // b of a scalar a >= 0; `//` asks for the sign, whose lowering wants to know the chip."""
    return jax.lax.div(jnp.asarray(a, jnp.int32), jnp.int32(b))


def divide_up(a: Any, b: int) -> jax.Array:
    """The least integer that is not below a / b, of a scalar a >= 0."""
    return divide(a + (b - 1), b)
