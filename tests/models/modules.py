"""Modules with random parameters that nobody compiles an initialisation for."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

M = TypeVar("M", bound=nnx.Module)


def filled(make: Callable[[], M], *, scale: float = 0.5) -> M:
    """What `make` builds, every parameter random, also those that would begin as zeros or ones."""
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(nnx.eval_shape(make))

    def values(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray((scale * rng.standard_normal(leaf.shape)).astype(leaf.dtype))

    return nnx.merge(graphdef, jax.tree.map(values, nnx.to_pure_dict(state)))
