"""Which backend runs an operation.

Without a name the choice is made when a program is lowered, so that a CPU host that compiles or
exports for TPU gets the TPU kernel. Every candidate is traced then, which is why shapes that a
kernel cannot serve are found out first. Kernels for GPU are candidates only where the GPU is known:
Triton cannot be lowered for some GPU or other, and no one on a CPU should pay for its trace.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
from jax.sharding import AxisType

from paged_jax.core import KVCache

Backend = Literal["xla", "pallas_tpu", "pallas_triton", "mosaic_gpu"]
BACKENDS: tuple[Backend, ...] = ("xla", "pallas_tpu", "pallas_triton", "mosaic_gpu")

PLATFORMS: dict[Backend, str] = {"pallas_tpu": "tpu", "pallas_triton": "cuda"}
"""The backend that None means on a platform, if it serves the shapes; elsewhere it means "xla"."""

Kernels = Mapping[Backend, Callable[..., Any]]

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
    kernels: Mapping[Backend, Callable[..., T]],
    *operands: Any,
) -> T:
    """Calls one of several functions that compute the same.

    Args:
      backend: A name, or None for the platform's kernel where it serves the shapes.
      cache: The pool that the operation reads or writes.
      num_heads: Query heads; those of the cache where there are no queries.
      xla: Serves everything, and the backends that have no kernel of their own for it.
      kernels: By backend; raise NotImplementedError for shapes that they cannot serve.
      *operands: Pytrees of arrays that the functions take.
    """
    kernels = {name: _in_32_bits(kernel) for name, kernel in kernels.items()}
    if backend is not None:
        if backend in kernels and cache.layout == "latent":
            raise NotImplementedError(f"backend {backend!r} does not serve layout 'latent'")
        return kernels.get(backend, xla)(*operands)
    # Kernels take the arrays of one device: on an explicit mesh they belong into `shard_map`.
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return xla(*operands)
    branches = {}
    for name, platform in PLATFORMS.items():
        kernel = kernels.get(name)
        if kernel and _suits(name, cache, num_heads) and _can_trace(kernel, operands):
            # A batched kernel would be one with another grid: run it for one after another.
            branches[platform] = jax.custom_batching.sequential_vmap(kernel)
    if not branches:
        return xla(*operands)

    @jax.custom_jvp
    def choose(*operands):
        return jax.lax.platform_dependent(*operands, default=xla, **branches)

    # Kernels have no derivative; XLA's loops have one, forwards.
    choose.defjvp(functools.partial(jax.jvp, xla))
    return choose(*operands)


def _in_32_bits(kernel: Callable[..., T]) -> Callable[..., T]:
    """A kernel whose integers stay of 32 bits where 64 are enabled, as accelerators want them."""

    @functools.wraps(kernel)
    def run(*operands):
        with jax.enable_x64(False):
            return kernel(*operands)

    return run


def _suits(backend: Backend, cache: KVCache, num_heads: int) -> bool:
    """Whether a kernel serves the pool; nothing of Pallas is imported to find that out."""
    if cache.layout == "latent":
        return False
    if backend == "pallas_tpu":
        from pallas_kernels.tpu.heads import heads_of
    else:
        from pallas_kernels.gpu import device
        from pallas_kernels.gpu.heads import heads_of

        if device.known() is None:
            return False
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
