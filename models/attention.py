"""Attention over paged blocks, and the same attention without a cache for training."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax import ops
from paged_jax.core import Batch, PagedCache
from paged_jax.models.linear import Linear, matmul_precision
from paged_jax.models.spec import DecoderSpec


class PagedAttention(nnx.Module):
    """Causal grouped-query attention to drop into any model; it has no parameters.

    With a cache it writes the new keys and values into their slots and attends through the block
    tables; without one it is plain causal attention, differentiable, for training.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, *, sm_scale: float | None = None
    ) -> None:
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        layer: int,
        batch: Batch | None = None,
        cache: PagedCache | None = None,
    ) -> tuple[jax.Array, PagedCache | None]:
        """Attends.

        Args:
          q: [T, H, D] with a cache, [B, T, H, D] without.
          k: [T, K, D] or [B, T, K, D].
          v: As k.
          layer: Layer of the cache to write and read.
          batch: Where each token reads and writes; needed with a cache.
          cache: Blocks must be allocated for the tokens of the batch.
        Returns: (outputs in the shape of q, cache with the new keys and values).
        """
        if cache is None:
            return self._dense(q, k, v), None
        if batch is None:
            raise ValueError("batch must be given with a cache; build it with make_batch")
        kv = ops.write_kv(cache.kv, layer, k, v, batch.slots)
        row_ids = jnp.where(batch.row_ids < cache.blocks.max_seqs, batch.row_ids, 0)
        tables = cache.blocks.block_tables[row_ids]
        leading = min(row_ids.shape[0], q.shape[0])
        decoded = ops.paged_decode(
            q[:leading],
            kv,
            layer,
            tables[:leading],
            batch.context_lens[:leading],
            sm_scale=self.sm_scale,
            num_rows=batch.num_decode,
        )
        if batch.is_decode_only:
            return decoded, dataclasses.replace(cache, kv=kv)
        out = ops.paged_prefill(
            q,
            kv,
            layer,
            tables,
            batch.context_lens,
            batch.query_starts,
            sm_scale=self.sm_scale,
            first_row=batch.num_decode,
            num_rows=batch.num_rows,
        )
        # Each of the two is zero where the other computed.
        out = out.at[:leading].add(decoded)
        return out, dataclasses.replace(cache, kv=kv)

    def _dense(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        size, length = q.shape[:2]
        precision = matmul_precision(q.dtype)
        grouped = q.reshape(size, length, self.num_kv_heads, -1, self.head_dim)
        logits = jnp.einsum("btkgd,bskd->bkgts", grouped, k, precision=precision)
        logits = logits.astype(jnp.float32) * jnp.float32(self.sm_scale)
        position = jnp.arange(length)
        seen = position[:, None] >= position[None, :]
        weights = jax.nn.softmax(jnp.where(seen[None, None, None], logits, -jnp.inf), axis=-1)
        out = jnp.einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v, precision=precision)
        return out.reshape(q.shape)


class SelfAttention(nnx.Module):
    """Projections around `PagedAttention`: q, k, v fused, rotary positions, output."""

    def __init__(self, spec: DecoderSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.spec = spec
        out_features = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = Linear(
            spec.hidden_size, out_features, has_bias=spec.has_qkv_bias, dtype=dtype, rngs=rngs
        )
        self.out = Linear(
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            has_bias=spec.has_out_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.attend = PagedAttention(spec.num_heads, spec.num_kv_heads, spec.head_dim)

    def __call__(
        self,
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        layer: int,
        batch: Batch | None,
        cache: PagedCache | None,
    ) -> tuple[jax.Array, PagedCache | None]:
        spec = self.spec
        heads = self.qkv(x).reshape(*x.shape[:-1], -1, spec.head_dim)
        q, k, v = jnp.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads], axis=-2)
        q, k = ops.rope(q, *rotation), ops.rope(k, *rotation)
        out, cache = self.attend(q, k, v, layer=layer, batch=batch, cache=cache)
        return self.out(out.reshape(*x.shape[:-1], -1)), cache
