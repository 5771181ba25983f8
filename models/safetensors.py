"""Hugging Face directories: config.json beside safetensors files, single or sharded."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from paged_jax.models.tokenizer import Tokenizer, load_tokenizer


class SafetensorsCheckpoint:
    """A `Checkpoint` over a directory; tensors are read from memory-mapped files one by one."""

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError(
                "reading safetensors needs an extra: pip install 'paged-jax[llm]'"
            ) from error
        self._path = path
        self.config = _read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = _read_json(generation) if generation.exists() else {}
        files = _weight_files(path)
        self._open: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                # Its numpy flavour reads bfloat16 as ml_dtypes' type, which jax has registered.
                handle = safe_open(str(file), framework="numpy")
                for name in handle.keys():  # noqa: SIM118 - not a mapping
                    self._open[name] = handle
                    self._shapes[name] = tuple(handle.get_slice(name).get_shape())
            except (SafetensorError, OSError) as error:
                raise ValueError(f"cannot read safetensors file {file}: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Checkpoint.shapes`."""
        return dict(self._shapes)

    def read(self, name: str) -> np.ndarray:
        """See `Checkpoint.read`."""
        return self._open[name].get_tensor(name)

    def tokenizer(self) -> Tokenizer | None:
        """See `Checkpoint.tokenizer`."""
        return load_tokenizer(self._path)


def open_directory(path: Path) -> SafetensorsCheckpoint:
    """Opens a model directory.

    Raises: ValueError when config.json, the weights or a shard named in the index is missing or
      unreadable; the message names the file.
    """
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is not a model directory: it has no config.json")
    return SafetensorsCheckpoint(path)


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"cannot read {index}: weight_map must be an object")
        names = sorted(set(weight_map.values()))
        files = [path / name for name in names]
        for file in files:
            if not file.is_file():
                raise ValueError(f"{index} names {file.name}, which is missing")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has no *.safetensors file")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"cannot read {path}: it holds no JSON object")
    return value
