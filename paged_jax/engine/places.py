"""Where the arrays of an engine live: on one device, or on the mesh of a divided model."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paged_jax import core
from paged_jax.core import CacheSpec, KVCache
from paged_jax.engine.memory import StepShape
from paged_jax.engine.step import OnMesh
from paged_jax.models.decoder import Decoder
from paged_jax.models.footprint import features_per_token
from paged_jax.models.protocol import PagedModel
from paged_jax.models.shard import Placer

_WHOLE = PartitionSpec()


@dataclass(frozen=True, kw_only=True)
class Places:
    """One device, or a mesh."""

    placer: Placer | None = None
    """Of a divided model: divides other parameters in the same way."""

    @classmethod
    def of(cls, model: PagedModel) -> "Places":
        """Where the parameters of a model are."""
        if not isinstance(model, Decoder) or model.share is None:
            return cls()
        mesh: Any = model.embed.weight[...].sharding.mesh  # type: ignore[union-attr]
        return cls(placer=Placer(model.spec, mesh))

    @property
    def mesh(self) -> Mesh | None:
        """Of a divided model."""
        return None if self.placer is None else self.placer.mesh

    @property
    def axis_name(self) -> str | None:
        """Of the ranks that have parts of the vocabulary."""
        return None if self.placer is None else self.placer.share.axis

    @property
    def num_ranks(self) -> int:
        """Devices that have a part each."""
        return 1 if self.placer is None else self.placer.share.num_ranks

    def bind(self, tree: Any) -> Any:
        """The same arrays, bound to their devices: programs of bound and unbound ones are not
        shared, and parameters that come later may be bound."""

        def place(x: Any) -> jax.Array:
            array = jnp.asarray(x)
            return jax.device_put(array, array.sharding)

        return jax.tree.map(place, tree)

    def put(self, tree: Any) -> Any:
        """Arrays that every rank has whole."""
        if self.mesh is None:
            return self.bind(tree)
        # Arrays of one process's devices cannot go to those of others; numpy's can.
        return jax.device_put(jax.tree.map(np.asarray, tree), NamedSharding(self.mesh, _WHOLE))

    def pool(self, spec: CacheSpec, num_blocks: int, block_size: int, dtype: Any) -> KVCache:
        """An empty pool; `spec` is of one rank, like what the pool says of its heads."""
        if self.mesh is None:
            return core.create_kv_cache(spec, num_blocks, block_size, dtype)
        num_ranks = self.num_ranks

        def make() -> KVCache:
            own = core.create_kv_cache(spec, num_blocks, block_size, dtype)
            # Rows of heads of all ranks; scales are there for 8 bits only.
            wide = [jnp.tile(own.kv, (1, 1, num_ranks, 1, 1)), own.scales]
            if own.is_quantized:
                wide[1] = jnp.tile(own.scales, (1, 1, num_ranks, 1))
            return dataclasses.replace(own, kv=wide[0], scales=wide[1])

        return jax.jit(make, out_shardings=self._shardings(jax.eval_shape(make)))()

    def put_pool(self, kv: KVCache) -> KVCache:
        """A pool whose arrays are where they belong."""
        return self.bind(kv) if self.mesh is None else jax.device_put(kv, self._shardings(kv))

    def on_mesh(self, params: tuple[jax.Array, ...], kv: KVCache) -> OnMesh | None:
        """What the step must know of the mesh."""
        if self.mesh is None:
            return None
        specs = tuple(leaf.sharding.spec for leaf in params)  # type: ignore[union-attr]
        return OnMesh(self.mesh, specs, self.divided(kv))

    def divided(self, kv: KVCache) -> Any:
        """How each array of a pool is divided: by rows of heads."""
        by_heads = PartitionSpec(None, None, self.axis_name)
        return dataclasses.replace(
            kv,
            kv=by_heads,  # type: ignore[arg-type]
            scales=by_heads if kv.is_quantized else _WHOLE,  # type: ignore[arg-type]
            tags=None if kv.tags is None else _WHOLE,  # type: ignore[arg-type]
        )

    def _shardings(self, kv: KVCache) -> Any:
        assert self.mesh is not None
        mesh = self.mesh
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            self.divided(kv),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )


def probe(model: PagedModel) -> tuple[Any, int, StepShape]:
    """Dtype of hidden states, vocabulary size, and what a step of a model on the protocol needs;
    without running it."""
    if isinstance(model, Decoder):
        spec, share = model.spec, model.share
        own = spec.vocab_size if share is None else share.vocab_size(spec.vocab_size)
        shape = StepShape(vocab_size=own, num_features=features_per_token(spec, share))
        return model.embed.weight[...].dtype, spec.vocab_size, shape
    spec = model.cache_spec()

    def run() -> tuple[jax.Array, jax.Array]:
        blocks = core.create_block_state(1, 1, 1, 1)
        kv = core.create_kv_cache(spec, 1, 1, np.float32)
        batch = core.make_batch(
            blocks,
            tokens=np.zeros(2, np.int32),
            row_ids=np.ones(1, np.int32),
            query_lens=np.zeros(1, np.int32),
            num_decode=0,
        )
        hidden, _ = model(batch, core.PagedCache(blocks=blocks, kv=kv))
        return hidden, model.logits(hidden)

    hidden, logits = nnx.eval_shape(run)
    # The usual proportions of a layer: four streams, and an MLP four times as wide, gated.
    shape = StepShape(vocab_size=logits.shape[-1], num_features=16 * hidden.shape[-1])
    return hidden.dtype, logits.shape[-1], shape
