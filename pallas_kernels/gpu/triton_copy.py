"""Block copies in Triton: in place, and for the price of a launch where there is nothing to copy.

    grid   (layer, pair): one program per pool row, which leaves at once if the pair is padding

XLA's gather and scatter would move every pair, padding included, and hold all of it in between.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu.heads import check_offsets, power_of_two

CHUNK = 4096
"""Numbers that a program moves at once."""


def copy_blocks(
    pools: Sequence[jax.Array], src: jax.Array, dst: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Copies whole blocks of all layers, in place where the pools are donated.

    Args:
      pools: [L, N+1, ...] each.
      src: i32[S], blocks to read; none of them is written in the same call.
      dst: i32[S], blocks to write; 0 for padding.
    """
    if not dst.size:
        return tuple(pools)
    return tuple(_copy(pool, src, dst, interpret) for pool in pools)


def _copy(pool: jax.Array, src: jax.Array, dst: jax.Array, interpret: bool) -> jax.Array:
    check_offsets(pool)
    layers, blocks, rows = pool.shape[:3]
    flat = pool.reshape(layers, blocks, rows, -1)
    size = flat.shape[3]
    chunk = min(power_of_two(size), CHUNK)

    def body(src_ref: Any, dst_ref: Any, _: Any, ref: Any) -> None:
        layer, pair, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        source, target = jnp.minimum(src_ref[pair], blocks - 1), dst_ref[pair]

        @pl.when((target > 0) & (target < blocks))
        def _() -> None:
            for first in range(0, size, chunk):
                at = first + jnp.arange(chunk, dtype=jnp.int32)
                mask = at < size
                x = ref[layer, source, row, jnp.minimum(at, size - 1)]
                plt.store(ref.at[layer, target, row, at], x, mask=mask)

    copied = pl.pallas_call(
        body,
        grid=(layers, dst.shape[0], rows),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        input_output_aliases={2: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="copy_blocks",
    )(src, dst, flat)
    return copied.reshape(pool.shape)
