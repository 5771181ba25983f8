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
    image = core.swap_out(kv, _padded(ids))
    return _slice(image, 0, len(ids))


def write_image(kv: KVCache, ids: Sequence[int], image: KVCache, first: int) -> KVCache:
    """Writes blocks of an image from `first` on into blocks of the pool, which is donated."""
    padded = _padded(ids)
    part = _slice(image, first, first + len(ids))
    extra = [(0, 0), (0, len(padded) - len(ids))]
    return _swap_in(kv, padded, _map(lambda x, axis: np.pad(x, _widths(x, axis, extra)), part))


def _padded(ids: Sequence[int]) -> np.ndarray:
    padded = np.zeros(1 << (len(ids) - 1).bit_length() if ids else 1, np.int32)
    padded[: len(ids)] = ids
    return padded


def _slice(image: KVCache, first: int, end: int) -> KVCache:
    return _map(lambda x, axis: x[first:end] if axis == 0 else x[:, first:end], image)


def _widths(x: np.ndarray, axis: int, extra: list[tuple[int, int]]) -> list[tuple[int, int]]:
    front = [extra[1]] if axis == 0 else extra
    return front + [(0, 0)] * (x.ndim - len(front))


def _map(fn, image: KVCache) -> KVCache:
    """Applies fn(array, axis of blocks) to the arrays of an image."""
    return dataclasses.replace(
        image,
        kv=fn(image.kv, 1),
        scales=fn(image.scales, 1) if image.is_quantized else image.scales,
        tags=None if image.tags is None else fn(image.tags, 0),
    )
