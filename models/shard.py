"""Models on a mesh: each device gets its own part of every parameter, and no more."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paged_jax.models.decoder import Decoder, fill
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
        self.share, self.mesh = check_mesh(mesh), mesh
        self._cuts, self._spec = cuts(spec, self.share), spec

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters before they are divided."""
        state = nnx.state(nnx.eval_shape(lambda: Decoder(self._spec, rngs=nnx.Rngs(0))))
        return {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}

    def put(self, name: str, whole: np.ndarray, dtype: Any) -> jax.Array:
        """A parameter on its devices."""
        cut = self._cuts.get(name)
        if cut is None:
            return jax.device_put(np.asarray(whole, dtype), self._sharding(None))
        num_ranks, own = cut.index.shape
        shape = (*whole.shape[: cut.axis], num_ranks * own, *whole.shape[cut.axis + 1 :])

        def part(index: tuple[slice, ...]) -> np.ndarray:
            rank = (index[cut.axis].start or 0) // own
            return np.ascontiguousarray(cut.part(whole, rank), dtype)

        return jax.make_array_from_callback(shape, self._sharding(cut), part)

    def move(self, name: str, whole: jax.Array) -> jax.Array:
        """The same for a parameter that is on devices, of this mesh or another: it does not go
        through the host where JAX can copy between the devices."""
        cut = self._cuts.get(name)
        if cut is None:
            return jax.device_put(whole, self._sharding(None))
        is_even = whole.shape[cut.axis] % self.share.num_ranks == 0
        moved = jax.device_put(whole, self._sharding(cut if is_even else None))
        return _pick(moved, cut.index.reshape(-1), axis=cut.axis, where=self._sharding(cut))

    def _sharding(self, cut: Cut | None) -> NamedSharding:
        spec = PartitionSpec() if cut is None else cut.partition(AXIS)
        return NamedSharding(self.mesh, spec)


def shard(model: Decoder, mesh: Mesh) -> Decoder:
    """The same model, divided over the axis "tp" of a mesh."""
    placer = Placer(model.spec, mesh)
    whole = {
        ".".join(map(str, path)): np.asarray(leaf[...])
        for path, leaf in nnx.to_flat_state(nnx.state(model))
    }
    dtype = model.embed.weight[...].dtype
    return fill(
        lambda: Decoder(model.spec, share=placer.share, dtype=dtype, rngs=nnx.Rngs(0)),
        lambda name, _: placer.put(name, whole[name], whole[name].dtype),
    )


@functools.partial(jax.jit, static_argnames=("axis", "where"))
def _pick(whole: jax.Array, index: jax.Array, *, axis: int, where: NamedSharding) -> jax.Array:
    """The indices of one axis; -1 gives zeros."""
    shape = [1] * whole.ndim
    shape[axis] = -1
    found = jnp.take(whole, jnp.maximum(index, 0), axis=axis)
    found = jnp.where((index >= 0).reshape(shape), found, jnp.zeros_like(found))
    return jax.lax.with_sharding_constraint(found, where)
