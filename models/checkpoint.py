"""What every checkpoint format offers to the loader: a config, tensors by name, a tokenizer.

Formats differ only here. A reader translates its own names and orientations to those of Hugging
Face's safetensors files, so an architecture file maps one set of names and nothing else.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paged_jax.models.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """A model on disk, read tensor by tensor."""

    config: dict[str, Any]
    """Hugging Face's `config.json` keys (`architectures`, `hidden_size`, ...)."""

    generation_config: dict[str, Any]
    """Hugging Face's `generation_config.json` keys; empty when there is none."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, `[out, in]` for matrices, by Hugging Face name."""
        ...

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """Reads one tensor of `shapes` into memory of its own.

        Args:
          dtype: What to cast it to while it is read, without a whole copy in between; None: the
            type it is stored in, and for quantised tensors float32, or bfloat16 if that is exact.
        Raises: ValueError that names the tensor if it is no floating-point one or is unreadable.
        """
        ...

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer stored with the model; None when there is none."""
        ...


def read_configs(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json` and `generation_config.json` of a directory; the second may be missing.

    Raises: ValueError that names the file.
    """
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} is not a model directory: it has no config.json")
    generation = directory / "generation_config.json"
    found = read_json(generation) if generation.exists() else {}
    return read_json(directory / "config.json"), found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError that names the file for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"cannot read {path}: it holds no JSON object")
    return value
