"""Copies of whole blocks from the pool in HBM to buffers in VMEM, some items ahead of their use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.refs import Refs
from pallas_kernels.tpu.scalars import divide, divide_up
from pallas_kernels.tpu.tables import Table


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Keys [low, high) of a chunk of `size` that are seen; it may reach over both its ends."""

    low: jax.Array | int  # the integer 0 where nothing is hidden in front
    high: jax.Array
    size: int

    @property
    def is_whole(self) -> jax.Array:
        """Whether every key of the chunk is seen."""
        return (self.high >= self.size) & (self.low <= 0)

    def has(self, key: jax.Array) -> jax.Array:
        """Which keys are seen."""
        seen = key < self.high
        return seen if isinstance(self.low, int) else seen & (key >= self.low)


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """How a chunk of keys comes in: `num_blocks` blocks, all or some rows of each."""

    num_blocks: int
    block_size: int
    table: Table
    pool_rows: int | None = None
    """Rows of a block that are copied; None: all."""

    @property
    def tokens(self) -> int:
        """Keys per chunk."""
        return self.num_blocks * self.block_size

    def start(
        self, refs: Refs, slot: Any, row: Any, chunk: Any, seen: Interval, *, first_row: Any = 0
    ) -> None:
        """Starts the copies of those blocks of a chunk of `row` in which a key is seen."""
        layer = refs.layer[0]

        def start_block(i: Any) -> None:
            id_ = self.table.read(refs, row, chunk * self.num_blocks + i)
            source = refs.kv.at[layer, id_]
            if self.pool_rows is not None:
                source = refs.kv.at[layer, id_, pl.ds(first_row, self.pool_rows)]
            arrived = refs.arrived.at[slot]
            pltpu.make_async_copy(source, refs.kv_buf.at[slot, i], arrived).start()
            if "scales" in refs:
                scales = refs.scales.at[layer, id_]
                pltpu.make_async_copy(scales, refs.scale_buf.at[slot, i], arrived).start()

        def start_all() -> None:
            for i in range(self.num_blocks):
                start_block(i)

        pl.when(seen.is_whole)(start_all)
        pl.when(~seen.is_whole)(lambda: self.each_live(seen, start_block))

    def wait(self, refs: Refs, slot: Any, seen: Interval) -> None:
        """Waits for what `start` started. Everything on the semaphore must be waited for first."""
        buffers = [refs.kv_buf, refs.scale_buf] if "scales" in refs else [refs.kv_buf]

        def wait_part(*index: Any) -> None:
            # A wait knows the size of a copy, not its source.
            for buffer in buffers:
                part = buffer.at[slot, *index]
                pltpu.make_async_copy(part, part, refs.arrived.at[slot]).wait()

        pl.when(seen.is_whole)(wait_part)
        pl.when(~seen.is_whole)(lambda: self.each_live(seen, wait_part))

    def each_live(self, seen: Interval, act: Callable[[Any], None]) -> None:
        """Calls `act` for the blocks of a chunk in which a key is seen; they are consecutive."""
        first = (
            0 if isinstance(seen.low, int) else divide(jnp.maximum(seen.low, 0), self.block_size)
        )
        end = jnp.minimum(divide_up(seen.high, self.block_size), self.num_blocks)
        jax.lax.fori_loop(first, end, lambda i, _: act(i), None)
