"""Blocks to the host and back, in few sizes so that little is compiled."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from paged_jax import core
from paged_jax.core import KVCache

_swap_in = jax.jit(core.swap_in, donate_argnums=0)


def read_image(kv: KVCache, ids: Sequence[int]) -> KVCache:
    """A host image of blocks, as numpy arrays `[L, B, R, P, C]`; waits for the device."""
    return _slice(core.swap_out(kv, _padded(ids)), 0, len(ids))


def write_image(kv: KVCache, ids: Sequence[int], image: KVCache, first: int) -> KVCache:
    """Writes blocks of an image from `first` on into blocks of the pool, which is donated."""
    padded = _padded(ids)

    def pad(x: np.ndarray, axis: int) -> np.ndarray:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, len(padded) - len(ids))
        return np.pad(x, widths)

    return _swap_in(kv, padded, _map(pad, _slice(image, first, first + len(ids))))


def warm_up(kv: KVCache, most: int) -> KVCache:
    """Compiles every size, up to images of `most` blocks, on the null block alone."""
    for n in range(3, len(_padded([0] * most)).bit_length()):
        ids = [0] * 2**n
        kv = write_image(kv, ids, read_image(kv, ids), 0)
    return kv


def _padded(ids: Sequence[int]) -> np.ndarray:
    """Zero-padded to a power of two, so that few sizes are compiled."""
    padded = np.zeros(1 << max(3, (len(ids) - 1).bit_length()), np.int32)
    padded[: len(ids)] = ids
    return padded


def _slice(image: KVCache, first: int, end: int) -> KVCache:
    return _map(lambda x, axis: x[first:end] if axis == 0 else x[:, first:end], image)


def _map(fn, image: KVCache) -> KVCache:
    """Applies fn(array, axis of blocks) to the arrays of an image."""
    return dataclasses.replace(
        image,
        kv=fn(image.kv, 1),
        scales=fn(image.scales, 1) if image.is_quantized else image.scales,
        tags=None if image.tags is None else fn(image.tags, 0),
    )
