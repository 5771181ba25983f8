"""Parameters by name: what a model has, and whether others can take their place."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from paged_jax.models.shard import Placer


def leaf_specs(params: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of every leaf of a model's state, by its name, in its order."""
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in _named(params).items()
    }


def fit(
    params: Any, specs: dict[str, jax.ShapeDtypeStruct], placer: Placer | None = None
) -> tuple[jax.Array, ...]:
    """Arrays in the order of `specs`, checked so that a compiled step takes them as they are.

    Args:
      params: A module, an `nnx.State`, a nested mapping, or a flat one whose keys are names such as
        "blocks.0.mlp.down.weight" or tuples of their parts. JAX arrays are taken without a copy and
        must not be donated afterwards; numpy arrays are copied.
      specs: From `leaf_specs`.
      placer: Of a divided model: leaves may also be those of the whole model, on any devices.
    Raises: ValueError that names the leaf that is missing, too many, or of another shape, dtype or
      sharding.
    """
    given = _named(params)
    for name in specs:
        if name not in given:
            raise ValueError(f"params must have the leaf {name}")
    for name, leaf in given.items():
        if name not in specs:
            raise ValueError(f"params has the leaf {name}, which the model does not have")
        spec = specs[name]
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(f"leaf {name} must be an array, not {type(leaf).__name__}")
        if leaf.dtype == spec.dtype and _is_whole(name, leaf, spec, placer):
            continue
        if tuple(leaf.shape) != spec.shape:
            raise ValueError(
                f"leaf {name} has shape {tuple(leaf.shape)} and must have {spec.shape}"
            )
        if leaf.dtype != spec.dtype:
            raise ValueError(f"leaf {name} has dtype {leaf.dtype} and must have {spec.dtype}")
        # An array that nobody has placed goes where it is needed.
        is_placed = isinstance(leaf, jax.Array) and leaf.committed
        if is_placed and not leaf.sharding.is_equivalent_to(spec.sharding, leaf.ndim):
            raise ValueError(
                f"leaf {name} has sharding {leaf.sharding} and must have {spec.sharding}"
            )
    return tuple(_fitted(name, given[name], spec, placer) for name, spec in specs.items())


def _is_whole(name: str, leaf: Any, spec: jax.ShapeDtypeStruct, placer: Placer | None) -> bool:
    """Whether a leaf is still to be divided."""
    if placer is None or tuple(leaf.shape) != placer.shapes[name]:
        return False
    is_placed = isinstance(leaf, jax.Array) and leaf.committed
    return not (
        is_placed
        and tuple(leaf.shape) == spec.shape
        and leaf.sharding.is_equivalent_to(spec.sharding, leaf.ndim)
    )


def _fitted(name: str, leaf: Any, spec: jax.ShapeDtypeStruct, placer: Placer | None) -> jax.Array:
    if placer is None or not _is_whole(name, leaf, spec, placer):
        return _put(leaf, spec.sharding)
    if isinstance(leaf, jax.Array):
        return placer.move(name, leaf)
    return placer.put(name, np.array(leaf), spec.dtype)


def _put(leaf: Any, sharding: Any) -> jax.Array:
    # A numpy array may be written to later, and `device_put` may share its memory.
    return jax.device_put(leaf if isinstance(leaf, jax.Array) else np.array(leaf), sharding)


def _named(params: Any) -> dict[str, Any]:
    if isinstance(params, nnx.Module):
        params = nnx.state(params)
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: tuple[Any, ...]) -> str:
    parts: list[Any] = []
    for entry in path:
        if isinstance(entry, jax.tree_util.GetAttrKey):
            parts += [] if entry.name == "value" else [entry.name]  # of an `nnx.Variable`
            continue
        key = entry.idx if isinstance(entry, jax.tree_util.SequenceKey) else entry.key
        parts += key if isinstance(key, tuple) else [key]
    return ".".join(map(str, parts))
