"""Products of consecutive groups of rows, each group with a matrix of its own."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paged_jax.shapes import ceil_div

SMALLEST_TILE, LARGEST_TILE = 8, 32
"""Rows of a product on CPU. Never 1 row, nor 64: there XLA:CPU rounds [in, out] products
differently, and a token's result must not depend on its company."""


@jax.custom_vjp
def grouped_product(
    x: Float[Array, "N E"], weights: Float[Array, "X E O"], group_sizes: Int[Array, " X"]
) -> Float[Array, "N O"]:
    """Multiplies each group of rows with the matrix of its group.

    Args:
      x: Rows in the order of their groups.
      weights: One matrix per group, [in, out]: XLA's kernel for TPU takes no other order, and
        would be handed a copy of all weights at every call.
      group_sizes: Rows per group; they sum to N.
    Returns: [N, O] in x's dtype.
    """
    return jax.lax.platform_dependent(x, weights, group_sizes, cpu=_tiled, default=_ragged)


def _ragged(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return jax.lax.ragged_dot_general(x, weights, group_sizes, dims, precision=_precision(x))


def _tiled(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """A loop over tiles of one group each; XLA:CPU's ragged product computes every group on all
    rows, three to eight times slower (32 groups)."""
    count, num_groups = x.shape[0], weights.shape[0]
    tile = SMALLEST_TILE
    while tile < LARGEST_TILE and tile * num_groups < count:
        tile *= 2
    tiles = ceil_div(group_sizes, tile)
    last_tile = jnp.cumsum(tiles)
    first_row = jnp.cumsum(group_sizes) - group_sizes
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def one_tile(i, out):
        group = jnp.searchsorted(last_tile, i, side="right").astype(jnp.int32)
        start = first_row[group] + (i - (last_tile[group] - tiles[group])) * tile
        rows = jax.lax.dynamic_slice_in_dim(padded, start, tile)
        matrix = jax.lax.dynamic_index_in_dim(weights, group, keepdims=False)
        product = jnp.matmul(rows, matrix, precision=_precision(x))
        # A tile may reach into the rows of later groups, whose own tiles follow.
        return jax.lax.dynamic_update_slice_in_dim(out, product, start, axis=0)

    out = jnp.zeros((count + tile, weights.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, last_tile[-1], one_tile, out)[:count]


def _precision(x: jax.Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _forward(x, weights, group_sizes):
    return grouped_product(x, weights, group_sizes), (x, weights, group_sizes)


def _backward(saved, cotangent):
    x, weights, group_sizes = saved
    # The loop's trip count is data, so it has no reverse; the ragged product has.
    _, pullback = jax.vjp(lambda x, weights: _ragged(x, weights, group_sizes), x, weights)
    return *pullback(cotangent), None


grouped_product.defvjp(_forward, _backward)
