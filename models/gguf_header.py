"""The header of a GGUF file: metadata, and where each tensor lies.

The `gguf` package's own reader wraps every string in a memory-map object, which takes five seconds
for the hundred thousand strings of a small vocabulary, and the header is simple enough to be read
in a tenth of one:

    magic u32 | version u32 | number of tensors u64 | number of pairs u64
    pair:    key string | type u32 | value        (an array: type u32 | length u64 | items)
    tensor:  name string | number of dims u32 | dims u64 ... | type u32 | offset u64
    padding up to `general.alignment`; offsets count from there

A file may come from anywhere: no number of it is trusted to be one of bytes that are there.

Source: the GGUF specification, docs/gguf.md of ggml-org/ggml.
"""

import itertools
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from paged_jax.models.mapped import MappedFile

_STRING, _ARRAY = 8, 9
_DTYPES = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_MAX_ITEMS = 1 << 24  # of all arrays together; vocabulary and merges have less than a million
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 16


class Tensor(NamedTuple):
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]
    """Row-major, so `[out, in]`: GGUF writes the fastest axis first."""
    kind: Any
    """A `gguf.GGMLQuantizationType`."""
    begin: int
    num_bytes: int


class Header(NamedTuple):
    """What a file says of itself."""

    metadata: dict[str, Any]
    """Numbers, strings, booleans and lists of them."""
    tensors: dict[str, Tensor]


def read_header(file: MappedFile) -> Header:
    """Reads the header of a file.

    Raises: ValueError if it is malformed or the file is shorter than it says; ImportError if the
      `gguf` package is missing.
    """
    cursor = _Cursor(file.view(0, file.num_bytes).data)
    if bytes(cursor.take(4)) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not supported (supported: 2, 3, little-endian)")
    num_tensors = cursor.count(_MIN_TENSOR_BYTES)
    num_pairs = cursor.count(_MIN_PAIR_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"metadata key {key} is there twice")
        metadata[key] = cursor.value()
    entries = [_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
        raise ValueError(f"general.alignment ({alignment}) must be in 1..{_MAX_ALIGNMENT}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"tensor {name} is there twice")
        tensors[name] = _located(name, shape, kind, start + offset, file.num_bytes)
    _check_apart(tensors)
    return Header(metadata, tensors)


class _Cursor:
    """Reads values one after the other, never past the end."""

    def __init__(self, data: memoryview) -> None:
        self._data, self.position = data, 0
        self._num_items = 0

    def take(self, num_bytes: int) -> memoryview:
        begin, self.position = self.position, self.position + num_bytes
        if self.position > len(self._data):
            raise ValueError("it is truncated")
        return self._data[begin : self.position]

    def number(self, form: str) -> int:
        return struct.unpack("<" + form, self.take(struct.calcsize(form)))[0]

    def count(self, least_bytes: int) -> int:
        """A number of things that take at least so many bytes each."""
        count, left = self.number("Q"), len(self._data) - self.position
        if count * least_bytes > left:
            raise ValueError(f"it is truncated: {count} entries cannot be in {left} bytes")
        return count

    def text(self) -> str:
        return self._texts(1)[0]

    def value(self) -> Any:
        kind = self.number("I")
        if kind != _ARRAY:
            return self._items(kind, 1)[0]
        item_kind = self.number("I")
        count = self.count(1)
        self._num_items += count
        if self._num_items > _MAX_ITEMS:
            raise ValueError(f"its arrays have more than {_MAX_ITEMS} items")
        return self._items(item_kind, count)

    def _items(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._texts(count)
        if kind == _ARRAY:
            raise ValueError("metadata with arrays of arrays is not supported")
        if kind >= len(_DTYPES):
            raise ValueError(f"metadata type {kind} is unknown")
        dtype = np.dtype(_DTYPES[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype, count).tolist()

    def _texts(self, count: int) -> list[str]:
        # One loop without calls: vocabularies have hundreds of thousands.
        data, position, end = self._data, self.position, len(self._data)
        texts = []
        for _ in range(count):
            begin = position + 8
            position = begin + int.from_bytes(data[position:begin], "little")
            if position > end:
                raise ValueError("it is truncated")
            texts.append(str(data[begin:position], "utf-8"))
        self.position = position
        return texts


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of a tensor."""
    name, num_dims = cursor.text(), cursor.number("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"tensor {name} has {num_dims} dims, not 1..{_MAX_DIMS}")
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
    return name, dims[::-1], cursor.number("I"), cursor.number("Q")


def _located(
    name: str, shape: tuple[int, ...], raw_kind: int, begin: int, file_bytes: int
) -> Tensor:
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ImportError(
            "reading GGUF files needs the gguf package: pip install 'paged-jax[llm]'"
        ) from error
    try:
        kind = GGMLQuantizationType(raw_kind)
    except ValueError as error:
        raise ValueError(f"tensor {name} has unknown type {raw_kind}") from error
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if not all(shape) or shape[-1] % block_size:
        raise ValueError(f"tensor {name} has shape {shape}, not rows of {block_size}")
    num_bytes = math.prod(shape) // block_size * block_bytes
    if begin + num_bytes > file_bytes:
        raise ValueError(f"it is truncated within tensor {name}")
    return Tensor(shape, kind, begin, num_bytes)


def _check_apart(tensors: Mapping[str, Tensor]) -> None:
    """Without this a few bytes could pose as any number of tensors."""
    spans = sorted((t.begin, t.begin + t.num_bytes, name) for name, t in tensors.items())
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(f"tensors {name} and {other} overlap")
