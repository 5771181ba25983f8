"""Weights of mixtures of experts in MXFP4, as gpt-oss stores them.

A row is cut into groups of 32 values. A value is 4 bits, sign, two of exponent, one of mantissa,
and a group has a scale, which is a power of two:

    <name>_blocks u8[experts, rows, groups, 16]  two values a byte, the first in the low half
    <name>_scales u8[experts, rows, groups]      exponent + 127

Source: OCP Microscaling Formats (MX) specification 1.0, section 5.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from paged_jax.models.host_arrays import aligned_empty

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1)  # [256, 2] by byte
_SCALES = np.ldexp(np.float32(1), np.arange(-127, 128))
_SCALES = np.append(_SCALES, np.float32(np.nan))


def find(dtypes: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Names of the tensors that a checkpoint stores in this form, each with its two parts."""
    found = {}
    for blocks in (name for name in dtypes if name.endswith("_blocks")):
        name = blocks.removesuffix("_blocks")
        scales = f"{name}_scales"
        if dtypes[blocks] == "U8" and dtypes.get(scales) == "U8":
            found[name] = blocks, scales
    return found


def shape(name: str, blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Shape `[experts, in, out]` of a tensor, from those of its parts.

    Raises: ValueError that names the tensor if they do not fit together.
    """
    if len(blocks) != 4 or blocks[3] != 16 or blocks[:3] != scales:
        raise ValueError(f"MXFP4 tensor {name} has blocks {blocks} and scales {scales}")
    experts, rows, groups, _ = blocks
    return experts, 32 * groups, rows


def dequantize(blocks: np.ndarray, scales: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """Floats `[experts, in, out]`, bfloat16 unless told otherwise.

    That is exact up to its largest number and infinite beyond. In memory the result has the rows of
    the stored form, `[out, in]`.
    """
    experts, rows, groups, _ = blocks.shape
    values = aligned_empty((experts, rows, 32 * groups), dtype or np.dtype(jnp.bfloat16))
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(experts):  # float32 of one expert at a time
            pairs = _PAIRS[blocks[i]]
            pairs *= _SCALES[scales[i]][..., None, None]
            values[i] = pairs.reshape(rows, -1)
    return values.swapaxes(1, 2)
