"""The loop over decoder blocks; parts live in their own files."""

from typing import overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from paged_jax import ops
from paged_jax.core import Batch, CacheSpec, PagedCache
from paged_jax.models.attention import SelfAttention
from paged_jax.models.linear import Linear, product
from paged_jax.models.mlp import GatedMLP
from paged_jax.models.norm import RMSNorm
from paged_jax.models.rope import inverse_frequencies
from paged_jax.models.spec import DecoderSpec


class Embedding(nnx.Module):
    """Token vectors, weight [V, E]; also the output head of tied models."""

    def __init__(self, size: int, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        weight = 0.02 * jax.random.normal(rngs.params(), (size, width), jnp.float32)
        self.weight = nnx.Param(weight.astype(dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.weight[...][tokens]


class DecoderBlock(nnx.Module):
    """Norm, attention, norm, MLP, each pair with a residual."""

    def __init__(self, spec: DecoderSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(spec.hidden_size, eps=spec.norm_eps, dtype=dtype)
        self.attention = SelfAttention(spec, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(spec.hidden_size, eps=spec.norm_eps, dtype=dtype)
        self.mlp = GatedMLP(spec, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        layer: int,
        batch: Batch | None,
        cache: PagedCache | None,
    ) -> tuple[jax.Array, PagedCache | None]:
        out, cache = self.attention(self.attention_norm(x), rotation, layer, batch, cache)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """A decoder-only language model on the protocol that `LLM` serves.

    `model(batch, cache) -> (hidden [T, E], cache)` is the serving form; `model(tokens [B, T]) ->
    logits [B, T, V]` is the dense, differentiable form for training.
    """

    def __init__(self, spec: DecoderSpec, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs) -> None:
        self.spec = spec
        dtype = jnp.dtype(dtype)
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, rngs=rngs)
        # Unrolled: a scan over layers is three times slower on CPU at batch 1, and would pass
        # the KV pool through its carry.
        self.blocks = nnx.List(
            [DecoderBlock(spec, dtype=dtype, rngs=rngs) for _ in range(spec.num_layers)]
        )
        self.norm = RMSNorm(spec.hidden_size, eps=spec.norm_eps, dtype=dtype)
        self.head = (
            None
            if spec.is_tied
            else Linear(spec.hidden_size, spec.vocab_size, dtype=dtype, rngs=rngs)
        )

    @overload
    def __call__(self, inputs: jax.Array, cache: None = None) -> jax.Array: ...
    @overload
    def __call__(self, inputs: Batch, cache: PagedCache) -> tuple[jax.Array, PagedCache]: ...

    def __call__(
        self, inputs: Batch | jax.Array, cache: PagedCache | None = None
    ) -> jax.Array | tuple[jax.Array, PagedCache | None]:
        """Runs the model.

        Args:
          inputs: A `Batch` with a cache, or tokens i32[B, T] without.
          cache: Blocks must be allocated for the tokens of the batch.
        Returns: (hidden [T, E], cache), or logits float32 [B, T, V].
        """
        if isinstance(inputs, Batch):
            if cache is None:
                raise ValueError("a Batch needs a cache; pass tokens [B, T] for the dense form")
            return self._run(inputs.tokens, inputs.positions, inputs, cache)
        positions = jnp.arange(inputs.shape[1], dtype=jnp.int32)
        hidden, _ = self._run(inputs, positions, None, None)
        return self.logits(hidden)

    def _run(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        batch: Batch | None,
        cache: PagedCache | None,
    ) -> tuple[jax.Array, PagedCache | None]:
        x = self.embed(tokens)
        inv_freq = jnp.asarray(inverse_frequencies(self.spec.rope, self.spec.head_dim))
        rotation = ops.rope_tables(positions, inv_freq)
        for layer, block in enumerate(self.blocks):
            x, cache = block(x, rotation, layer, batch, cache)
        return self.norm(x), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., E] to float32 logits [..., V]."""
        head = self.embed if self.head is None else self.head
        return product(hidden, head.weight[...], out_dtype=jnp.dtype("float32"))

    def cache_spec(self) -> CacheSpec:
        """Shape of what the model keeps per token."""
        return CacheSpec(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
        )
