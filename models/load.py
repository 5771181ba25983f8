"""From a checkpoint to a model on the device."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, Sharding

from paged_jax.models.architecture import Names
from paged_jax.models.checkpoint import Checkpoint
from paged_jax.models.decoder import Decoder, fill
from paged_jax.models.host_arrays import to_device
from paged_jax.models.registry import architecture, read_spec
from paged_jax.models.shard import Placer
from paged_jax.models.spec import DecoderSpec
from paged_jax.models.weights import Source, sources

DTYPES = ("float32", "bfloat16", "float16")


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a `.gguf` file, or a directory of safetensors or of Orbax.

    Raises: ValueError that names the path and the reason.
    """
    if path.is_dir():
        from paged_jax.models.orbax import is_orbax, open_orbax

        if is_orbax(path):
            return open_orbax(path)
        from paged_jax.models.safetensors import open_directory

        return open_directory(path)
    if path.is_file():
        from paged_jax.models.gguf import open_gguf

        return open_gguf(path)
    raise ValueError(f"model {path} does not exist")


def load_model(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    *,
    max_model_len: int | None = None,
    sharding: Callable[[str, tuple[int, ...]], Sharding] | None = None,
    mesh: Mesh | None = None,
) -> Decoder:
    """Builds the model that a checkpoint describes and fills in its weights.

    Args:
      checkpoint: Where config and tensors come from.
      dtype: "auto" takes the config's dtype; on CPU float32, which is the fastest there.
      max_model_len: Longest sequence that will be served; None: the model's. Rotary frequencies
        for long contexts are chosen by it.
      sharding: Where a parameter goes, by its path ("blocks.0.attention.qkv.weight") and shape; it
        is never whole on a device that holds a part. None: all on the default device.
      mesh: Divides the model over its axis "tp", each part straight to its device; see `shard`.
    Raises: ValueError for an unknown architecture, dtype, or a missing, surplus or misshapen
      tensor, which it names.
    """
    if sharding is not None and mesh is not None:
        raise ValueError("sharding cannot be given together with mesh")
    names = architecture(checkpoint.config).names
    spec = dataclasses.replace(read_spec(checkpoint.config), context_length=max_model_len)
    wanted = resolve_dtype(dtype, checkpoint.config)
    by_parameter = sources(spec, names)
    stored = _stored_names(checkpoint, spec, names)
    _check_tensors(checkpoint.shapes(), stored, by_parameter)

    placer = None if mesh is None else Placer(spec, mesh)
    share = None if placer is None else placer.share

    def array(name: str, variable: Any) -> jax.Array:
        source = by_parameter[name]
        arrays = [checkpoint.read(stored[tensor.name], variable.dtype) for tensor in source.tensors]
        joined = source.join(arrays)
        if placer is not None:
            return placer.put(name, joined, variable.dtype)
        where = None if sharding is None else sharding(name, joined.shape)
        return to_device(joined, variable.dtype, where)

    return fill(lambda: Decoder(spec, share=share, dtype=wanted, rngs=nnx.Rngs(0)), array)


def resolve_dtype(dtype: str, config: dict[str, Any]) -> jnp.dtype:
    """Settles "auto"; raises ValueError for a dtype that models do not run in."""
    if dtype == "auto":
        named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        dtype = "float32" if jax.default_backend() == "cpu" else named
    if dtype not in DTYPES:
        raise ValueError(f"dtype ({dtype!r}) must be 'auto' or one of {', '.join(DTYPES)}")
    return jnp.dtype(dtype)


def _stored_names(checkpoint: Checkpoint, spec: DecoderSpec, names: Names) -> dict[str, str]:
    """Name in the checkpoint by Hugging Face's full name, without what the model does not need."""
    extra = checkpoint.config.get("num_nextn_predict_layers")
    extra = extra if isinstance(extra, int) else 0
    # Layers that guess further tokens come after those of the model.
    skipped = tuple(names.layer.format(spec.num_layers + i) + "." for i in range(extra))
    stored = {}
    for own in checkpoint.shapes():
        name = own
        if names.optional_prefix and not own.startswith((names.optional_prefix, names.head)):
            name = names.optional_prefix + own
        is_second_head = spec.is_tied and name == f"{names.head}.weight"
        if not is_second_head and not name.endswith(names.ignored) and not name.startswith(skipped):
            stored[name] = own
    return stored


def _check_tensors(
    shapes: dict[str, tuple[int, ...]], stored: dict[str, str], by_parameter: dict[str, Source]
) -> None:
    """Every tensor is there with its shape, and no other."""
    wanted = dict(tensor for source in by_parameter.values() for tensor in source.tensors)
    if missing := sorted(wanted.keys() - stored.keys()):
        raise ValueError(f"the checkpoint lacks tensor {missing[0]} ({len(missing)} missing)")
    if surplus := sorted(stored.keys() - wanted.keys()):
        raise ValueError(
            f"the checkpoint has tensor {surplus[0]}, which the model does not use "
            f"({len(surplus)} surplus)"
        )
    for name, shape in wanted.items():
        if shapes[stored[name]] != shape:
            raise ValueError(f"tensor {name} has shape {shapes[stored[name]]}, not {shape}")
