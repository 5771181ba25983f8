"""From a checkpoint to a model on the device."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.models.checkpoint import Checkpoint
from paged_jax.models.decoder import Decoder
from paged_jax.models.registry import architecture, read_spec

DTYPES = ("float32", "bfloat16", "float16")


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a `.gguf` file or a safetensors directory.

    Raises: ValueError that names the path and the reason.
    """
    if path.is_dir():
        from paged_jax.models.safetensors import open_directory

        return open_directory(path)
    if path.is_file():
        from paged_jax.models.gguf import open_gguf

        return open_gguf(path)
    raise ValueError(f"model {path} does not exist")


def load_model(checkpoint: Checkpoint, dtype: str = "auto") -> Decoder:
    """Builds the model that a checkpoint describes and fills in its weights.

    Args:
      checkpoint: Where config and tensors come from.
      dtype: "auto" takes the config's dtype; on CPU float32, which is the fastest there.
    Raises: ValueError for an unknown architecture, dtype, or a missing, surplus or misshapen
      tensor, which it names.
    """
    arch = architecture(checkpoint.config)
    spec = read_spec(checkpoint.config)
    wanted = resolve_dtype(dtype, checkpoint.config)
    shapes = checkpoint.shapes()
    names = arch.weight_names(spec)

    used = {tensor for parts in names.values() for tensor in parts}
    missing = sorted(used - shapes.keys())
    if missing:
        raise ValueError(f"the checkpoint lacks tensor {missing[0]} ({len(missing)} missing)")
    surplus = sorted(n for n in shapes.keys() - used if not arch.is_ignored(n, spec))
    if surplus:
        raise ValueError(
            f"the checkpoint has tensor {surplus[0]}, which the model does not use "
            f"({len(surplus)} surplus)"
        )

    abstract = nnx.eval_shape(lambda: Decoder(spec, dtype=wanted, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    flat = nnx.to_flat_state(state)
    filled = []
    for path, variable in flat:
        parts = names[".".join(map(str, path))]
        filled.append((path, variable.replace(_stack(checkpoint, shapes, parts, variable))))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def resolve_dtype(dtype: str, config: dict[str, Any]) -> jnp.dtype:
    """Settles "auto"; raises ValueError for a dtype that models do not run in."""
    if dtype == "auto":
        named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        dtype = "float32" if jax.default_backend() == "cpu" else named
    if dtype not in DTYPES:
        raise ValueError(f"dtype ({dtype!r}) must be 'auto' or one of {', '.join(DTYPES)}")
    return jnp.dtype(dtype)


def _stack(
    checkpoint: Checkpoint,
    shapes: dict[str, tuple[int, ...]],
    parts: tuple[str, ...],
    variable: Any,
) -> jax.Array:
    """Reads the tensors of one parameter and stacks their rows."""
    expected = variable.shape
    rows = sum(shapes[part][0] for part in parts)
    for part in parts:
        if shapes[part][1:] != expected[1:] or rows != expected[0]:
            raise ValueError(
                f"tensor {part} has shape {shapes[part]}; "
                f"{' + '.join(parts)} must stack to {tuple(expected)}"
            )
    arrays = [np.asarray(checkpoint.read(part)) for part in parts]
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return jnp.asarray(joined.astype(variable.dtype))
