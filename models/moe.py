"""Mixture of experts: a router and a feed-forward layer per expert."""

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax import ops
from paged_jax.models.linear import Linear
from paged_jax.models.mlp import ACTIVATIONS, MLP
from paged_jax.models.parallel import Share
from paged_jax.models.spec import MLPSpec, MoESpec


class Router(nnx.Module):
    """Chooses experts per token and weighs them, in float32.

    Source: Shazeer et al. 2017 (softmax); DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2 (sigmoid,
    correction, groups).
    """

    def __init__(
        self, spec: MoESpec, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.spec = spec
        self.gate = Linear(
            hidden_size, spec.num_experts, has_bias=spec.has_router_bias, dtype=dtype, rngs=rngs
        )
        self.correction = (
            nnx.Param(jnp.zeros(spec.num_experts, jnp.float32)) if spec.has_correction else None
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [T, E]. Returns (experts i32[T, n], weights f32[T, n])."""
        spec = self.spec
        logits = self.gate(x, out_dtype=jnp.dtype("float32"))
        is_softmax = spec.scoring == "softmax"
        scores = jax.nn.softmax(logits, axis=-1) if is_softmax else jax.nn.sigmoid(logits)
        ranking = scores
        if self.correction is not None:
            ranking = ranking + self.correction[...][None, :]
        if spec.num_chosen_groups < spec.num_groups:
            ranking = self._within_best_groups(ranking)
        _, experts = jax.lax.top_k(ranking, spec.num_chosen)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if spec.is_renormalised:
            # The least positive number only: sigmoids may all underflow.
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return experts, weights * spec.scale

    def _within_best_groups(self, ranking: jax.Array) -> jax.Array:
        """-inf outside the groups whose two best experts sum highest."""
        spec = self.spec
        grouped = ranking.reshape(ranking.shape[0], spec.num_groups, -1)
        best_two, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
        _, groups = jax.lax.top_k(jnp.sum(best_two, axis=-1), spec.num_chosen_groups)
        is_chosen = jax.nn.one_hot(groups, spec.num_groups, dtype=jnp.bool_).any(axis=1)
        return jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(ranking.shape)


class MoE(nnx.Module):
    """Sum over a token's experts of weight times down(act(gate(x), up(x)))."""

    def __init__(
        self,
        spec: MoESpec,
        hidden_size: int,
        *,
        share: Share | None = None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        """With a share, each rank has a part of every expert's width."""
        self.spec, self.share = spec, share
        own, shared = spec.size, spec.shared_size
        if share is not None:
            own, shared = share.width(own), share.width(shared)
        self.router = Router(spec, hidden_size, dtype=dtype, rngs=rngs)
        make = {"dtype": dtype, "rngs": rngs, "has_bias": spec.has_bias}
        self.gate_up = Experts(spec.num_experts, hidden_size, 2 * own, **make)
        self.down = Experts(spec.num_experts, own, hidden_size, share=share, **make)
        # What it gives is summed over the ranks together with what the experts give.
        self.shared = (
            MLP(
                MLPSpec(size=shared, activation=spec.activation),
                hidden_size,
                dtype=dtype,
                rngs=rngs,
            )
            if spec.shared_size
            else None
        )

    def __call__(self, x: jax.Array, is_live: jax.Array | None = None) -> jax.Array:
        """x [..., E]; of tokens that are not live (bool[T]) the result is arbitrary."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(tokens)
        if is_live is not None:
            # Padding would wake experts that nobody needs.
            chosen = jnp.where(is_live[:, None], chosen, chosen[:1])
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat)  # stable: tokens of an expert stay in order
        experts = flat[order]
        sizes = jnp.bincount(experts, length=self.spec.num_experts).astype(jnp.int32)
        rows = tokens[order // self.spec.num_chosen]
        inner = self._activate(self.gate_up(rows, experts, sizes))
        out = self.down(inner, experts, sizes)
        # Back to [T, n, E], so that the order of the sum does not depend on other tokens.
        out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
        out = out.reshape(*chosen.shape, -1).astype(jnp.float32) * weights[..., None]
        mixed = jnp.sum(out, axis=1).astype(x.dtype).reshape(x.shape)
        mixed = mixed if self.shared is None else mixed + self.shared(x)
        return mixed if self.share is None else self.share.sum(mixed)

    def _activate(self, gate_up: jax.Array) -> jax.Array:
        gate, up = jnp.split(gate_up, 2, axis=-1)
        if self.spec.activation != "clamped_swiglu":
            return ACTIVATIONS[self.spec.activation](gate) * up
        limit = self.spec.activation_limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(gate * self.spec.activation_alpha) * (up + 1.0)


class Experts(nnx.Module):
    """One linear layer per expert, weight [X, in, out], see `ops.grouped_product`."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        has_bias: bool,
        share: Share | None = None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        """With a share, what it returns is to be summed over the ranks."""
        self.share = share
        shape = (num_experts, in_features, out_features)
        weight = in_features**-0.5 * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.weight = nnx.Param(weight.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((num_experts, out_features), dtype)) if has_bias else None

    def __call__(self, x: jax.Array, experts: jax.Array, sizes: jax.Array) -> jax.Array:
        """x [N, in] in the order of experts [N], `sizes` rows each; returns [N, out]."""
        y = ops.grouped_product(x, self.weight[...], sizes)
        if self.bias is None:
            return y
        bias = self.bias[...][experts]
        if self.share is not None:  # once in the sum
            bias = jnp.where(self.share.rank() == 0, bias, jnp.zeros_like(bias))
        return y + bias
