"""Multi-head latent attention on a pool with one latent head.

What is cached per token is a latent vector, shared by all heads, and one rotated key. A head's key
and value are matrices times the latent vector; attention is computed on the latent vectors, with
those matrices applied to the queries before and to the results after it ("absorbed"), so that a
token is read once for all heads.

Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.core import Batch, PagedCache
from paged_jax.models.attention import PagedAttention
from paged_jax.models.linear import Linear, matmul_precision
from paged_jax.models.norm import make_norm
from paged_jax.models.parallel import Share
from paged_jax.models.rope import Rotation, rotate
from paged_jax.models.spec import LatentAttentionSpec, NormSpec


class LowRank(nnx.Module):
    """A linear layer through a bottleneck, normalised there."""

    def __init__(
        self,
        in_features: int,
        rank: int,
        out_features: int,
        norm: NormSpec,
        has_bias: bool,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        self.down = Linear(in_features, rank, has_bias=has_bias, dtype=dtype, rngs=rngs)
        self.norm = make_norm(norm, rank, dtype=dtype)
        self.up = Linear(rank, out_features, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(self.norm(self.down(x)))


class LatentAttention(nnx.Module):
    """Projections around `PagedAttention` with one KV head of kv_rank + rope_dim features."""

    def __init__(
        self,
        spec: LatentAttentionSpec,
        hidden_size: int,
        norm: NormSpec,
        *,
        share: Share | None = None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        """With a share, each rank has some of the heads, and all of the latent vector."""
        spec = spec if share is None else share.attention(spec)
        self.spec = spec
        heads, make = spec.num_heads, {"dtype": dtype, "rngs": rngs}
        width = heads * (spec.nope_dim + spec.rope_dim)
        if spec.q_rank is None:
            self.q = Linear(hidden_size, width, **make)
        else:
            self.q = LowRank(hidden_size, spec.q_rank, width, norm, spec.has_bias, **make)
        self.kv_down = Linear(
            hidden_size, spec.kv_rank + spec.rope_dim, has_bias=spec.has_bias, **make
        )
        self.kv_norm = make_norm(norm, spec.kv_rank, dtype=dtype)
        self.kv_up = Linear(spec.kv_rank, heads * (spec.nope_dim + spec.v_dim), **make)
        self.out = Linear(
            heads * spec.v_dim, hidden_size, has_bias=spec.has_bias, share=share, **make
        )
        self.attend = PagedAttention(heads, 1, spec.kv_rank + spec.rope_dim, sm_scale=spec.sm_scale)

    def __call__(
        self,
        x: jax.Array,
        rotation: Rotation | None,
        layer: int,
        batch: Batch | None,
        cache: PagedCache | None,
    ) -> tuple[jax.Array, PagedCache | None]:
        spec = self.spec
        q = self.q(x).reshape(*x.shape[:-1], spec.num_heads, -1)
        q_nope, q_rope = jnp.split(q, [spec.nope_dim], axis=-1)
        latent, k_rope = jnp.split(self.kv_down(x), [spec.kv_rank], axis=-1)
        latent, k_rope = self.kv_norm(latent)[..., None, :], k_rope[..., None, :]
        if rotation is not None:
            q_rope, k_rope = (rotate(half, rotation, spec.rope) for half in (q_rope, k_rope))
        # [H, nope + v, rank]: what makes a head's key, then its value.
        up = self.kv_up.weight[...].reshape(spec.num_heads, -1, spec.kv_rank)
        key_up, value_up = up[:, : spec.nope_dim], up[:, spec.nope_dim :]
        precision = matmul_precision(x.dtype)
        q_latent = jnp.einsum("...hn,hnr->...hr", q_nope, key_up, precision=precision)
        q = jnp.concatenate([q_latent, q_rope], axis=-1)
        k = jnp.concatenate([latent, k_rope], axis=-1)
        out, cache = self.attend(q, k, k, layer=layer, batch=batch, cache=cache)
        out = out[..., : spec.kv_rank]
        out = jnp.einsum("...hr,hvr->...hv", out, value_up, precision=precision)
        return self.out(out.reshape(*x.shape[:-1], -1)), cache
