"""What is compiled for GPUs: the shapes of TPUs and some more head dims, kernels and pools."""

import itertools

import jax.numpy as jnp

from pallas_kernels import compat
from tests.aot import shapes
from tests.aot.shapes import Entry, Shape
from tests.aot.targets import GPU_TARGETS

# Head dims that are no power of two are cut into some that are. Nothing of them is special to XLA.
_MORE_SHAPES = (
    Shape(name="phi2", num_heads=32, num_kv_heads=32, head_dim=80, kernels=("decode", "prefill")),
    Shape(name="phi3-mini", num_heads=32, num_kv_heads=32, head_dim=96, prefill_rows=64),
    Shape(name="head dim 112", num_heads=16, num_kv_heads=4, head_dim=112),
    Shape(name="head dim 192", num_heads=16, num_kv_heads=2, head_dim=192),
    # What no model needs, and callers of `ops` may ask for.
    Shape(
        name="small blocks, packed, log-sum-exp",
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        return_lse=True,
        is_packed=True,
        block_sizes=(1, 8),
    ),
)
SHAPES = shapes.SHAPES | {shape.name: shape for shape in _MORE_SHAPES}

POOLS = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")

TARGETS_OF = {
    "triton_decode": tuple(GPU_TARGETS),
    "triton_prefill": tuple(GPU_TARGETS),
    "triton_copy": tuple(GPU_TARGETS),
    "write": tuple(GPU_TARGETS),
    "mosaic_decode": ("h100", "b200"),
    "mosaic_prefill": ("h100",),
}
"""Targets by kernel; writes are XLA's. H200 differs from H100 in nothing that Mosaic looks at."""


def is_mosaic(kernel: str) -> bool:
    """Whether a kernel is of the backend that is only there if `HAS_MOSAIC`."""
    return kernel.startswith("mosaic")


HAS_MOSAIC = compat.has_mosaic_gpu()
"""Whether this JAX can run Mosaic's kernels; where it cannot, there is no entry of them."""

FACTORS = {
    "target": tuple(GPU_TARGETS),
    "kernel": tuple(k for k in TARGETS_OF if HAS_MOSAIC or not is_mosaic(k)),
    "shape": tuple(SHAPES),
    "block_size": (1, 8, 16, 64, 128),
    "pool": POOLS,
}


def op_of(kernel: str) -> str:
    """What a kernel computes, whichever backend it is of: "decode", "prefill", "write", "copy"."""
    return kernel.split("_")[-1]


def refusal(entry: Entry) -> str | None:
    """Why a kernel does not take an entry's pool or heads, None if it does."""
    shape, itemsize = SHAPES[entry.shape], jnp.dtype(entry.pool).itemsize
    if (
        entry.kernel in ("triton_decode", "triton_prefill")
        and entry.target == "a100"
        and "float8" in entry.pool
    ):
        return "fp8"  # the compiler has no cast from it before Hopper
    if is_mosaic(entry.kernel):
        if itemsize == 4:
            return "float32"
        if shape.head_dim not in (64, 128, 256):
            return "head dim"
        if shape.num_heads // shape.num_kv_heads > 16:
            return "group"
        if entry.block_size < 8:
            return "block size"
    return None


def is_offered(entry: Entry) -> bool:
    """Whether the shape has the kernel, and the kernel the target."""
    shape = SHAPES[entry.shape]
    return (
        op_of(entry.kernel) in shape.kernels
        and entry.block_size in shape.block_sizes
        and entry.target in TARGETS_OF[entry.kernel]
    )


def served_entries() -> list[Entry]:
    """The product of the factors, without what no one may run, in a fixed order."""
    entries = (Entry(*values) for values in itertools.product(*FACTORS.values()))
    return [entry for entry in entries if is_offered(entry) and refusal(entry) is None]
