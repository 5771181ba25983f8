"""Weight files, mapped into memory and read by copying out what is wanted."""

import math
import mmap
from os import PathLike

import numpy as np

from paged_jax.models.host_arrays import aligned_empty


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

    def read(
        self, begin: int, shape: tuple[int, ...], stored: np.dtype, dtype: np.dtype | None = None
    ) -> np.ndarray:
        """The array stored from `begin` on, copied, and cast if a dtype is given."""
        end = begin + math.prod(shape) * stored.itemsize
        copied = aligned_empty(shape, dtype or stored)
        copied[...] = self.view(begin, end).view(stored).reshape(shape)
        return copied
