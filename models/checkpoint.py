"""What every checkpoint format offers to the loader: a config, tensors by name, a tokenizer.

Formats differ only here. A reader translates its own names and orientations to those of Hugging
Face's safetensors files, so an architecture file maps one set of names and nothing else.
"""

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

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor; quantised formats are dequantised to float32."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer stored with the model; None when there is none."""
        ...
