"""Bytes on one device, by arithmetic: of a block, of what is beside the pool, and what is left."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from paged_jax import core
from paged_jax.core import CacheSpec, kv_shape, scales_shape
from paged_jax.decode import create_row_state
from paged_jax.engine import logit_options
from paged_jax.shapes import ceil_div

_FLOAT = 4
_STEP_FLOOR = 64 * 2**20
"""Of any step: buffers of kernels and collectives, arrays that XLA keeps in another layout."""
_LOGIT_COPIES = 3
"""Of [rows, V] in float32 that live at once: logits, what is left of them, what a draw sums."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What the temporary arrays of a step depend on."""

    vocab_size: int
    """Of one device."""
    num_features: int
    """Numbers per token that are alive at once in a layer."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The memory of a device: `utilization` of `limit` is used."""

    limit: int
    utilization: float
    in_use: int
    """Weights, and what others hold."""
    step: int = 0
    """Temporary arrays of the largest step."""
    states: int = 0
    """Block tables, states and options of rows."""

    @property
    def available(self) -> int:
        """For the pool, the null block included; may be below zero."""
        return int(self.utilization * self.limit) - self.in_use - self.step - self.states

    def arithmetic(self) -> str:
        """How `available` comes about, in a line."""
        return (
            f"{self.utilization:g} of {size(self.limit)}, less {size(self.in_use)} in use, "
            f"{size(self.step)} for a step and {size(self.states)} of states, leaves "
            f"{size(max(0, self.available))} for the KV pool"
        )


def block_bytes(
    spec: CacheSpec, block_size: int, kv_dtype: Any, platform: str | None = None
) -> int:
    """Bytes of one block over all layers, with scales and the padding of a platform.

    Args:
      platform: "cpu", "gpu" or "tpu"; None: where JAX runs.
    """
    shape = kv_shape(spec, 1, block_size, platform=platform)
    scales = scales_shape(spec, 1, block_size, kv_dtype, platform)
    # Both are of two blocks, the null block and one more.
    return (math.prod(shape) * np.dtype(kv_dtype).itemsize + math.prod(scales) * _FLOAT) // 2


def state_bytes(
    max_num_seqs: int, max_model_len: int, block_size: int, num_blocks: int, vocab_size: int
) -> int:
    """Bytes of `BlockState`, `RowState` and the options of rows, which every device has whole."""
    blocks = ceil_div(max_model_len, block_size)
    made = jax.eval_shape(
        lambda: (
            core.create_block_state(num_blocks, block_size, max_num_seqs, blocks),
            create_row_state(max_num_seqs),
            logit_options.create(max_num_seqs, max_model_len, vocab_size),
        )
    )
    return nbytes(made)


def step_bytes(shape: StepShape, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Bytes kept for the temporary arrays of a step: an estimate from above.

    It is above what TPU compilers were seen to take, see docs/parallelism.md, but for tpu7x, where
    the compiler makes copies of weights.
    """
    logits = _LOGIT_COPIES * max_num_seqs * shape.vocab_size
    return _STEP_FLOOR + _FLOAT * (logits + max_num_batched_tokens * shape.num_features)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes of arrays."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def size(count: float) -> str:
    """Bytes as people read them."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, int(count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.4g} {units[power]}"
