"""Block tables within reach of a kernel's scalar unit.

Scalar memory is 1 MiB and pads the minor axis of a 2-D array to 128 words, so tables go there flat.
A table that is too large stays in HBM, and the row in use and the next one are copied over.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.hbm import HBM
from pallas_kernels.tpu.heads import LANES

SMEM_TABLE_BYTES = 512 * 1024
"""Tables above this stay in HBM: half of scalar memory, the rest is for lists and lengths."""

ROWS_BYTES = 512 * 1024
"""Two rows of a table in HBM."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Block tables i32[S, M] and where the kernel finds them."""

    array: jax.Array
    is_in_smem: bool

    @property
    def width(self) -> int:
        """Blocks per row, M."""
        return self.array.shape[1]

    def scalars(self) -> dict[str, jax.Array]:
        """What is prefetched to scalar memory."""
        return {"tables": self.array.reshape(-1)} if self.is_in_smem else {}

    def inputs(self) -> dict[str, tuple[jax.Array, Any]]:
        """What stays in HBM: [S, 1, M], so that a row is whole tiles."""
        if self.is_in_smem:
            return {}
        padded = jnp.pad(self.array, ((0, 0), (0, -self.width % LANES)))
        return {"tables": (padded[:, None], HBM)}

    def scratch(self) -> dict[str, Any]:
        """Room for two rows; `num_rows` counts those that were entered."""
        if self.is_in_smem:
            return {}
        return {
            "table_rows": pltpu.SMEM((2, self.width + -self.width % LANES), jnp.int32),
            "table_arrived": pltpu.SemaphoreType.DMA((2,)),
            "num_entered": pltpu.SMEM((1,), jnp.int32),
        }

    def begin(self, refs: Any, row: Any, *, if_: Any) -> None:
        """Forgets everything and, under a condition, fetches the first row."""
        if self.is_in_smem:
            return
        refs.num_entered[0] = 0
        pl.when(if_)(lambda: _fetch(refs, row, 0).start())

    def enter(self, refs: Any, row: Any, *, if_: Any, then: Any, has_next: Any) -> None:
        """Under a condition, makes `row` the one that `read` reads, and fetches `then`."""
        if self.is_in_smem:
            return

        @pl.when(if_)
        def _():
            slot = jax.lax.rem(refs.num_entered[0], 2)
            _fetch(refs, row, slot).wait()
            refs.num_entered[0] += 1
            pl.when(has_next)(lambda: _fetch(refs, then, 1 - slot).start())

    def read(self, refs: Any, row: Any, index: Any) -> jax.Array:
        """Entry `index` of the row that was entered last, which must be `row`."""
        if self.is_in_smem:
            return refs.tables[row * self.width + index]
        return refs.table_rows[jax.lax.rem(refs.num_entered[0] + 1, 2), index]


def _fetch(refs: Any, row: Any, slot: Any) -> Any:
    return pltpu.make_async_copy(
        refs.tables.at[row, 0], refs.table_rows.at[slot], refs.table_arrived.at[slot]
    )


def table_of(block_tables: jax.Array) -> Table:
    """Chooses the place by size."""
    rows, width = block_tables.shape
    if 8 * width > ROWS_BYTES:
        raise NotImplementedError(
            f"block tables of {width} blocks per row; scalar memory holds two rows of "
            f"{ROWS_BYTES // 8}"
        )
    return Table(array=block_tables, is_in_smem=4 * rows * width <= SMEM_TABLE_BYTES)
