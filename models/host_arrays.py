"""Arrays on the host on their way to a device, without copies that are not needed."""

import math
import mmap
from typing import Any

import jax
import numpy as np

_ALIGNMENT = 64  # bytes; JAX on CPU takes over an array that starts there instead of copying it
_MAPPED_BYTES = 1 << 20


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that `to_device` need not copy.

    A large one is a mapping of its own: what `malloc` gives would come back to its heap when it is
    freed, and loading a model would leave there as much as the model takes.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= _MAPPED_BYTES:
        private = mmap.mmap(-1, num_bytes, access=mmap.ACCESS_COPY)
        memory = np.frombuffer(private, np.uint8)  # aligned to pages
    else:
        memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        memory = memory[begin : begin + num_bytes]
    return memory.view(dtype).reshape(shape)


def to_device(array: np.ndarray, dtype: Any, where: Any = None) -> jax.Array:
    """The array in another dtype on a device.

    On CPU it is the memory of `array` itself if nothing has to change: leave that alone afterwards.

    Args:
      where: A device or sharding; None: the default device.
    """
    wanted = np.dtype(dtype)
    is_ready = array.dtype == wanted and array.flags.c_contiguous
    if not is_ready or array.ctypes.data % _ALIGNMENT:
        placed = aligned_empty(array.shape, wanted)
        placed[...] = array
        array = placed
    return jax.device_put(array, where)
