"""Attention over paged blocks, and the same attention without a cache for training."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax import ops
from paged_jax.core import Batch, PagedCache
from paged_jax.models.linear import Linear, matmul_precision
from paged_jax.models.norm import make_norm
from paged_jax.models.parallel import Share
from paged_jax.models.rope import Rotation, rotate
from paged_jax.models.spec import AttentionSpec, NormSpec


class PagedAttention(nnx.Module):
    """Causal grouped-query attention to drop into any model; it has no parameters.

    With a cache it writes the new keys and values into their slots and attends through the block
    tables; without one it is plain causal attention, differentiable, for training.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        sm_scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        layer: int,
        batch: Batch | None = None,
        cache: PagedCache | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, PagedCache | None]:
        """Attends.

        Args:
          q: [T, H, D] with a cache, [B, T, H, D] without.
          k: [T, K, D] or [B, T, K, D].
          v: As k.
          layer: Layer of the cache to write and read.
          batch: Where each token reads and writes; needed with a cache.
          cache: Blocks must be allocated for the tokens of the batch.
          sinks: [H], see `ops.paged_decode`.
        Returns: (outputs in the shape of q, cache with the new keys and values).
        """
        if cache is None:
            return self._dense(q, k, v, sinks), None
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
            num_rows=batch.num_decode,
            sm_scale=self.sm_scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            sinks=sinks,
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
            first_row=batch.num_decode,
            num_rows=batch.num_rows,
            sm_scale=self.sm_scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            sinks=sinks,
        )
        # Each of the two is zero where the other computed.
        out = out.at[:leading].add(decoded)
        return out, dataclasses.replace(cache, kv=kv)

    def _dense(
        self, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None
    ) -> jax.Array:
        size, length = q.shape[:2]
        precision = matmul_precision(q.dtype)
        grouped = q.reshape(size, length, self.num_kv_heads, -1, self.head_dim)
        logits = jnp.einsum("btkgd,bskd->bkgts", grouped, k, precision=precision)
        logits = logits.astype(jnp.float32) * jnp.float32(self.sm_scale)
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        position = jnp.arange(length)
        query, key = position[:, None], position[None, :]
        seen = query >= key
        if self.sliding_window is not None:
            seen &= key > query - self.sliding_window
        logits = jnp.where(seen[None, None, None], logits, -jnp.inf)
        if sinks is not None:
            # One more key, whose value is zero.
            sink = sinks.astype(jnp.float32).reshape(1, self.num_kv_heads, -1, 1, 1)
            sink = jnp.broadcast_to(sink, (*logits.shape[:-1], 1))
            logits = jnp.concatenate([logits, sink], axis=-1)
        weights = jax.nn.softmax(logits, axis=-1)[..., :length]
        out = jnp.einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v, precision=precision)
        return out.reshape(q.shape)


class SelfAttention(nnx.Module):
    """Projections around `PagedAttention`: q, k, v fused, norms, rotary positions, output."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        norm: NormSpec,
        *,
        share: Share | None = None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        """With a share, each rank has some of the heads."""
        whole, copies = spec, 1
        if share is not None:
            spec, copies = share.attention(spec), share.kv_copies(spec.num_kv_heads)
        self.spec = spec
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        make = {"dtype": dtype, "rngs": rngs}
        self.qkv = Linear(
            hidden_size, (heads + 2 * kv_heads) * dim, has_bias=spec.has_qkv_bias, **make
        )
        self.out = Linear(heads * dim, hidden_size, has_bias=spec.has_out_bias, share=share, **make)

        def norm_of(count: int, total: int):
            if spec.qk_norm == "all":
                return make_norm(norm, count * dim, dtype=dtype, share=share, whole=total * dim)
            return make_norm(norm, dim, dtype=dtype) if spec.qk_norm == "head" else None

        self.q_norm = norm_of(heads, whole.num_heads)
        # A head that several ranks keep is as often in the sum.
        self.k_norm = norm_of(kv_heads, copies * whole.num_kv_heads)
        self.sinks = nnx.Param(jnp.zeros(heads, dtype)) if spec.has_sinks else None
        self.attend = PagedAttention(
            heads,
            kv_heads,
            dim,
            sm_scale=spec.sm_scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
        )

    def __call__(
        self,
        x: jax.Array,
        rotation: Rotation | None,
        layer: int,
        batch: Batch | None,
        cache: PagedCache | None,
    ) -> tuple[jax.Array, PagedCache | None]:
        spec = self.spec
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        q, k, v = jnp.split(self.qkv(x), [q_size, q_size + kv_size], axis=-1)
        q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        v = self._in_heads(v)
        if rotation is not None and spec.rope is not None:
            q, k = rotate(q, rotation, spec.rope), rotate(k, rotation, spec.rope)
        sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        out, cache = self.attend(q, k, v, layer=layer, batch=batch, cache=cache, sinks=sinks)
        return self.out(out.reshape(*x.shape[:-1], -1)), cache

    def _normed(self, x: jax.Array, norm: nnx.Module | None) -> jax.Array:
        """[..., heads * D] to heads [..., heads, D], normalised over what the norm spans."""
        if norm is None:
            return self._in_heads(x)
        if self.spec.qk_norm == "all":
            return self._in_heads(norm(x))
        return norm(self._in_heads(x))

    def _in_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.spec.head_dim)
