"""Sizes of tiles and buffers: measured ones from a table of the chip, else from shapes."""

import dataclasses
import functools
import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.heads import LANES, SUBLANES, Heads

LIST_BYTES = 320 * 1024
"""Scalar memory for a work list: what half a megabyte of tables leaves, with room for lengths."""

BUFFER_BYTES = 4 << 20
"""Keys and values of an item. Static schedules of items half as large are a sixth longer."""

DEFAULT_VMEM_BYTES = 12 << 20
"""What a kernel may need without asking: the compiler grants 16 MiB, of which it wants some."""

UNKNOWN_VMEM_BYTES = 64 << 20
"""Vector memory of a chip that is not known when a program is traced: that of v5p and v7x."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How `paged_decode` is cut up."""

    block_tokens: int
    """Keys per item: a multiple of the pool's block_size."""
    heads_per_tile: int
    """Pool heads that share a tile of query rows; divides their number."""
    num_buffers: int = 2
    """Items in VMEM at a time: one is computed, the others are on their way."""
    num_cores: int = 1
    """TensorCores that share the list (v4 and v5p have two a device)."""
    vmem_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_tokens", "heads_per_tile", "num_buffers", "num_cores"):
            _check_at_least_1(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """How `paged_prefill` is cut up."""

    tile_tokens: int
    """Query tokens per tile: a power of two."""
    chunk_tokens: int
    """Keys per chunk: a multiple of the pool's block_size."""
    heads_per_step: int
    """Pool heads per grid step: copied by one descriptor a block; divides their number."""
    vmem_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("tile_tokens", "chunk_tokens", "heads_per_step"):
            _check_at_least_1(name, getattr(self, name))
        if self.tile_tokens % SUBLANES or self.tile_tokens & (self.tile_tokens - 1):
            raise ValueError(
                f"tile_tokens ({self.tile_tokens}) must be a power of two from {SUBLANES} on"
            )


def _check_at_least_1(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} ({value!r}) must be an integer of at least 1")


def check_divides(name: str, value: int, whole_name: str, whole: int) -> None:
    """ValueError unless `value` divides `whole`."""
    if whole % value:
        raise ValueError(f"{name} ({value}) must divide {whole_name} ({whole})")


def chip() -> Any | None:
    """Facts of the TPU that a program is traced for; None where it is not known."""
    try:
        return pltpu.get_tpu_info()
    except Exception:
        return None


def decode_config(
    heads: Heads, kv: jax.Array, q_dtype: Any, *, num_rows: int, max_tokens: int
) -> DecodeConfig:
    """The table's entry, or items of `BUFFER_BYTES` and tiles of eight query rows.

    Args:
      heads: Shapes of the call.
      kv: The pool.
      q_dtype: Of queries.
      num_rows: S.
      max_tokens: Tokens that a row's block table holds.
    Raises: NotImplementedError for a work list that scalar memory cannot hold.
    """
    info, unit = chip(), _unit(kv.shape[3])
    vmem = UNKNOWN_VMEM_BYTES if info is None else info.vmem_capacity_bytes
    token_bytes = 2 * heads.pool_heads * heads.width * kv.dtype.itemsize

    def needed(config: DecodeConfig) -> int:
        tile_bytes = 3 * heads.width * 4  # what the compiler keeps of an item besides
        return config.block_tokens * (config.num_buffers * token_bytes + tile_bytes)

    found = lookup("paged_decode", key(heads, kv, q_dtype), DecodeConfig)
    if (
        found is None
        or found.block_tokens % unit
        or heads.pool_heads % found.heads_per_tile
        or needed(found) > vmem * 3 // 4
    ):
        tokens = min(BUFFER_BYTES, vmem // 16) // token_bytes
        found = DecodeConfig(
            block_tokens=max(unit, min(tokens, 2048, max_tokens) // unit * unit),
            heads_per_tile=max(
                n
                for n in range(1, heads.pool_heads + 1)
                if heads.pool_heads % n == 0 and (n == 1 or n * heads.queries <= SUBLANES)
            ),
            num_cores=1 if info is None else info.num_cores,
        )
    while 4 * num_rows * -(-max_tokens // found.block_tokens) > LIST_BYTES:
        found = dataclasses.replace(found, block_tokens=2 * found.block_tokens)
        if needed(found) > vmem // 2:
            raise NotImplementedError(
                f"a work list of {num_rows} rows of {max_tokens} tokens needs more than "
                f"{LIST_BYTES} bytes of scalar memory, even in the largest items that "
                f"{vmem} bytes of vector memory hold"
            )
    return dataclasses.replace(found, vmem_limit_bytes=_vmem_limit(needed(found), vmem))


def prefill_config(
    heads: Heads, kv: jax.Array, q_dtype: Any, *, num_tokens: int, max_tokens: int
) -> PrefillConfig:
    """The table's entry, or tiles of 512 query rows against 512 keys.

    Args:
      heads: Shapes of the call.
      kv: The pool.
      q_dtype: Of queries.
      num_tokens: T.
      max_tokens: Tokens that a row's block table holds.
    """
    info, unit = chip(), _unit(kv.shape[3])
    vmem = UNKNOWN_VMEM_BYTES if info is None else info.vmem_capacity_bytes

    def needed(config: PrefillConfig) -> int:
        rows, steps = config.tile_tokens * heads.queries, config.heads_per_step
        state = steps * rows * (2 * LANES + heads.width) * 4 + rows * config.chunk_tokens * 12
        buffers = 4 * steps * config.chunk_tokens * heads.width * kv.dtype.itemsize
        # Queries, outputs and log-sum-exp, each twice.
        item_bytes = 4 * heads.width * jnp.dtype(q_dtype).itemsize + 8 * LANES
        return state + buffers + steps * rows * item_bytes

    found = lookup("paged_prefill", key(heads, kv, q_dtype), PrefillConfig)
    if (
        found is None
        or found.chunk_tokens % unit
        or found.tile_tokens % (2 * SUBLANES)
        or heads.pool_heads % found.heads_per_step
        or needed(found) > vmem * 3 // 4
    ):
        tile = 2 * SUBLANES
        while 2 * tile * heads.queries <= 512:
            tile *= 2
        chunk = max(unit, min(512, max_tokens) // unit * unit)
        pair_bytes = 2 * kv.shape[3] * heads.width * kv.dtype.itemsize
        # Small copies are issued too slowly head by head: as many heads as fit, then.
        most = 1 if pair_bytes >= 32 << 10 else heads.pool_heads
        choices = [
            PrefillConfig(tile_tokens=tile, chunk_tokens=chunk, heads_per_step=n)
            for n in range(most, 0, -1)
            if heads.pool_heads % n == 0
        ]
        found = next((c for c in choices if needed(c) <= vmem * 2 // 3), choices[-1])
    tile = found.tile_tokens
    while tile > 2 * SUBLANES and tile >= 2 * num_tokens:
        tile //= 2
    found = dataclasses.replace(found, tile_tokens=tile)
    return dataclasses.replace(found, vmem_limit_bytes=_vmem_limit(needed(found), vmem))


def _unit(block_size: int) -> int:
    """Whole blocks and, where blocks allow, whole registers of keys."""
    return block_size if LANES % block_size else LANES


def _vmem_limit(needed: int, capacity: int) -> int | None:
    return None if needed <= DEFAULT_VMEM_BYTES else max(capacity * 3 // 4, 16 << 20)


def key(heads: Heads, kv: jax.Array, q_dtype: Any) -> str:
    """What a table entry is for: heads and rows as the kernel sees them, block size and dtypes."""
    return (
        f"J{heads.pool_heads} Q{heads.queries} C{heads.width} P{kv.shape[3]} "
        f"{jnp.dtype(q_dtype).name} {kv.dtype.name}"
    )


T = TypeVar("T")


def lookup(kernel: str, key: str, config: type[T]) -> T | None:
    """The entry that `benchmarks/tune.py` measured on this kind of device; never raises."""
    info = chip()
    if info is None:
        return None
    entry = _table(device_name(info)).get(kernel, {}).get(key)
    try:
        return None if entry is None else config(**entry)
    except (TypeError, ValueError):  # written by another version, or by hand
        return None


def device_name(info: Any) -> str:
    """Name of a chip's table file, such as "v6e"."""
    return re.sub(r"\W", "", str(getattr(info.chip_version, "value", info.chip_version)).lower())


@functools.cache
def _table(device: str) -> dict[str, dict[str, Any]]:
    """{kernel: {key: fields of a config}} of a device, empty if there is none that can be read."""
    try:
        file = resources.files("pallas_kernels.tpu") / "tuned" / f"{device}.json"
        table = json.loads(file.read_text())
        return {kernel: dict(entries) for kernel, entries in table.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
