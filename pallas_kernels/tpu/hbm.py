"""Arrays that stay in HBM."""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

HBM = pl.BlockSpec(memory_space=pltpu.HBM)


def in_hbm(x: jax.Array, interpret: Any) -> jax.Array:
    """Keeps XLA from moving an operand to VMEM and back around a kernel.

    A block spec alone does not: scales of a few megabytes were copied as a whole in every layer.
    """
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)
