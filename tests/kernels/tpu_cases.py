"""Cases of TPU attention: a few in which every two values of two options meet, and how one is run.

A case costs seconds to compile, so shapes are small: a chunk of keys is 128 tokens, or two blocks
of 128, and the longest row has a few of them.
"""

import dataclasses
from typing import Any, NamedTuple
from unittest import mock

import jax

from pallas_kernels.compat import tpu_interpret_params
from pallas_kernels.tpu import decode_kernel, tables
from pallas_kernels.tpu.config import DecodeConfig, PrefillConfig
from pallas_kernels.tpu.decode import paged_decode
from pallas_kernels.tpu.prefill import paged_prefill
from tests.cover import Value
from tests.kernels.cases import TOLERANCES, Case
from tests.kernels.conformance import WINDOW
from tests.kernels.table import Table

# Queries of prefill are scaled and rounded to bfloat16 once more: 2^-9 of each product, and logits
# of up to 15 here, where probabilities and logits then move by 1 or 2 in 100.
SCALED_QUERIES = {"rtol": 8e-3, "atol": 2.5e-2}

FACTORS = {
    "kernel": ("decode", "prefill"),
    "head_dim": (32, 64, 80, 96, 128, 256),
    "group": (1, 3, 4, 6, 7, 8, 24, 48),
    "num_kv_heads": (1, 2, 3),
    "block_size": (8, 16, 32, 64, 128),
    "dtype": ("float32", "bfloat16"),
    "kv_dtype": ("same", "int8", "float8_e4m3fn", "float8_e5m2"),
    "window": ("all", "small", "long"),
    "has_cap": (False, True),
    "has_sinks": (False, True),
    "return_lse": (False, True),
    "table": ("smem", "hbm"),
    "num_buffers": (2, 3),
    "dma": ("on_wait", "eager"),
    # Heads of the pool in a tile of decode or in a grid step of prefill.
    "heads_at_once": ("one", "all"),
    # A chunk that is not seen as a whole, which decode may compute in parts.
    "edge": ("whole", "parts"),
    "rows": ("all", "some"),
}


class Entry(NamedTuple):
    """A value of every factor."""

    kernel: str
    head_dim: int
    group: int
    num_kv_heads: int
    block_size: int
    dtype: str
    kv_dtype: str = "same"
    window: str = "all"
    has_cap: bool = False
    has_sinks: bool = False
    return_lse: bool = True
    table: str = "smem"
    num_buffers: int = 2
    dma: str = "on_wait"
    heads_at_once: str = "all"
    edge: str = "whole"
    rows: str = "all"

    def __str__(self) -> str:
        options = [
            self.kernel,
            f"d{self.head_dim}_g{self.group}_k{self.num_kv_heads}_p{self.block_size}",
            self.dtype if self.kv_dtype == "same" else f"{self.dtype}_{self.kv_dtype}",
            {"all": "", "small": "window", "long": "long_window"}[self.window],
            "cap" if self.has_cap else "",
            "sinks" if self.has_sinks else "",
            "lse" if self.return_lse else "",
            self.table,
            f"b{self.num_buffers}" if self.kernel == "decode" else "",
            self.dma,
            self.heads_at_once,
            self.edge,
            self.rows,
        ]
        return "-".join(filter(None, options))

    @property
    def chunk(self) -> int:
        """Keys per chunk."""
        return 256 if self.block_size == 128 else 128

    @property
    def tolerances(self) -> tuple[dict[str, float], dict[str, float]]:
        """Of outputs and of log-sum-exp."""
        if self.kernel == "prefill" and self.dtype == "bfloat16":
            return SCALED_QUERIES, SCALED_QUERIES
        return TOLERANCES[self.dtype], TOLERANCES["float32"]

    @property
    def case(self) -> Case:
        """Shapes and lengths. Packed tokens of rows lie in the same tiles, in front of a row of
        more than a tile; the long row's last tokens lie on both sides of a chunk's edge."""
        size, long = self.block_size, (self.chunk * (2 if self.block_size == 128 else 3)) + 5
        return Case(
            name=str(self),
            block_size=size,
            num_heads=self.group * self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            context_lens=(0, 1, size - 1, size, size + 1, 0, long, 21),
            query_lens=(0, 1, 3, 2, 5, 0, 9, 19),
            table_width=-(-long // size),
            dtype=self.dtype,
            kv_dtype=None if self.kv_dtype == "same" else self.kv_dtype,
            layout="packed" if self.head_dim < 80 else "split",
            is_for_tpu=True,
            sliding_window={"all": None, "small": WINDOW, "long": self.chunk + 30}[self.window],
            soft_cap=3.0 if self.has_cap else None,
            has_sinks=self.has_sinks,
        )


def may_meet(left: Value, right: Value) -> bool:
    """Scales of blocks below 128 do not fill a register; some options are decode's."""
    values = dict((left, right))
    is_8_bit = values.get("kv_dtype", "same") != "same"
    if is_8_bit and values.get("block_size", 128) != 128:
        return False
    is_decode = values.get("num_buffers", 2) != 2 or values.get("edge", "whole") != "whole"
    return not (is_decode and values.get("kernel") == "prefill")


def attend(
    entry: Entry, q: jax.Array, kv: jax.Array, *operands: Any, **options: Any
) -> tuple[jax.Array, jax.Array | None]:
    """The kernel of an entry with its tiles and buffers, and with limits that make it use them."""
    options["interpret"] = dataclasses.replace(tpu_interpret_params(), dma_execution_mode=entry.dma)
    heads = 1 if entry.heads_at_once == "one" else kv.shape[2] // 2
    limit = tables.SMEM_TABLE_BYTES if entry.table == "smem" else 0
    # Half a chunk or less.
    part = 64 if entry.edge == "parts" else decode_kernel.PART_TOKENS
    with (
        mock.patch.object(tables, "SMEM_TABLE_BYTES", limit),
        mock.patch.object(decode_kernel, "PART_TOKENS", part),
    ):
        if entry.kernel == "decode":
            config = DecodeConfig(
                block_tokens=entry.chunk, heads_per_tile=heads, num_buffers=entry.num_buffers
            )
            return paged_decode(q, kv, *operands, config=config, **options)
        config = PrefillConfig(
            tile_tokens=16 if entry.group > 4 else 32,
            chunk_tokens=entry.chunk,
            heads_per_step=heads,
        )
        return paged_prefill(q, kv, *operands, config=config, **options)


TABLE = Table(Entry, FACTORS, may_meet, attend)
