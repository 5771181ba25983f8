"""Weight files, mapped into memory and read by copying out what is wanted."""

import math
import mmap
from os import PathLike

import numpy as np

_ALIGNMENT = 64  # bytes; JAX on CPU can take over an array that starts there instead of copying it


class MappedFile:
    """The bytes of a file.

    Views of them are for reading at once. What is kept must be copied: a view shows later changes
    of the file, and touching it after the file became shorter kills the process.

    Raises: OSError if the file cannot be opened, ValueError if it is empty.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.num_bytes = len(self._map)

    def view(self, begin: int, end: int) -> np.ndarray:
        """u8[end - begin] of the file, within its bounds; ValueError if it shrank meanwhile."""
        if self._map.size() < self.num_bytes:
            raise ValueError("the file was cut after it was opened")
        return np.frombuffer(self._map, np.uint8, end - begin, begin)

    def copy(self, begin: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The array stored from `begin` on, in memory of its own."""
        copied = aligned_empty(shape, dtype)
        flat = copied.reshape(-1).view(np.uint8)
        flat[:] = self.view(begin, begin + flat.nbytes)
        return copied


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that `jax.device_put` on CPU need not copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)
