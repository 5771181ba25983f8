"""What kernels do with references and scalars."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


class Refs:
    """Which references a kernel has depends on its options, so they are looked up by name."""

    def __init__(self, names: Iterable[str], refs: Iterable[Any]):
        self._refs = dict(zip(names, refs, strict=True))

    def __getattr__(self, name: str) -> Any:
        try:
            return self._refs[name]
        except KeyError:
            raise AttributeError(f"no reference {name!r}") from None

    def __getitem__(self, name: str) -> Any:
        return self._refs[name]

    def __contains__(self, name: str) -> bool:
        return name in self._refs


def divide(a: Any, b: int) -> jax.Array:
    """a // b of a scalar a >= 0; `//` asks for the sign, whose lowering wants to know the chip."""
    return jax.lax.div(jnp.asarray(a, jnp.int32), jnp.int32(b))


def divide_up(a: Any, b: int) -> jax.Array:
    """The least integer that is not below a / b, of a scalar a >= 0."""
    return divide(a + (b - 1), b)
