"""Products of groups of rows against a plain loop, on both paths, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import ops
from paged_jax.ops.grouped import LARGEST_TILE, SMALLEST_TILE, _ragged, _tiled

E, OUT, X = 6, 10, 4

SIZES = {
    "zeros between": [3, 0, 4, 0],
    "one group has all rows": [0, 0, 9, 0],
    "tiles end where groups do": [SMALLEST_TILE, SMALLEST_TILE, 0, SMALLEST_TILE],
    "one row more than a tile": [SMALLEST_TILE + 1, 1, SMALLEST_TILE, 2 * SMALLEST_TILE + 1],
    "a single row": [0, 0, 0, 1],
    "more rows than the largest tile": [LARGEST_TILE * X + 1, 2, 0, LARGEST_TILE],
    "no rows": [0, 0, 0, 0],
}
PATHS = {
    "public": jax.jit(ops.grouped_product),
    "tiled": jax.jit(_tiled),
    "ragged": jax.jit(_ragged),
}


def plain(x: np.ndarray, weights: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Row after row, in float64."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    rows = [
        row.astype(np.float64) @ weights[g].astype(np.float64)
        for g, row in zip(groups, x, strict=True)
    ]
    return np.asarray(rows).reshape(len(x), weights.shape[2])


def inputs(rng, count: int) -> tuple[np.ndarray, np.ndarray]:
    x = rng.standard_normal((count, E), dtype=np.float32)
    return x, rng.standard_normal((X, E, OUT), dtype=np.float32)


@pytest.mark.parametrize("path", ["tiled", "ragged"])
@pytest.mark.parametrize("case", SIZES)
def test_each_group_has_its_matrix(case, path, rng):
    sizes = SIZES[case]
    x, weights = inputs(rng, sum(sizes))
    got = PATHS[path](x, weights, np.asarray(sizes, np.int32))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, plain(x, weights, sizes), atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", PATHS)
def test_bfloat16_is_summed_in_float32(path, rng):
    sizes = SIZES["one row more than a tile"]
    x, weights = (jnp.asarray(a, jnp.bfloat16) for a in inputs(rng, sum(sizes)))
    got = PATHS[path](x, weights, np.asarray(sizes, np.int32))
    assert got.dtype == jnp.bfloat16
    wide = plain(np.asarray(x, np.float32), np.asarray(weights, np.float32), sizes)
    # Rounded once at the end: half a unit of 2^-8.
    np.testing.assert_allclose(np.asarray(got, np.float32), wide, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("case", ["zeros between", "one row more than a tile", "no rows"])
def test_gradients_are_those_of_a_plain_implementation(case, rng):
    sizes = SIZES[case]
    x, weights = inputs(rng, sum(sizes))
    cotangent = rng.standard_normal((sum(sizes), OUT), dtype=np.float32)

    @jax.jit
    def pulled(x, weights, sizes, cotangent):
        _, pullback = jax.vjp(lambda x, w: ops.grouped_product(x, w, sizes), x, weights)
        return pullback(cotangent)

    of_x, of_weights = pulled(x, weights, np.asarray(sizes, np.int32), cotangent)
    want = plain(cotangent, weights.swapaxes(1, 2), sizes)
    np.testing.assert_allclose(of_x, want, atol=1e-5, rtol=0)
    ends = np.cumsum(sizes)
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        own = slice(end - size, end)
        want = x[own].T.astype(np.float64) @ cotangent[own]
        np.testing.assert_allclose(of_weights[group], want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_company(dtype, rng):
    """Bit for bit, in batches of several sizes, in any group of them, at any place."""
    row, weights = (array.astype(jnp.dtype(dtype)) for array in inputs(rng, 1))
    for group in range(X):
        seen = set()
        for count in (2, 3, 8, 33, 64, 300):
            x = rng.standard_normal((count, E), dtype=np.float32).astype(row.dtype)
            groups = np.sort(rng.integers(0, X, count))
            place = int(rng.integers(0, count))
            groups[place] = group
            order = np.argsort(groups, kind="stable")
            x[place] = row[0]
            sizes = np.bincount(groups, minlength=X).astype(np.int32)
            got = np.asarray(PATHS["public"](x[order], weights, sizes))
            seen.add(got[np.flatnonzero(order == place)[0]].tobytes())
        assert len(seen) == 1
