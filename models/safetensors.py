"""Hugging Face directories: config.json beside safetensors files, single or sharded.

The files are read here and not by the package of their name, whose NumPy flavour copies a tensor
into a `bytes` object that JAX must copy again:

    length of the header u64 | header, a JSON object | data
    header: name -> {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, from the data

Nothing else is opened: pickled weights can run code.
"""

import itertools
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

from paged_jax.models import mxfp4
from paged_jax.models.checkpoint import read_configs, read_json
from paged_jax.models.mapped import MappedFile
from paged_jax.models.tokenizer import Tokenizer, load_tokenizer

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
# Those that a checkpoint may hold beside weights; only their sizes matter.
_OTHER_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64},
    **{"U64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
}
_BITS = {name: 8 * dtype.itemsize for name, dtype in _FLOATS.items()} | _OTHER_BITS
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_MAX_DIMS = 32


def open_directory(path: Path) -> "SafetensorsCheckpoint":
    """Opens a model directory.

    Raises: ValueError when config.json, the weights or a shard named in the index is missing or
      unreadable; the message names the file.
    """
    config, generation_config = read_configs(path)
    return SafetensorsCheckpoint(path, config, generation_config)


class SafetensorsCheckpoint:
    """A `Checkpoint` over a directory; tensors are read from memory-mapped files one by one."""

    def __init__(
        self, path: Path, config: dict[str, Any], generation_config: dict[str, Any]
    ) -> None:
        self._path = path
        self.config, self.generation_config = _unquantised(config, path), generation_config
        self._tensors = _tensors(path)
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._quantised = mxfp4.find({name: t.dtype for name, t in self._tensors.items()})
        for name, parts in self._quantised.items():
            blocks, scales = (self._shapes.pop(part) for part in parts)
            self._shapes[name] = mxfp4.shape(name, blocks, scales)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Checkpoint.shapes`."""
        return dict(self._shapes)

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """See `Checkpoint.read`."""
        try:
            if name in self._quantised:
                blocks, scales = (self._tensors[part].view() for part in self._quantised[name])
                return mxfp4.dequantize(blocks, scales, dtype)
            return self._tensors[name].read(dtype)
        except ValueError as error:
            raise ValueError(f"cannot read tensor {name} of {self._path}: {error}") from error

    def tokenizer(self) -> Tokenizer | None:
        """See `Checkpoint.tokenizer`."""
        return load_tokenizer(self._path)


@dataclass(frozen=True)
class _Tensor:
    path: Path
    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    begin: int  # in the file

    def read(self, dtype: np.dtype | None) -> np.ndarray:
        if self.dtype not in _FLOATS:
            raise ValueError(f"its dtype is {self.dtype}, not one of {', '.join(_FLOATS)}")
        return self.file.read(self.begin, self.shape, _FLOATS[self.dtype], dtype)

    def view(self) -> np.ndarray:
        """The bytes of a U8 tensor."""
        flat = self.file.view(self.begin, self.begin + math.prod(self.shape))
        return flat.reshape(self.shape)


def _unquantised(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config of the tensors that `read` returns: of what it dequantises, none is left."""
    quantisation = config.get("quantization_config")
    if not quantisation:
        return config
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
    if method != "mxfp4":
        raise ValueError(f"{path} is quantised with {method!r}; supported: 'mxfp4'")
    return {key: value for key, value in config.items() if key != "quantization_config"}


def _tensors(path: Path) -> dict[str, _Tensor]:
    index = path / INDEX
    if not index.exists():
        return _merge(_single_files(path))
    weight_map = _read_weight_map(index)
    tensors: dict[str, _Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if not os.path.isfile(path / name):  # False too where a name is not possible
            raise ValueError(f"{index} names {name}, which is missing")
        found = _read_header(path / name)
        # A tensor that another file is to give counts as not being here.
        tensors |= {t: found[t] for t in found if weight_map.get(t, name) == name}
    if absent := [name for name in weight_map if name not in tensors]:
        raise ValueError(f"{path / weight_map[absent[0]]} lacks tensor {absent[0]}, see {index}")
    return tensors


def _single_files(path: Path) -> list[Path]:
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    if files := sorted(path.glob("*.safetensors")):
        return files
    if pickles := sorted(file.name for pattern in _PICKLES for file in path.glob(pattern)):
        raise ValueError(
            f"{path} has pickled weights ({pickles[0]}) and no *.safetensors file; pickles can run "
            "code and are not opened: save the model as safetensors"
        )
    raise ValueError(f"{path} has no *.safetensors file")


def _merge(files: Iterable[Path]) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    for file in files:
        found = _read_header(file)
        if twice := found.keys() & tensors.keys():
            name = min(twice)
            raise ValueError(f"{tensors[name].path} and {file} both have tensor {name}")
        tensors |= found
    return tensors


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"cannot read {index}: weight_map must be an object")
    for tensor, name in weight_map.items():
        # One path component: nothing outside the directory can be named.
        if not isinstance(name, str) or any(c in name for c in "/\\:\0"):
            raise ValueError(f"{index} names {name!r} for {tensor}, not a file beside it")
        if not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name!r} for {tensor}, which is not safetensors")
    return weight_map


def _read_header(path: Path) -> dict[str, _Tensor]:
    """Every tensor of a file.

    Raises: ValueError that names the file if its header is malformed or it is too short.
    """
    try:
        _check_place(path)
        file = MappedFile(path)
        return _parse(path, file)
    except OSError as error:
        raise ValueError(f"cannot read safetensors file {path}: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:  # deep nesting, links in a circle
        raise ValueError(f"cannot read safetensors file {path}: {error}") from error


def _check_place(path: Path) -> None:
    """Links may leave the directory only to where Hugging Face's cache keeps its files.

    <model>/snapshots/<revision>/model.safetensors -> <model>/blobs/<hash>
    """
    directory, target = path.parent.resolve(), path.resolve()
    allowed = [directory]
    if directory.parent.name == "snapshots":
        allowed.append(directory.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise ValueError(f"it is a link to {target}, outside of its directory")


def _parse(path: Path, file: MappedFile) -> dict[str, _Tensor]:
    if file.num_bytes < 8:
        raise ValueError("it is truncated")
    length = int.from_bytes(file.view(0, 8).tobytes(), "little")
    start = 8 + length
    if length > _MAX_HEADER_BYTES or start > file.num_bytes:
        raise ValueError(f"its header of {length} bytes does not fit")
    text = file.view(8, start).tobytes().decode("utf-8")
    header = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    header.pop("__metadata__", None)
    tensors: dict[str, _Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, begin, end = _checked(name, entry)
        if start + end > file.num_bytes:
            raise ValueError(f"it is truncated within tensor {name}")
        tensors[name] = _Tensor(path, file, dtype, shape, start + begin)
        spans.append((begin, end, name))
    spans.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(f"tensors {name} and {other} overlap")
    return tensors


def _checked(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape and span of one entry of a header."""
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of tensor {name} is not an object")
    dtype, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"tensor {name} has unknown dtype {dtype!r}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise ValueError(f"tensor {name} has a malformed shape")
    if not _are_counts(span) or len(span) != 2:
        raise ValueError(f"tensor {name} has malformed offsets")
    begin, end = span
    if 8 * (end - begin) != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"tensor {name} of {dtype} {shape} cannot have {end - begin} bytes")
    return dtype, tuple(shape), begin, end


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header has a key twice")
    return found
