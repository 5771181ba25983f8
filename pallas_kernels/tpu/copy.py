"""Copies blocks of the pool in place, all layers of a block in one DMA.

Grid (1,). Everything stays in HBM; the block ids are scalars in SMEM. A window of copies is in
flight at a time. Bytes per pair: twice a block of all layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat
from pallas_kernels.tpu.hbm import HBM, in_hbm

IN_FLIGHT = 8
"""Pairs of blocks whose copies are in flight."""


def copy_blocks(
    pools: tuple[jax.Array, ...], src: jax.Array, dst: jax.Array, *, interpret: Any = False
) -> tuple[jax.Array, ...]:
    """Returns `pool.at[:, dst].set(pool[:, src])` of each pool without the pairs of dst 0.

    Args:
      pools: Arrays [L, N+1, ..]: keys and values and, of an 8-bit pool, the scales; updated in
        place where they are donated.
      src: i32[S], blocks to read.
      dst: i32[S], blocks to write, 0 for padding. No block is written twice, or written and read.
      interpret: False, or what `pallas_call` takes.
    Raises: ValueError for lists of unequal length; NotImplementedError for a float16 pool.
    """
    if src.shape != dst.shape or src.ndim != 1:
        raise ValueError(f"src {src.shape} and dst {dst.shape} must be lists of equal length")
    if any(pool.dtype == jnp.float16 for pool in pools):
        raise NotImplementedError("TPU kernels cannot load a float16 pool; use bfloat16")
    count = src.shape[0]
    if count == 0:
        return pools
    is_real = dst > 0
    place = jnp.where(is_real, jnp.cumsum(is_real, dtype=jnp.int32) - 1, count)
    zeros = jnp.zeros(count, jnp.int32)
    src, dst = (zeros.at[place].set(ids, mode="drop") for ids in (src, dst))
    num_pairs = jnp.sum(is_real, dtype=jnp.int32).reshape(1)

    copied = pl.pallas_call(
        functools.partial(_copy_kernel, num_pools=len(pools)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[HBM] * len(pools),
            out_specs=[HBM] * len(pools),
            scratch_shapes=[pltpu.SemaphoreType.DMA((len(pools), IN_FLIGHT))],
        ),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        input_output_aliases={3 + i: i for i in range(len(pools))},
        compiler_params=compat.tpu_compiler_params(
            ("arbitrary",), None, is_checked=bool(interpret)
        ),
        interpret=interpret,
        name="copy_blocks",
    )(src, dst, num_pairs, *(in_hbm(pool, interpret) for pool in pools))
    return tuple(copied)


def _copy_kernel(
    # Scalar prefetch, i32 in SMEM.
    src_ref,  # [S]
    dst_ref,  # [S]
    num_pairs_ref,  # [1]
    # Inputs, which the outputs are aliased to; outputs [L, N+1, ..] in HBM; scratch.
    *refs,
    num_pools: int,
):
    pool_refs, sems = refs[num_pools:-1], refs[-1]
    num_pairs = num_pairs_ref[0]

    def copies(i):
        for pool, pool_ref in enumerate(pool_refs):
            yield pltpu.make_async_copy(
                pool_ref.at[:, src_ref[i]],
                pool_ref.at[:, dst_ref[i]],
                sems.at[pool, jax.lax.rem(i, IN_FLIGHT)],
            )

    def finish(i):
        for copy in copies(i):
            copy.wait()

    @pl.loop(0, num_pairs)
    def _(i):
        @pl.when(i >= IN_FLIGHT)
        def _():
            finish(i - IN_FLIGHT)

        for copy in copies(i):
            copy.start()

    @pl.loop(jnp.maximum(num_pairs - IN_FLIGHT, 0), num_pairs)
    def _(i):
        finish(i)
