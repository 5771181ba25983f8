"""Rotary embedding against the rotation of complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import ops

HALF = 4
INV_FREQ = (10000.0 ** (-np.arange(HALF) / HALF)).astype(np.float32)
POSITIONS = np.array([0, 1, 2, 17, 511, 2047], np.int32)

rope_tables = jax.jit(ops.rope_tables)
rope = jax.jit(ops.rope)


def rotated(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Pair i is the complex number x[i] + x[i + D/2] j, turned by position * inv_freq[i]."""
    turn = np.exp(1j * positions[:, None].astype(np.float64) * INV_FREQ)[:, None, :]
    z = (x[..., :HALF] + 1j * x[..., HALF:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def test_rope_turns_pairs_as_complex_numbers(rng):
    x = rng.standard_normal((len(POSITIONS), 3, 2 * HALF), dtype=np.float32)
    out = rope(x, *rope_tables(POSITIONS, INV_FREQ))
    assert out.dtype == jnp.float32
    # The angle itself is rounded to float32: 2047 * 2^-24.
    np.testing.assert_allclose(out, rotated(x, POSITIONS), atol=5e-4)
    np.testing.assert_allclose(out[:4], rotated(x, POSITIONS)[:4], atol=5e-6)


def test_position_0_is_not_turned(rng):
    x = rng.standard_normal((len(POSITIONS), 3, 2 * HALF), dtype=np.float32)
    cos, sin = rope_tables(np.zeros_like(POSITIONS), INV_FREQ)
    np.testing.assert_array_equal(cos, 1.0)
    np.testing.assert_array_equal(sin, 0.0)
    np.testing.assert_array_equal(rope(x, cos, sin), x)


def test_products_depend_on_distance_only(rng):
    q, k = rng.standard_normal((2, 1, 1, 2 * HALF), dtype=np.float32)

    def product(query_position: int, key_position: int) -> float:
        x = np.repeat(np.concatenate([q, k]), 3, axis=0)
        positions = np.array([query_position] * 3 + [key_position] * 3, np.int32)
        out = np.asarray(rope(np.repeat(x, 3, axis=1), *rope_tables(positions, INV_FREQ)))
        return float(out[0, 0] @ out[3, 0])

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-3


def test_leading_axes_and_low_precision_pass_through(rng):
    x = jnp.asarray(rng.standard_normal((2, len(POSITIONS), 3, 2 * HALF)), jnp.bfloat16)
    out = rope(x, *rope_tables(POSITIONS, INV_FREQ))
    assert out.shape == x.shape
    assert out.dtype == jnp.bfloat16
    expected = np.stack([rotated(np.asarray(one, np.float32), POSITIONS) for one in x])
    # Computed in float32 and rounded once: half a unit of 2^-8, plus the error of the angle.
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2**-8, atol=5e-4)
