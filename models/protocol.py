"""What `Engine` and `LLM` ask of a model; ours and a user's own."""

from typing import Protocol

import jax

from paged_jax.core import Batch, CacheSpec, PagedCache


class PagedModel(Protocol):
    """A `flax.nnx.Module` with these three methods can be served."""

    def __call__(self, batch: Batch, cache: PagedCache, /) -> tuple[jax.Array, PagedCache]:
        """Runs the tokens of a step; returns hidden [T, E] and the cache with their KV."""
        ...

    def logits(self, hidden: jax.Array, /) -> jax.Array:
        """hidden [R, E] to logits [R, V]."""
        ...

    def cache_spec(self) -> CacheSpec:
        """What the model keeps per token."""
        ...
