"""Sizes of tiles, warps and stages: measured ones from a table of the device, else from shapes."""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import device
from pallas_kernels.gpu.heads import Heads

NUM_PROGRAMS = 660
"""Programs of decode: five for each multiprocessor of an H100, as many as its registers hold."""

MOSAIC_PROGRAMS = 528
"""Programs of decode in Mosaic GPU: two at a time on each multiprocessor of an H100, twice."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How `paged_decode` is cut up."""

    block_k: int = 64
    """Keys that a program computes at once: a power of two from 16 on."""
    num_warps: int = 4
    num_stages: int = 3
    """Of the pipelined loop; the table's indirection takes two of them."""
    num_programs: int = NUM_PROGRAMS
    """Programs that share the keys of a batch, one per row and head at least."""

    def __post_init__(self) -> None:
        _check(self, ("block_k", "num_warps"), ("num_stages", "num_programs"))


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """How `paged_prefill` is cut up."""

    tile_rows: int = 64
    """Query rows of a program, tokens times heads per KV head: a power of two from 16 on."""
    block_k: int = 64
    """Keys that a program computes at once: a power of two from 16 on."""
    num_warps: int = 4
    num_stages: int = 3
    """Of the pipelined loop; the table's indirection takes two of them."""

    def __post_init__(self) -> None:
        _check(self, ("tile_rows", "block_k", "num_warps"), ("num_stages",))


@dataclass(frozen=True, kw_only=True)
class MosaicDecodeConfig:
    """How `mosaic_decode.paged_decode` is cut up."""

    block_k: int = 64
    """Keys of a stage: a power of two from 64 on, a swizzled line of their weights."""
    num_stages: int = 3
    """Stages of keys in shared memory; copies run all but one ahead."""
    num_programs: int = MOSAIC_PROGRAMS
    """Programs that share the keys of a batch, one per row and head at least."""

    def __post_init__(self) -> None:
        _check(self, ("block_k",), ("num_stages", "num_programs"), least=64)


@dataclass(frozen=True, kw_only=True)
class MosaicPrefillConfig:
    """How `mosaic_prefill.paged_prefill` is cut up; a program has 64 query rows."""

    block_k: int = 64
    """Keys of a stage: a power of two from 64 on, a swizzled line of their weights."""
    num_stages: int = 2
    """Stages of keys in shared memory; copies run all but one ahead."""

    def __post_init__(self) -> None:
        _check(self, ("block_k",), ("num_stages",), least=64)


def _check(config: Any, powers: tuple[str, ...], others: tuple[str, ...], least: int = 16) -> None:
    for name in powers + others:
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} ({value!r}) must be an integer of at least 1")
        low = 1 if name == "num_warps" else least
        if name in powers and (value & (value - 1) or value < low):
            raise ValueError(f"{name} ({value}) must be a power of two from {low} on")


def decode_config(heads: Heads, kv: jax.Array, q_dtype: Any) -> DecodeConfig:
    """The table's entry, or tiles that leave registers for several programs at a time."""
    found = lookup("paged_decode", key(heads, kv, q_dtype), DecodeConfig)
    if found is not None:
        return found
    # Widened numbers of 8 bits and heads cut into parts take registers too.
    is_cut = heads.head_dim & (heads.head_dim - 1) and kv.dtype.itemsize == 1
    is_wide = heads.head_dim > 128 or jnp.float32 in (q_dtype, kv.dtype) or is_cut
    return DecodeConfig(block_k=32 if is_wide else 64)


def prefill_config(heads: Heads, kv: jax.Array, q_dtype: Any) -> PrefillConfig:
    """The table's entry, or tiles of 64 rows and 64 keys."""
    found = lookup("paged_prefill", key(heads, kv, q_dtype), PrefillConfig)
    if found is not None:
        return found
    if jnp.float32 in (q_dtype, kv.dtype):
        # Products without tensor cores: larger tiles, or fewer warps, spill registers.
        return PrefillConfig(tile_rows=16, block_k=16, num_warps=8)
    is_wide = heads.head_dim > 128 or heads.group > 64 or kv.dtype.itemsize == 1
    if heads.head_dim > 128 and heads.head_dim & (heads.head_dim - 1):
        return PrefillConfig(tile_rows=32, block_k=32, num_warps=8)
    return PrefillConfig(num_warps=8 if is_wide else 4)


def key(heads: Heads, kv: jax.Array, q_dtype: Any) -> str:
    """What a table entry is for: heads, block size and dtypes."""
    return (
        f"H{heads.num_heads} K{heads.num_kv_heads} D{heads.head_dim} P{kv.shape[3]} "
        f"{jnp.dtype(q_dtype).name} {kv.dtype.name}"
    )


T = TypeVar("T")


def lookup(kernel: str, key: str, config: type[T]) -> T | None:
    """The entry that `benchmarks/tune.py` measured on this kind of device; never raises."""
    name = device.name()
    entry = None if name is None else _table(name).get(kernel, {}).get(key)
    try:
        return None if entry is None else config(**entry)
    except (TypeError, ValueError):  # written by another version, or by hand
        return None


@functools.cache
def _table(name: str) -> dict[str, dict[str, Any]]:
    """{kernel: {key: fields of a config}} of a device, empty if there is none that can be read."""
    try:
        file = resources.files("pallas_kernels.gpu") / "tuned" / f"{name}.json"
        table = json.loads(file.read_text())
        return {kernel: dict(entries) for kernel, entries in table.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
