"""Arithmetic of one tile of logits, shared by decode and prefill; base-2 exponents throughout."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.tpu.heads import LANES

LOG2E = math.log2(math.e)

MASKED = -1e30
"""Finite, so that a difference of two masked maxima is 0 and not NaN."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is computed; see `paged_decode`."""

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


def widen(x: jax.Array, width: int) -> jax.Array:
    """[rows, 128] whose lanes are all alike as [rows, width]; free where width % 128 == 0."""
    if width % LANES:
        return jnp.broadcast_to(x[:, :1], (x.shape[0], width))
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def lane_sums(x: jax.Array) -> jax.Array:
    """[rows, n] as [rows, 128] with the same sum: adds whole registers and crosses no lanes."""
    rows, width = x.shape
    if width % LANES:
        lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
        return jnp.where(lane == 0, jnp.sum(x, axis=1, keepdims=True), 0.0)
    parts = [x[:, i : i + LANES] for i in range(0, width, LANES)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + (
            parts[-1:] if len(parts) % 2 else []
        )
    return parts[0]


def product(a: jax.Array, b: jax.Array, *, transposed: bool = False) -> jax.Array:
    """a @ b, or a @ b.T, in float32; float32 inputs are not rounded to bfloat16."""
    exact = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def pick_rows(found: dict[int, jax.Array], height: int, shape: tuple[int, ...]) -> jax.Array:
    """Rows [i * height, (i + 1) * height) of `found[i]`, one array of the given shape.

    Rows that belong to none are zero if one array is given, else arbitrary.
    """
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    if len(found) == 1:
        ((i, only),) = found.items()
        if i == 0 and height >= shape[0]:
            return only
        return jnp.where((row >= i * height) & (row < (i + 1) * height), only, 0.0)
    result = None
    for i, array in sorted(found.items()):
        result = array if result is None else jnp.where(row < i * height, result, array)
    assert result is not None
    return result


def base2_sinks(sinks: jax.Array) -> jax.Array:
    """Logits of sinks in base 2, finite: an infinite one less itself would be NaN."""
    sinks = jnp.maximum(jnp.asarray(sinks, jnp.float32) * LOG2E, MASKED)
    return jnp.minimum(sinks, jnp.finfo(jnp.float32).max)
