"""Cases of GPU attention in Mosaic GPU: a few in which every two values of two options meet.

A case costs seconds, to compile and to run, so shapes are small: a stage has 64 keys, and the
longest row has more stages than the pipeline.
"""

from typing import Any, NamedTuple

import jax

from pallas_kernels.compat import mosaic_interpret_params
from pallas_kernels.gpu.config import MosaicDecodeConfig, MosaicPrefillConfig
from pallas_kernels.gpu.mosaic_decode import paged_decode
from pallas_kernels.gpu.mosaic_prefill import paged_prefill
from tests.cover import Value
from tests.kernels.cases import TOLERANCES, Case
from tests.kernels.conformance import WINDOW
from tests.kernels.table import Table

FACTORS = {
    "kernel": ("decode", "prefill"),
    "head_dim": (64, 128, 256),
    "group": (1, 3, 4, 16),
    "num_kv_heads": (1, 2),
    "block_size": (8, 16, 32, 64, 128),
    "dtype": ("bfloat16", "float16"),
    "kv_dtype": ("same", "int8", "float8_e4m3fn", "float8_e5m2"),
    # Padded: split with rows of whole registers of a TPU.
    "layout": ("split", "padded", "packed"),
    "window": ("all", "small", "long"),
    "has_cap": (False, True),
    "has_sinks": (False, True),
    "return_lse": (False, True),
    "block_k": (64, 128),
    "num_stages": (2, 3),
    # No row of decode is split; the long one is.
    "num_programs": (1, 4),
    "rows": ("all", "some"),
}


class Entry(NamedTuple):
    """A value of every factor."""

    kernel: str
    head_dim: int
    group: int
    num_kv_heads: int
    block_size: int
    dtype: str = "bfloat16"
    kv_dtype: str = "same"
    layout: str = "split"
    window: str = "all"
    has_cap: bool = False
    has_sinks: bool = False
    return_lse: bool = True
    block_k: int = 64
    num_stages: int = 2
    num_programs: int = 1
    rows: str = "all"

    def __str__(self) -> str:
        options = [
            self.kernel,
            f"d{self.head_dim}_g{self.group}_k{self.num_kv_heads}_p{self.block_size}",
            self.dtype if self.kv_dtype == "same" else f"{self.dtype}_{self.kv_dtype}",
            self.layout,
            {"all": "", "small": "window", "long": "long_window"}[self.window],
            "cap" if self.has_cap else "",
            "sinks" if self.has_sinks else "",
            "lse" if self.return_lse else "",
            f"keys{self.block_k}x{self.num_stages}",
            f"programs{self.num_programs}" if self.kernel == "decode" else "",
            self.rows,
        ]
        return "-".join(filter(None, options))

    @property
    def tolerances(self) -> tuple[dict[str, float], dict[str, float]]:
        """Of outputs and of log-sum-exp."""
        # Float16 beside an 8-bit pool: values are multiplied in bfloat16.
        is_rounded = self.dtype == "float16" and self.kv_dtype != "same"
        out = TOLERANCES["bfloat16" if is_rounded else self.dtype]
        return out, TOLERANCES["float32"]

    @property
    def case(self) -> Case:
        """Shapes and lengths; the long row has a few stages of 64 keys and part of one."""
        size, long = self.block_size, 3 * 64 + 5
        context_lens = (0, 1, size - 1, size, size + 1, long, 21)
        return Case(
            name=str(self),
            block_size=size,
            num_heads=self.group * self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            context_lens=context_lens,
            query_lens=tuple(map(min, context_lens, (0, 1, 3, 2, 5, 9, 19))),
            table_width=-(-long // size),
            dtype=self.dtype,
            kv_dtype=None if self.kv_dtype == "same" else self.kv_dtype,
            layout="packed" if self.layout == "packed" else "split",
            is_for_tpu=self.layout == "padded",
            sliding_window={"all": None, "small": WINDOW, "long": 70}[self.window],
            soft_cap=3.0 if self.has_cap else None,
            has_sinks=self.has_sinks,
        )


def may_meet(left: Value, right: Value) -> bool:
    """Heads of 64 are packed or padded; splits are decode's."""
    values = dict((left, right))
    if values.get("layout", "split") != "split" and values.get("head_dim", 64) != 64:
        return False
    return not (values.get("num_programs", 1) != 1 and values.get("kernel") == "prefill")


def attend(entry: Entry, *operands: Any, **options: Any) -> tuple[jax.Array, jax.Array | None]:
    """The kernel of an entry with its stages."""
    options["interpret"] = mosaic_interpret_params()
    stages = {"block_k": entry.block_k, "num_stages": entry.num_stages}
    if entry.kernel == "decode":
        config = MosaicDecodeConfig(num_programs=entry.num_programs, **stages)
        return paged_decode(*operands, config=config, **options)
    return paged_prefill(*operands, config=MosaicPrefillConfig(**stages), **options)


TABLE = Table(Entry, FACTORS, may_meet, attend)
