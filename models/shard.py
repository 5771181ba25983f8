"""Models on a mesh: each device gets its own part of every parameter, and no more."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paged_jax.models.decoder import Decoder
from paged_jax.models.parallel import Cut, Share, cuts
from paged_jax.models.spec import DecoderSpec

AXIS = "tp"
"""The mesh axis over which a model is divided."""


def make_mesh(num_ranks: int) -> Mesh:
    """The first devices in a row. Raises: ValueError when there are fewer."""
    devices = jax.devices()
    if jax.process_count() > 1 and len(devices) != num_ranks:
        raise ValueError(
            f"tensor_parallel_size ({num_ranks}) must be the number of devices of all processes "
            f"({len(devices)})"
        )
    if len(devices) < num_ranks:
        raise ValueError(
            f"tensor_parallel_size ({num_ranks}) needs as many devices, and there are "
            f"{len(devices)}"
        )
    return Mesh(np.array(devices[:num_ranks]), (AXIS,))


def check_mesh(mesh: Mesh) -> Share:
    """What a rank of a mesh computes. Raises: ValueError for a mesh without the axis "tp"."""
    if AXIS not in mesh.axis_names:
        raise ValueError(f"mesh has the axes {mesh.axis_names} and must have {AXIS!r}")
    return Share(axis=AXIS, num_ranks=mesh.shape[AXIS])


class Placer:
    """Places the parameters of one model on a mesh, by their names."""

    def __init__(self, spec: DecoderSpec, mesh: Mesh) -> None:
        self.share, self._mesh = check_mesh(mesh), mesh
        self._cuts, self._spec = cuts(spec, self.share), spec

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters before they are divided."""
        state = nnx.state(nnx.eval_shape(lambda: Decoder(self._spec, rngs=nnx.Rngs(0))))
        return {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}

    def move(self, name: str, whole: jax.Array) -> jax.Array:
        """The same for a parameter that is on devices, of this mesh or another: it does not go
        through the host where JAX can copy between the devices."""
        cut = self._cuts.get(name)
        if cut is None:
            return jax.device_put(whole, NamedSharding(self._mesh, PartitionSpec()))
        divided = PartitionSpec(*[None] * cut.axis, AXIS)
        is_even = whole.shape[cut.axis] % self.share.num_ranks == 0
        start = NamedSharding(self._mesh, divided if is_even else PartitionSpec())
        where = NamedSharding(self._mesh, divided)
        index = cut.index.reshape(-1)
        return _pick(jax.device_put(whole, start), index, axis=cut.axis, where=where)

    def put(self, name: str, whole: np.ndarray, dtype: Any) -> jax.Array:
        """A parameter on its devices."""
        cut = self._cuts.get(name)
        if cut is None:
            sharding = NamedSharding(self._mesh, PartitionSpec())
            return jax.device_put(np.asarray(whole, dtype), sharding)
        return _divided(whole, cut, self._mesh, dtype)


def shard(model: Decoder, mesh: Mesh) -> Decoder:
    """The same model, divided over the axis "tp" of a mesh."""
    placer = Placer(model.spec, mesh)
    _, state = nnx.split(model)
    by_name = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    dtype = model.embed.weight[...].dtype
    graphdef, own = nnx.split(
        nnx.eval_shape(
            lambda: Decoder(model.spec, share=placer.share, dtype=dtype, rngs=nnx.Rngs(0))
        )
    )
    placed = []
    for path, variable in nnx.to_flat_state(own):
        name = ".".join(map(str, path))
        whole = np.asarray(by_name[name][...])
        placed.append((path, variable.replace(placer.put(name, whole, whole.dtype))))
    return nnx.merge(graphdef, nnx.from_flat_state(placed))


@functools.partial(jax.jit, static_argnames=("axis", "where"))
def _pick(whole: jax.Array, index: jax.Array, *, axis: int, where: NamedSharding) -> jax.Array:
    """The indices of one axis; -1 gives zeros."""
    shape = [1] * whole.ndim
    shape[axis] = -1
    found = jnp.take(whole, jnp.maximum(index, 0), axis=axis)
    found = jnp.where((index >= 0).reshape(shape), found, jnp.zeros_like(found))
    return jax.lax.with_sharding_constraint(found, where)


def _divided(whole: np.ndarray, cut: Cut, mesh: Mesh, dtype: Any) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * cut.axis, AXIS))
    num_ranks, own = cut.index.shape
    shape = (*whole.shape[: cut.axis], num_ranks * own, *whole.shape[cut.axis + 1 :])

    def part(index: tuple[slice, ...]) -> np.ndarray:
        rank = (index[cut.axis].start or 0) // own
        return np.ascontiguousarray(cut.part(whole, rank), dtype)

    return jax.make_array_from_callback(shape, sharding, part)
