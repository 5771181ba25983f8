"""The loop over decoder blocks; parts live in their own files."""

from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from paged_jax.core import Batch, CacheSpec, PagedCache
from paged_jax.models.attention import SelfAttention
from paged_jax.models.linear import Linear, product
from paged_jax.models.mla import LatentAttention
from paged_jax.models.mlp import MLP
from paged_jax.models.moe import MoE
from paged_jax.models.norm import make_norm
from paged_jax.models.parallel import Share
from paged_jax.models.rope import Rotation, rotation
from paged_jax.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    RopeSpec,
)


class Embedding(nnx.Module):
    """Vectors by index, weight [V, E]; of tokens, where it may be the output head, or positions."""

    def __init__(
        self,
        size: int,
        width: int,
        *,
        share: Share | None = None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        """With a share, `size` are the vectors of a rank."""
        self.share = share
        weight = 0.02 * jax.random.normal(rngs.params(), (size, width), jnp.float32)
        self.weight = nnx.Param(weight.astype(dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if self.share is None:
            return self.weight[...][tokens]
        size = self.weight[...].shape[0]
        place = tokens - self.share.rank() * size
        is_own = (place >= 0) & (place < size)
        found = self.weight[...][jnp.where(is_own, place, 0)]
        return self.share.sum(jnp.where(is_own[..., None], found, jnp.zeros_like(found)))


class DecoderBlock(nnx.Module):
    """Attention, then MLP, each with its norms and a residual."""

    def __init__(
        self,
        spec: DecoderSpec,
        layer: LayerSpec,
        *,
        share: Share | None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        size, make = spec.hidden_size, {"share": share, "dtype": dtype, "rngs": rngs}

        def norm(is_there: bool):
            return make_norm(spec.norm, size, dtype=dtype) if is_there else None

        self.attention_norm = norm(layer.has_pre_norms)
        self.attention_post_norm = norm(layer.has_post_norms)
        self.mlp_norm = norm(layer.has_pre_norms)
        self.mlp_post_norm = norm(layer.has_post_norms)
        attention, mlp = layer.attention, layer.mlp
        if isinstance(attention, LatentAttentionSpec):
            self.attention = LatentAttention(attention, size, spec.norm, **make)
        else:
            self.attention = SelfAttention(attention, size, spec.norm, **make)
        is_dense = isinstance(mlp, MLPSpec)
        self.mlp = MLP(mlp, size, **make) if is_dense else MoE(mlp, size, **make)
        self.residual_scale = spec.residual_scale

    def __call__(
        self,
        x: jax.Array,
        rotation: Rotation | None,
        layer: int,
        batch: Batch | None,
        cache: PagedCache | None,
    ) -> tuple[jax.Array, PagedCache | None]:
        normed = _apply(self.attention_norm, x)
        out, cache = self.attention(normed, rotation, layer, batch, cache)
        x = x + self._scaled(_apply(self.attention_post_norm, out))
        normed = _apply(self.mlp_norm, x)
        if isinstance(self.mlp, MoE) and batch is not None:
            out = self.mlp(normed, batch.slots > 0)  # slot 0 takes what padding writes
        else:
            out = self.mlp(normed)
        return x + self._scaled(_apply(self.mlp_post_norm, out)), cache

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.residual_scale == 1.0 else x * self.residual_scale


class Decoder(nnx.Module):
    """A decoder-only language model on the protocol that `LLM` serves.

    `model(batch, cache) -> (hidden [T, E], cache)` is the serving form; `model(tokens [B, T]) ->
    logits [B, T, V]` is the dense, differentiable form for training.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        share: Share | None = None,
        dtype: DTypeLike = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        """Makes random parameters.

        Args:
          spec: Of the whole model.
          share: What of it this module computes, inside `shard_map` over the share's axis; logits
            are then those of the rank's tokens. None: all.
        """
        self.spec, self.share = spec, share
        dtype = jnp.dtype(dtype)
        make = {"dtype": dtype, "rngs": rngs}
        vocab_size = spec.vocab_size if share is None else share.vocab_size(spec.vocab_size)
        self.embed = Embedding(vocab_size, spec.hidden_size, share=share, **make)
        self.positions = (
            Embedding(spec.max_position_embeddings, spec.hidden_size, **make)
            if spec.has_learned_positions
            else None
        )
        # Unrolled: a scan over layers is three times slower on CPU at batch 1, and would pass
        # the KV pool through its carry.
        self.blocks = nnx.List(
            [DecoderBlock(spec, layer, share=share, **make) for layer in spec.layers]
        )
        self.norm = make_norm(spec.norm, spec.hidden_size, dtype=dtype)
        self.head = None if spec.is_tied else Linear(spec.hidden_size, vocab_size, **make)

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
        spec = self.spec
        x = self.embed(tokens)
        if spec.embed_scale != 1.0:
            # Rounded to the model's dtype first, as in the training of those that have it.
            x = x * jnp.asarray(spec.embed_scale, x.dtype)
        if self.positions is not None:
            vectors = self.positions(positions)
            x = x + vectors.reshape((1,) * (x.ndim - vectors.ndim) + vectors.shape)
        length = spec.context_length or spec.max_position_embeddings
        if batch is None:
            length = tokens.shape[1]
        # One table per kind of layer.
        rotations: dict[RopeSpec | None, Rotation] = {}
        for layer, block in enumerate(self.blocks):
            attention = spec.layers[layer].attention
            rope = attention.rope
            if rope is not None and rope not in rotations:
                is_plain = isinstance(attention, AttentionSpec)
                width = attention.head_dim if is_plain else attention.rope_dim
                rotations[rope] = rotation(rope, width, positions, length)
            x, cache = block(x, rotations.get(rope), layer, batch, cache)
        return self.norm(x), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., E] to float32 logits [..., V]."""
        head = self.embed if self.head is None else self.head
        logits = product(hidden, head.weight[...], out_dtype=jnp.dtype("float32"))
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if self.spec.logit_cap is not None:
            logits = self.spec.logit_cap * jnp.tanh(logits / self.spec.logit_cap)
        if self.share is not None:
            first = self.share.rank() * logits.shape[-1]
            is_token = first + jnp.arange(logits.shape[-1]) < self.spec.vocab_size
            logits = jnp.where(is_token.reshape((1,) * (logits.ndim - 1) + (-1,)), logits, -jnp.inf)
        return logits

    def cache_spec(self) -> CacheSpec:
        """Shape of what the model keeps per token."""
        return cache_spec(self.spec, self.share)


def fill(make: Callable[[], Decoder], array: Callable[[str, Any], jax.Array]) -> Decoder:
    """A decoder with the parameters `array(name, variable)`; what `make` would fill in is never
    computed. Names are like "blocks.0.attention.qkv.weight"."""
    graphdef, state = nnx.split(nnx.eval_shape(make))
    filled = [
        (path, variable.replace(array(".".join(map(str, path)), variable)))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def cache_spec(spec: DecoderSpec, share: Share | None = None) -> CacheSpec:
    """What a model, or a rank of it, keeps per token.

    Raises: ValueError for layers that keep different heads, which one pool cannot hold.
    """
    kept = {_kept(layer.attention) for layer in spec.layers}
    if len(kept) > 1:
        raise ValueError(f"layers must keep the same heads per token, not {sorted(kept)}")
    num_kv_heads, head_dim, latent_dim = kept.pop()
    if share is not None:
        _, num_kv_heads = share.heads(num_kv_heads, num_kv_heads)
    return CacheSpec(
        num_layers=spec.num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        latent_dim=latent_dim,
    )


def _kept(attention: AttentionSpec | LatentAttentionSpec) -> tuple[int, int, int]:
    """KV heads, features of one, and the latent ones among them."""
    if isinstance(attention, AttentionSpec):
        return attention.num_kv_heads, attention.head_dim, 0
    return 1, attention.kv_rank + attention.rope_dim, attention.kv_rank


def _apply(norm: nnx.Module | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
