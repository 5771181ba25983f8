"""Orbax checkpoints: config.json beside a tree of arrays.

The tree is nested dicts whose keys are the parts of Hugging Face's tensor names between dots, in
the directory itself or in `orbax` below it.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from paged_jax.models.checkpoint import read_configs
from paged_jax.models.host_arrays import aligned_empty
from paged_jax.models.tokenizer import Tokenizer, load_tokenizer

TREE = "orbax"
"""Directory of the tree in those that `paged-jax convert` writes."""

_CHUNK_BYTES = 16 << 20  # compressed and decompressed as a whole


def is_orbax(path: Path) -> bool:
    """Whether a directory holds an Orbax checkpoint."""
    return _tree_path(path) is not None


def open_orbax(path: Path) -> "OrbaxCheckpoint":
    """Opens a directory with a config and an Orbax tree.

    Raises: ValueError that names the path if either is missing or unreadable.
    """
    config, generation_config = read_configs(path)
    return OrbaxCheckpoint(path, config, generation_config)


class OrbaxCheckpoint:
    """A `Checkpoint` over an Orbax tree."""

    def __init__(
        self, path: Path, config: dict[str, Any], generation_config: dict[str, Any]
    ) -> None:
        tree_path = _tree_path(path)
        if tree_path is None:
            raise ValueError(f"{path} has no Orbax checkpoint")
        self._path, self._tree_path = path, tree_path.absolute()
        self.config, self.generation_config = config, generation_config
        try:
            tree = _metadata(self._tree_path)
        except Exception as error:  # of many kinds, for files that are missing or damaged
            raise ValueError(f"cannot read Orbax checkpoint {tree_path}: {error}") from error
        self._arrays = dict(_flat(tree, ()))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Checkpoint.shapes`."""
        return {name: tuple(array.shape) for name, array in self._arrays.items()}

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """See `Checkpoint.read`."""
        stored = self._arrays[name].dtype
        if not jnp.issubdtype(stored, jnp.floating):
            raise ValueError(f"tensor {name} of {self._path} has dtype {stored}, which is no float")
        try:
            if _is_usual(self._tree_path):
                return _read_rows(self._tree_path, name, dtype)
            return self._restore(name, dtype)
        except Exception as error:  # as above
            raise ValueError(f"cannot read tensor {name} of {self._path}: {error}") from error

    def _restore(self, name: str, dtype: np.dtype | None) -> np.ndarray:
        """By Orbax, whatever the tree is stored as; it reads the metadata of the whole tree."""
        as_numpy = ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
        only = ocp.args.PyTreeRestore(
            item=nested({name: self._arrays[name]}),
            restore_args=nested({name: as_numpy}),
            partial_restore=True,
        )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            [(_, array)] = _flat(checkpointer.restore(self._tree_path, args=only), ())
        return array

    def tokenizer(self) -> Tokenizer | None:
        """See `Checkpoint.tokenizer`."""
        return load_tokenizer(self._path)


def save_tree(path: Path, names: Iterable[str], read: Callable[[str], np.ndarray]) -> None:
    """Writes an Orbax tree, one tensor in memory at a time.

    Args:
      path: A directory that does not exist yet.
      names: Tensors to write.
      read: Gives one of them.
    Raises: ValueError for a name that is no path in a tree, and what `read` raises.
    """
    tree = nested({name: _Unread(name) for name in names})
    registry = ocp.type_handlers.create_type_handler_registry(
        (_Unread, _OneByOne(read)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # there are none, but Orbax warns without
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    in_chunks = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(tree, save_args=in_chunks))


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts, their keys the parts of names between dots."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        if not all(_is_key(part) for part in (*parents, last)):
            raise ValueError(f"tensor name {name!r} must be printable words between dots")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ValueError(f"tensor {name} cannot be below another tensor")
        if last in node:
            raise ValueError(f"tensor {name} cannot be above other tensors")
        node[last] = value
    return tree


def _is_key(part: str) -> bool:
    return bool(part) and part.isprintable() and not set(part) & set("/\\")


@dataclass(frozen=True)
class _Unread:
    """A leaf that stands for a tensor until it is written."""

    name: str
    # Orbax adds sizes up for its log.
    shape = ()
    dtype = np.dtype(np.float32)


class _OneByOne(ocp.type_handlers.TypeHandler):
    """Writes each leaf as a NumPy array that is read when its turn comes."""

    def __init__(self, read: Callable[[str], np.ndarray]) -> None:
        self._read, self._numpy = read, ocp.type_handlers.NumpyHandler()

    def typestr(self) -> str:
        return self._numpy.typestr()

    async def serialize(
        self,
        values: Sequence[_Unread],
        infos: Sequence[Any],
        args: Sequence[Any] | None = None,
    ) -> Sequence[Any]:
        for value, info, arg in zip(values, infos, args or [None] * len(values), strict=True):
            array = self._read(value.name)
            writes = await self._numpy.serialize([array], [info], None if arg is None else [arg])
            for write in writes:
                await asyncio.to_thread(write.result)
        return []

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        return await self._numpy.metadata(infos)

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[np.ndarray]:
        return await self._numpy.deserialize(infos, args)


def _tree_path(path: Path) -> Path | None:
    """Where the tree is: what Orbax itself writes is recognised by."""
    found = (tree for tree in (path / TREE, path) if (tree / "_METADATA").is_file())
    return next(found, None)


def _metadata(path: Any) -> Any:
    """Shapes and dtypes of a tree. What a Checkpointer returns varies with Orbax's version."""
    return ocp.PyTreeCheckpointHandler().metadata(path).tree


def _is_usual(path: Path) -> bool:
    """Whether a tree is stored as Orbax does it unless told otherwise: zarr arrays in OCDBT."""
    if not (path / "manifest.ocdbt").is_file():
        return False
    return not json.loads((path / "_METADATA").read_text("utf-8")).get("use_zarr3", False)


def _read_rows(path: Path, name: str, dtype: np.dtype | None) -> np.ndarray:
    """One tensor, some rows at a time: Orbax restores it whole, and JAX copies that again."""
    base = f"file://{quote(str(path))}/"
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    stored = ts.open({"driver": "zarr", "kvstore": kvstore}, read=True, open=True).result()
    values = aligned_empty(stored.shape, dtype or stored.dtype.numpy_dtype)
    rows = stored.shape[0] if stored.ndim else 1
    step = max(1, _CHUNK_BYTES * rows // max(1, values.nbytes))
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows)) if stored.ndim else ...
        values[part] = stored[part].read().result()
    return values


def _flat(tree: Any, parents: tuple[str, ...]) -> Iterable[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flat(value, (*parents, str(key)))
    elif hasattr(tree, "shape") and hasattr(tree, "dtype"):
        yield ".".join(parents), tree
    else:
        name = ".".join(parents) or "the root"
        raise ValueError(f"the Orbax tree must be nested dicts of arrays; {name} is neither")
