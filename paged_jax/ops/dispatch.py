"""Which backend runs an operation.

Without a name the choice is made when a program is lowered, so that a CPU host that compiles or
exports for TPU gets the TPU kernel. Every candidate is traced then, which is why shapes that a
kernel cannot serve are found out first.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
from jax.sharding import AxisType

from paged_jax.core import KVCache

Backend = Literal["xla", "pallas_tpu"]
BACKENDS: tuple[Backend, ...] = ("xla", "pallas_tpu")

T = TypeVar("T")


def check_backend(backend: str | None, interpret: Any) -> None:
    """Refuses what is not built, and interpretation of something else than a kernel."""
    if backend is not None and backend not in BACKENDS:
        raise NotImplementedError(f"backend {backend!r} is not built; use one of {BACKENDS}")
    if interpret and backend in (None, "xla"):
        raise ValueError("interpret needs a backend that is a Pallas kernel, such as 'pallas_tpu'")


def run(
    backend: Backend | None,
    cache: KVCache,
    num_heads: int,
    xla: Callable[..., T],
    pallas_tpu: Callable[..., T],
    *operands: Any,
) -> T:
    """Calls one of two functions that compute the same.

    Args:
      backend: A name, or None for the platform's kernel where it serves the shapes.
      cache: The pool that the operation reads or writes.
      num_heads: Query heads; those of the cache where there are no queries.
      xla: Serves everything.
      pallas_tpu: Raises NotImplementedError for shapes that it cannot serve.
      *operands: Pytrees of arrays that the functions take.
    """
    if backend == "xla":
        return xla(*operands)
    if backend == "pallas_tpu":
        return pallas_tpu(*operands)
    # Kernels take the arrays of one device: on an explicit mesh they belong into `shard_map`.
    is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    if is_explicit or not _suits_tpu(cache, num_heads) or not _can_trace(pallas_tpu, operands):
        return xla(*operands)
    # A batched kernel would be one with another grid: run the kernel for one after another.
    one_by_one = jax.custom_batching.sequential_vmap(pallas_tpu)
    return jax.lax.platform_dependent(*operands, tpu=one_by_one, default=xla)


def _suits_tpu(cache: KVCache, num_heads: int) -> bool:
    """Whether TPU kernels serve the pool; nothing of Pallas is imported to find that out."""
    from pallas_kernels.tpu.heads import heads_of

    scales = cache.scales if cache.is_quantized else None
    try:
        heads_of((num_heads, cache.head_dim), cache.kv, cache.num_kv_heads, scales)
    except NotImplementedError:
        return False
    return True


def _can_trace(kernel: Callable[..., Any], operands: tuple[Any, ...]) -> bool:
    """Whether a kernel serves the other shapes too; the trace is kept and used again."""
    try:
        jax.eval_shape(kernel, *operands)
    except NotImplementedError:
        return False
    return True
