"""GGUF files as checkpoints: metadata becomes a Hugging Face config, tensors take its names."""

from os import PathLike

import jax.numpy as jnp
import numpy as np

from paged_jax.models.checkpoint import Checkpoint
from paged_jax.models.gguf_config import config_of, generation_config_of
from paged_jax.models.gguf_header import Header, Tensor, read_header
from paged_jax.models.gguf_names import IN_CONFIG, NAMES
from paged_jax.models.host_arrays import aligned_empty
from paged_jax.models.mapped import MappedFile
from paged_jax.models.tokenizer import Tokenizer, tokenizer_from_gguf

_FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
_MAX_TABLE_VALUES = 1 << 16
_CHUNK_VALUES = 1 << 16  # dequantised at a time, so that temporaries stay in a cache


def open_gguf(path: str | PathLike[str]) -> Checkpoint:
    """Opens a GGUF file: parses its header and maps its tensor data, which `read` loads on demand.

    A file with precomputed RoPE frequency divisors (tensor `rope_freqs.weight`, as Llama 3.1 has)
    gives `config["rope_freq_factors"]`, one divisor of the inverse frequency per rotated pair.

    Raises: ValueError if the file is unreadable or its architecture unsupported; ImportError if
      the `gguf` package is missing.
    """
    try:
        file = MappedFile(path)
        header = read_header(file)
    except OSError as error:
        raise ValueError(f"cannot read GGUF file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"cannot read GGUF file {path}: {error}") from error
    try:
        return _GGUFCheckpoint(file, header)
    except ValueError as error:
        raise ValueError(f"cannot load GGUF file {path}: {error}") from error


class _GGUFCheckpoint:
    """Implements `Checkpoint`."""

    def __init__(self, file: MappedFile, header: Header) -> None:
        architecture = header.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in NAMES:
            raise ValueError(
                f"architecture {architecture!r} is not supported (supported: {', '.join(NAMES)})"
            )
        names = NAMES[architecture]
        self._file, self._metadata = file, header.metadata
        tables = {
            name: _read_table(file, name, header.tensors[name])
            for name in IN_CONFIG
            if name in header.tensors
        }
        self.config = config_of(architecture, header, tables)
        self.generation_config = generation_config_of(header.metadata)
        self._tensors: dict[str, Tensor] = {}
        self._num_interleaved_heads: dict[str, int] = {}
        self._raised: set[str] = set()
        for name, tensor in header.tensors.items():
            if name in tables:
                continue
            hf_name, module = names.translate(name)
            if hf_name in self._tensors:
                raise ValueError(f"two tensors are {hf_name}")
            self._tensors[hf_name] = tensor
            if module in names.interleaved:
                self._num_interleaved_heads[hf_name] = self.config[names.interleaved[module]]
            if names.is_norm_raised and module.endswith("norm"):
                self._raised.add(hf_name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        try:
            if name in self._raised:
                values = _read(self._file, self._tensors[name], np.dtype(np.float32)) - 1
                return values.astype(dtype or np.float32, copy=False)
            values = _read(self._file, self._tensors[name], dtype)
            if name in self._num_interleaved_heads:
                return _split_halves(values, self._num_interleaved_heads[name])
        except ValueError as error:
            raise ValueError(f"cannot read tensor {name}: {error}") from error
        return values

    def tokenizer(self) -> Tokenizer | None:
        if self._metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
            return None
        return tokenizer_from_gguf(self._metadata)


def _read_table(file: MappedFile, name: str, tensor: Tensor) -> list[float]:
    if tensor.shape != (tensor.shape[0],) or tensor.shape[0] > _MAX_TABLE_VALUES:
        raise ValueError(f"tensor {name} has shape {tensor.shape}, not one value for each pair")
    return _read(file, tensor, np.dtype(np.float32)).tolist()


def _read(file: MappedFile, tensor: Tensor, dtype: np.dtype | None) -> np.ndarray:
    kind = tensor.kind
    if kind.name in _FLOATS:
        return file.read(tensor.begin, tensor.shape, _FLOATS[kind.name], dtype)
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    values = aligned_empty(tensor.shape, dtype or np.dtype(np.float32))
    # A row is a whole number of blocks, so rows do not matter.
    blocks = file.view(tensor.begin, tensor.begin + tensor.num_bytes).reshape(-1, block_bytes)
    flat = values.reshape(-1, block_size)
    step = max(1, _CHUNK_VALUES // block_size)
    for begin in range(0, len(blocks), step):
        part = blocks[begin : begin + step]
        try:
            # Scales of a damaged file may be anything.
            with np.errstate(all="ignore"):
                dequantised = dequantize(part.reshape(1, -1), kind)
        except NotImplementedError as error:
            raise ValueError(f"tensor type {kind.name} is not supported") from error
        flat[begin : begin + step] = dequantised.reshape(len(part), block_size)
    return values


def _split_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Puts the rows of each head back in Hugging Face's order.

    Rotated pairs are rows (i, i + D/2) of a head there; the converter to GGUF makes them
    neighbours: 0, D/2, 1, D/2 + 1, ...
    """
    if len(values) % (2 * num_heads):
        raise ValueError(f"its {len(values)} rows are not {num_heads} heads of even size")
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
