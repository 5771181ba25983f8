"""Sets of tokens as bits of 32-bit words, as the host makes them and the device reads them."""

import numpy as np

from paged_jax.shapes import ceil_div

WORD_BITS = 32
"""Tokens per word of a mask; token t is bit t % 32 of word t // 32."""


def pack_mask(is_set: np.ndarray) -> np.ndarray:
    """u32[W] of bool[V], on the host."""
    padded = np.zeros(ceil_div(len(is_set), WORD_BITS) * WORD_BITS, bool)
    padded[: len(is_set)] = is_set
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)
