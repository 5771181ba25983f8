"""Hugging Face directories: config.json beside safetensors files, single or sharded.

Nothing else is opened: pickled weights can run code.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paged_jax.models import mxfp4
from paged_jax.models.checkpoint import read_configs, read_json
from paged_jax.models.host_arrays import aligned_empty
from paged_jax.models.tokenizer import Tokenizer, load_tokenizer

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_CHUNK_VALUES = 1 << 20
_FLOATS = ("F64", "F32", "F16", "BF16")


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
    name: str
    file: Any  # safetensors.safe_open
    dtype: str
    shape: tuple[int, ...]

    def read(self, dtype: np.dtype | None) -> np.ndarray:
        if self.dtype not in _FLOATS:
            raise ValueError(f"its dtype is {self.dtype}, not one of {', '.join(_FLOATS)}")
        if 0 in (self.shape or (0,)):
            values = self.file.get_tensor(self.name)
            return values if dtype is None else values.astype(dtype, copy=False)
        # Rows at a time: what the package returns is a copy already, which JAX would copy again.
        rows = self.file.get_slice(self.name)
        step = max(1, _CHUNK_VALUES // math.prod(self.shape[1:]))
        values = aligned_empty(self.shape, dtype or rows[:1].dtype)
        for begin in range(0, len(values), step):
            end = min(begin + step, len(values))
            values[begin:end] = rows[begin:end]
        return values

    def view(self) -> np.ndarray:
        """The bytes of a U8 tensor."""
        return self.file.get_tensor(self.name)


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
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "reading safetensors needs an extra: pip install 'paged-jax[llm]'"
        ) from error
    try:
        _check_place(path)
        file = safe_open(path, framework="numpy")
        found = {}
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            part = file.get_slice(name)
            found[name] = _Tensor(path, name, file, part.get_dtype(), tuple(part.get_shape()))
        return found
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot read safetensors file {path}: {reason}") from error
    except (SafetensorError, ValueError, RuntimeError) as error:  # links in a circle too
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
