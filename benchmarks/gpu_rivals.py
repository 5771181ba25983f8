"""What decodes from a paged pool on a GPU: each rival as programs of several calls.

A rival is a function that prepares its own layout and returns its variants by name, of which the
fastest counts. It raises `Refused` where it cannot run, with what is to be said instead of a time.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gpu_load import SM_SCALE, Arrays, Load

from paged_jax import ops
from pallas_kernels.gpu import device

HOPPER = (9, 0)
TOY_PROGRAMS = 2
"""Of decode where it is interpreted, one after another."""


class Refused(Exception):
    """A rival cannot run here."""


class Program(NamedTuple):
    """Some calls in a row, each on the output of the last; the first takes layer 0."""

    run: Callable[[], Any]  # runs and waits; the last output
    read: Callable[[Any], np.ndarray]  # what `run` returned, on the host


Prepared = Callable[[int], Program]
"""From the number of calls."""

Rival = Callable[[Load, Arrays, bool], dict[str, Prepared]]
"""Takes whether kernels are to be interpreted."""


def xla(load: Load, arrays: Arrays, is_interpreted: bool) -> dict[str, Prepared]:
    """The path of `paged_jax.ops` that serves everything: gathers in loops over rows and chunks."""

    def call(q: jax.Array, layer: int, operands: Any) -> jax.Array:
        cache, tables, lens = operands
        options = {"sm_scale": SM_SCALE, "backend": "xla"}
        return ops.paged_decode(q, cache, layer, tables, lens, **options)

    operands = arrays.cache, arrays.block_tables, arrays.context_lens
    return {"": functools.partial(_chain, call, load, arrays.q, operands)}


def pallas_triton(load: Load, arrays: Arrays, is_interpreted: bool) -> dict[str, Prepared]:
    """Our kernel in Triton."""
    from pallas_kernels.gpu.config import DecodeConfig
    from pallas_kernels.gpu.triton_decode import paged_decode

    config = DecodeConfig(num_programs=TOY_PROGRAMS) if is_interpreted else None
    return _kernel(paged_decode, config, load, arrays, is_interpreted)


def mosaic_gpu(load: Load, arrays: Arrays, is_interpreted: bool) -> dict[str, Prepared]:
    """Our kernel in Mosaic GPU."""
    from pallas_kernels.gpu.config import MosaicDecodeConfig
    from pallas_kernels.gpu.mosaic_decode import paged_decode

    capability = device.capability()
    if capability is not None and capability < HOPPER:
        # The compiler would end the process.
        raise Refused(f"needs compute capability {HOPPER[0]}.{HOPPER[1]}")
    config = MosaicDecodeConfig(num_programs=TOY_PROGRAMS) if is_interpreted else None
    return _kernel(paged_decode, config, load, arrays, is_interpreted)


def _kernel(
    kernel: Callable[..., tuple], config: Any, load: Load, arrays: Arrays, is_interpreted: bool
) -> dict[str, Prepared]:
    """A kernel of ours, called as `paged_jax.ops` does; refused where it refuses."""

    def call(q: jax.Array, layer: int, operands: Any) -> jax.Array:
        kv, scales, tables, lens = operands
        options = {"sm_scale": SM_SCALE, "num_kv_heads": load.shape.num_kv_heads}
        options |= {"scales": scales, "config": config, "interpret": is_interpreted}
        return kernel(q, kv, layer, tables, lens, **options)[0]

    scales = arrays.cache.scales if load.shape.is_quantized else None
    operands = arrays.cache.kv, scales, arrays.block_tables, arrays.context_lens
    try:
        jax.eval_shape(lambda q, operands: call(q, 0, operands), arrays.q, operands)
    except NotImplementedError as error:
        raise Refused(str(error)) from None
    return {"": functools.partial(_chain, call, load, arrays.q, operands)}


def jax_own(load: Load, arrays: Arrays, is_interpreted: bool) -> dict[str, Prepared]:
    """JAX's own kernel in Pallas Triton; K and V [K, N, P, D] of each layer apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
        except ImportError:
            raise Refused("this JAX has it no more") from None

    pools = split(load, arrays, (1, 0, 2, 3))
    scales = [(None, None)] * load.num_layers
    if load.shape.is_quantized:
        by_head = arrays.cache.scales.transpose(0, 2, 1, 3)  # [L, 2K, N+1, P]
        scales = [(x[0::2], x[1::2]) for x in by_head]

    def call(splits: int, pages: int, q: jax.Array, layer: int, operands: Any) -> jax.Array:
        pools, scales, tables, lens = operands
        options = {"k_splits": splits, "pages_per_compute_block": pages}
        options["interpret"] = is_interpreted
        return paged_attention(q, *pools[layer], tables, lens, *scales[layer], **options)

    operands = pools, scales, arrays.block_tables, arrays.context_lens
    found = {}
    for splits in (1, 4, 16):
        if load.blocks_per_row % splits:
            continue
        pages = math.gcd(load.blocks_per_row // splits, max(1, 128 // load.block_size))
        sized = functools.partial(call, splits, pages)
        found[f"{splits} splits"] = functools.partial(_chain, sized, load, arrays.q, operands)
    return found


def cudnn(load: Load, arrays: Arrays, is_interpreted: bool) -> dict[str, Prepared]:
    """cuDNN's paged attention as JAX calls it, in private; K and V [N, P, K, D]."""
    if is_interpreted or jax.default_backend() != "gpu":
        raise Refused("needs a GPU")
    _check_half(load)
    try:
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention
    except ImportError:
        raise Refused("this JAX does not have it") from None

    pools = split(load, arrays, (0, 2, 1, 3), first=1)  # it has no null block
    tables = (arrays.block_tables - 1)[:, None, :, None]
    ones = jnp.ones(load.batch, jnp.int32)

    def call(q: jax.Array, layer: int, operands: Any) -> jax.Array:
        pools, tables, ones, lens = operands
        options = {"scale": SM_SCALE, "mask_type": MaskType.PADDING, "qkv_layout": "BTNH"}
        q = q[:, None]
        return paged_attention(q, *pools[layer], ones, lens, tables, tables, **options)[:, 0]

    operands = pools, tables, ones, arrays.context_lens
    return {"": functools.partial(_chain, call, load, arrays.q, operands)}


def flashinfer(load: Load, arrays: Arrays, is_interpreted: bool) -> dict[str, Prepared]:
    """FlashInfer's decode wrapper in a CUDA graph."""
    import gpu_torch

    torch = gpu_torch.load("flashinfer", is_interpreted)
    _check_half(load)
    pools = split(load, arrays, (0, 1, 2, 3))
    call = gpu_torch.flashinfer_call(torch, load, arrays, pools)
    return {"": functools.partial(gpu_torch.chain, torch, call, load, arrays.q)}


def vllm(load: Load, arrays: Arrays, is_interpreted: bool) -> dict[str, Prepared]:
    """vLLM's build of FlashAttention in a CUDA graph."""
    import gpu_torch

    torch = gpu_torch.load("vllm", is_interpreted)
    _check_half(load)
    pools = split(load, arrays, (0, 2, 1, 3))
    call = gpu_torch.vllm_call(torch, load, arrays, pools)
    return {"": functools.partial(gpu_torch.chain, torch, call, load, arrays.q)}


RIVALS: dict[str, Rival] = {
    "pallas_triton": pallas_triton,
    "mosaic_gpu": mosaic_gpu,
    "xla": xla,
    "jax": jax_own,
    "cudnn": cudnn,
    "flashinfer": flashinfer,
    "vllm": vllm,
}
OURS = ("pallas_triton", "mosaic_gpu", "xla")
"""A fault of these is one of the whole run."""


def split(
    load: Load, arrays: Arrays, axes: tuple[int, ...], first: int = 0
) -> list[tuple[jax.Array, jax.Array]]:
    """Keys and values of each layer, [N, K, P, D] transposed by `axes`, from block `first` on."""

    @jax.jit
    def half(kv: jax.Array, layer: int, start: int) -> jax.Array:
        shape = (kv.shape[1] - first, load.shape.num_kv_heads, *kv.shape[3:])
        pairs = kv.reshape(*kv.shape[:2], -1, 2, *kv.shape[3:])
        begin = (layer, first, 0, start, 0, 0)
        part = jax.lax.dynamic_slice(pairs, begin, (1, *shape[:2], 1, *shape[2:]))
        return part.reshape(shape).transpose(axes)

    kv = arrays.cache.kv
    return [(half(kv, layer, 0), half(kv, layer, 1)) for layer in range(load.num_layers)]


def _check_half(load: Load) -> None:
    """Refuses what only kernels with scales per token serve."""
    shape = load.shape
    if shape.pool_dtype != shape.dtype or shape.dtype not in ("bfloat16", "float16"):
        raise Refused(f"queries of {shape.dtype} and a pool of {shape.pool_dtype} are not compared")


def _chain(
    call: Callable[[jax.Array, int, Any], jax.Array],
    load: Load,
    q: jax.Array,
    operands: Any,
    num_calls: int,
) -> Program:
    """The calls unrolled in one program, as the layers of a model are."""

    @jax.jit
    def run(q: jax.Array, operands: Any) -> jax.Array:
        for i in range(num_calls):
            q = call(q, i % load.num_layers, operands)
        return q

    program = run.lower(q, operands).compile()
    return Program(
        run=lambda: jax.block_until_ready(program(q, operands)),
        read=lambda out: np.asarray(out, np.float32),
    )
