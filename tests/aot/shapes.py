"""The shapes that are served, and the factors of which every kernel is compiled."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from tests.aot.targets import TARGETS

NUM_LAYERS = 2
NUM_TOKENS = 2048
"""New tokens in a prefill step, and tokens that a step writes."""

CONTEXT_LEN = 8192
"""Tokens that a row of block tables can name."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Attention of a model, or of one device's share of it; other models have it too."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    windows: tuple[int | None, ...] = (None,)  # the kinds of layers
    soft_cap: float | None = None
    has_sinks: bool = False
    return_lse: bool = False
    is_packed: bool = False  # on a GPU, where it is by request
    decode_rows: int = 64
    prefill_rows: int = 8
    context_len: int = CONTEXT_LEN
    kernels: tuple[str, ...] = ("decode", "prefill", "write", "copy")
    block_sizes: tuple[int, ...] = (16, 64, 128)

    @property
    def layout(self) -> str:
        """Layout of its pools on a TPU."""
        return "packed" if self.head_dim < 128 else "split"


_SHAPES = (
    Shape(name="llama3-8b", num_heads=32, num_kv_heads=8),  # Qwen3 8B
    Shape(name="llama3-8b/tp2", num_heads=16, num_kv_heads=4),
    Shape(name="llama3-8b/tp4", num_heads=8, num_kv_heads=2),
    Shape(name="llama3-8b/tp8", num_heads=4, num_kv_heads=1),
    Shape(name="llama3-70b", num_heads=64, num_kv_heads=8),  # Qwen3 32B
    Shape(name="llama3-70b/tp4", num_heads=16, num_kv_heads=2),
    Shape(name="llama3-70b/tp8", num_heads=8, num_kv_heads=1),
    Shape(name="qwen3-0.6b", num_heads=16, num_kv_heads=8),
    Shape(
        name="gemma2-9b",
        num_heads=16,
        num_kv_heads=8,
        head_dim=256,
        windows=(4096, None),
        soft_cap=50.0,
    ),
    Shape(name="gemma3-4b", num_heads=8, num_kv_heads=4, head_dim=256, windows=(1024, None)),
    Shape(name="smollm2-135m", num_heads=9, num_kv_heads=3, head_dim=64),
    Shape(
        name="gpt-oss-20b",
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        windows=(128, None),
        has_sinks=True,
    ),
    # Block tables of 4 MiB, where scalar memory is 1 MiB.
    Shape(
        name="256 rows of 4096 blocks",
        num_heads=32,
        num_kv_heads=8,
        decode_rows=256,
        prefill_rows=256,
        context_len=4096 * 16,
        kernels=("decode", "prefill"),
        block_sizes=(16,),
    ),
)

SHAPES = {shape.name: shape for shape in _SHAPES}

POOLS = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")

FACTORS = {
    "target": tuple(TARGETS),
    "kernel": ("decode", "prefill", "write", "copy"),
    "shape": tuple(SHAPES),
    "block_size": (16, 64, 128),
    "pool": POOLS,
}


class Entry(NamedTuple):
    """One program to compile: a value of every factor."""

    target: str
    kernel: str
    shape: str
    block_size: int
    pool: str

    def __str__(self) -> str:
        return "-".join(map(str, self))


def is_refused(entry: Entry) -> bool:
    """Whether TPU kernels refuse the pool: scales of narrower blocks do not fill 128 lanes."""
    return jnp.dtype(entry.pool).itemsize == 1 and entry.block_size % 128 != 0


def is_served(entry: Entry) -> bool:
    """Whether the entry is a program that someone may run."""
    shape = SHAPES[entry.shape]
    is_offered = entry.kernel in shape.kernels and entry.block_size in shape.block_sizes
    return is_offered and not is_refused(entry)
