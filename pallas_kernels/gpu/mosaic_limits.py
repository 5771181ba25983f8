"""What the Mosaic GPU kernels serve; asked before anything is built."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.gpu import device
from pallas_kernels.gpu.heads import MIN_ROWS, Heads, heads_of

HOPPER, BLACKWELL = (9,), (10,)
HEAD_DIMS = (64, 128, 256)
MIN_BLOCK = 8
"""Rows of a swizzled tile of shared memory, which a copy fills as a whole."""


def check_jax() -> None:
    """NotImplementedError where JAX lacks what the kernels' modules import."""
    if not compat.has_mosaic_gpu():
        raise NotImplementedError(f"JAX {jax.__version__}; Mosaic GPU kernels need 0.12 or later")


def check(
    queries: tuple[int, ...],
    q_dtype: Any,
    kv: jax.Array,
    num_kv_heads: int,
    scales: jax.Array | None = None,
    generations: tuple[int, ...] = HOPPER + BLACKWELL,
) -> Heads:
    """How heads meet the pool, as `heads_of`.

    Args:
      queries: H and D.
      q_dtype: Of queries.
      kv: The pool.
      num_kv_heads: K.
      scales: Of an 8-bit pool.
      generations: Major numbers of compute capability that the kernel is for.
    Raises: NotImplementedError that names what the kernels cannot serve.
    """
    check_jax()
    capability = device.capability()
    if capability is not None and capability[0] not in generations:
        raise NotImplementedError(
            f"compute capability {capability[0]}.{capability[1]}; this Mosaic GPU kernel is for "
            f"{', '.join(f'{major}.x' for major in generations)}"
        )
    heads = heads_of(queries, kv, num_kv_heads, scales)
    block_size = kv.shape[3]
    if heads.head_dim not in HEAD_DIMS:
        raise NotImplementedError(
            f"head_dim {heads.head_dim}; Mosaic GPU kernels take {', '.join(map(str, HEAD_DIMS))}"
        )
    if heads.group > MIN_ROWS:
        raise NotImplementedError(
            f"{heads.group} query heads per KV head; Mosaic GPU kernels take {MIN_ROWS} at most"
        )
    if q_dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"queries of {jnp.dtype(q_dtype).name}; Mosaic GPU kernels take bfloat16 and float16"
        )
    if kv.dtype != q_dtype and kv.dtype.itemsize != 1:
        raise NotImplementedError(
            f"queries of {jnp.dtype(q_dtype).name} and a pool of {kv.dtype.name}; Mosaic GPU "
            "kernels take the same of both, or 8 bits"
        )
    if block_size < MIN_BLOCK or block_size & (block_size - 1):
        raise NotImplementedError(
            f"block_size {block_size}; Mosaic GPU kernels take powers of two from {MIN_BLOCK} on"
        )
    return heads
