"""Tensor parallelism: what one rank of a mesh axis computes, and how parameters are cut for it.

Queries, keys and values, the width of an MLP or of each expert, and the vocabulary are divided.
What comes out of attention and out of the MLP is summed over the ranks: twice per layer. Norms,
routers and learned positions are whole everywhere.

K KV heads become K', the least number from K on that divides the ranks or is divided by them: heads
of zeros are added, and where there are fewer heads than ranks each is kept by several, which share
its queries.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from paged_jax.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LatentAttentionSpec,
    MLPSpec,
    MoESpec,
)
from paged_jax.shapes import ceil_div

VOCABULARY_UNIT = 256
"""Tokens of a rank are a multiple of this, so that sampling finds its groups whole."""

_Attention = TypeVar("_Attention", AttentionSpec, LatentAttentionSpec)


@dataclass(frozen=True, kw_only=True)
class Share:
    """One of `num_ranks` equal parts of a model; the parts differ by their index on `axis` only."""

    axis: str
    num_ranks: int

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum over all ranks."""
        return jax.lax.psum(x, self.axis)

    def rank(self) -> jax.Array:
        """i32[], which one this is."""
        return jax.lax.axis_index(self.axis)

    def vocab_size(self, whole: int) -> int:
        """Tokens of a rank; those past the whole vocabulary are padding."""
        return ceil_div(whole, self.num_ranks * VOCABULARY_UNIT) * VOCABULARY_UNIT

    def width(self, whole: int) -> int:
        """Features of a rank; those past the whole are zeros."""
        return ceil_div(whole, self.num_ranks)

    def kv_copies(self, num_kv_heads: int) -> int:
        """Ranks that keep the same KV head."""
        return max(1, self.num_ranks // self._padded(num_kv_heads))

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        """Query heads and KV heads of a rank."""
        kv_heads = max(1, self._padded(num_kv_heads) // self.num_ranks)
        group = ceil_div(num_heads // num_kv_heads, self.kv_copies(num_kv_heads))
        return kv_heads * group, kv_heads

    def attention(self, whole: _Attention) -> _Attention:
        """The same attention with the heads of a rank."""
        if isinstance(whole, LatentAttentionSpec):
            return dataclasses.replace(whole, num_heads=self.heads(whole.num_heads, 1)[0])
        heads, kv_heads = self.heads(whole.num_heads, whole.num_kv_heads)
        return dataclasses.replace(whole, num_heads=heads, num_kv_heads=kv_heads)

    def _padded(self, num_kv_heads: int) -> int:
        padded = num_kv_heads
        while padded % self.num_ranks and self.num_ranks % padded:
            padded += 1
        return padded

    # Which of the whole each rank has, [ranks, n]; -1 for zeros.

    def vocabulary(self, whole: int) -> np.ndarray:
        """Rows of an embedding or head."""
        return self._even(whole, self.vocab_size(whole))

    def features(self, whole: int) -> np.ndarray:
        """Features inside an MLP."""
        return self._even(whole, self.width(whole))

    def query_heads(self, num_heads: int, num_kv_heads: int) -> np.ndarray:
        """Query heads."""
        copies, group = self.kv_copies(num_kv_heads), num_heads // num_kv_heads
        own = ceil_div(group, copies)
        kv_heads = self.kv_heads(num_kv_heads)
        place = np.arange(self.num_ranks)[:, None] % copies * own + np.arange(own)[None]
        heads = kv_heads[:, :, None] * group + place[:, None]
        is_there = (kv_heads[:, :, None] >= 0) & (place[:, None] < group)
        return np.where(is_there, heads, -1).reshape(self.num_ranks, -1)

    def kv_heads(self, num_kv_heads: int) -> np.ndarray:
        """KV heads."""
        padded, ranks = self._padded(num_kv_heads), np.arange(self.num_ranks)[:, None]
        if padded < self.num_ranks:
            heads = ranks * padded // self.num_ranks
        else:
            count = padded // self.num_ranks
            heads = ranks * count + np.arange(count)[None]
        return np.where(heads < num_kv_heads, heads, -1)

    def _even(self, whole: int, own: int) -> np.ndarray:
        index = np.arange(self.num_ranks * own).reshape(self.num_ranks, own)
        return np.where(index < whole, index, -1)


@dataclass(frozen=True, eq=False)
class Cut:
    """How a parameter is divided: which indices of one axis each rank has."""

    axis: int
    index: np.ndarray  # [ranks, n]; -1: zeros

    def part(self, whole: Any, rank: int) -> np.ndarray:
        """What a rank has, on the host."""
        index = self.index[rank]
        if np.array_equal(index, np.arange(index[0], index[0] + len(index))) and index[0] >= 0:
            start = int(index[0])  # a view
            return whole[(slice(None),) * self.axis + (slice(start, start + len(index)),)]
        part = np.take(whole, np.maximum(index, 0), axis=self.axis)
        part[(slice(None),) * self.axis + (index < 0,)] = 0
        return part

    def partition(self, axis_name: str) -> PartitionSpec:
        """Of the parts of all ranks, side by side along the axis."""
        return PartitionSpec(*[None] * self.axis, axis_name)


def cuts(spec: DecoderSpec, share: Share) -> dict[str, Cut]:
    """How each parameter of a decoder is divided; those that are not named are whole everywhere."""
    rows = share.vocabulary(spec.vocab_size)
    found = {"embed.weight": Cut(0, rows)}
    if not spec.is_tied:
        found["head.weight"] = Cut(0, rows)
    for number, layer in enumerate(spec.layers):
        block = f"blocks.{number}"
        attention, mlp = layer.attention, layer.mlp
        if isinstance(attention, AttentionSpec):
            pairs = _attention(attention, share)
        else:
            pairs = _latent(attention, share)
        found |= {f"{block}.attention.{name}": cut for name, cut in pairs}
        parts = _mlp(mlp, share) if isinstance(mlp, MLPSpec) else _experts(mlp, share)
        found |= {f"{block}.mlp.{name}": cut for name, cut in parts}
    return found


def _attention(spec: AttentionSpec, share: Share) -> Iterator[tuple[str, Cut]]:
    dim, heads, kv_heads = spec.head_dim, spec.num_heads, spec.num_kv_heads
    query_heads, kept = share.query_heads(heads, kv_heads), share.kv_heads(kv_heads)
    q, k = _spread(query_heads, dim), _spread(kept, dim)
    qkv = np.concatenate([q, _shifted(k, heads * dim), _shifted(k, (heads + kv_heads) * dim)], 1)
    yield "qkv.weight", Cut(0, qkv)
    if spec.has_qkv_bias:
        yield "qkv.bias", Cut(0, qkv)
    yield "out.weight", Cut(1, q)
    if spec.qk_norm == "all":
        for name, index in (("q_norm", q), ("k_norm", k)):
            yield f"{name}.weight", Cut(0, index)
    if spec.has_sinks:
        yield "sinks", Cut(0, query_heads)


def _latent(spec: LatentAttentionSpec, share: Share) -> Iterator[tuple[str, Cut]]:
    heads = share.query_heads(spec.num_heads, 1)
    name = "q.weight" if spec.q_rank is None else "q.up.weight"
    yield name, Cut(0, _spread(heads, spec.nope_dim + spec.rope_dim))
    yield "kv_up.weight", Cut(0, _spread(heads, spec.nope_dim + spec.v_dim))
    yield "out.weight", Cut(1, _spread(heads, spec.v_dim))


def _mlp(spec: MLPSpec, share: Share) -> Iterator[tuple[str, Cut]]:
    own = share.features(spec.size)
    both = np.concatenate([own, _shifted(own, spec.size)], 1) if spec.is_gated else own
    yield "gate_up.weight", Cut(0, both)
    if spec.has_bias:
        yield "gate_up.bias", Cut(0, both)
    yield "down.weight", Cut(1, own)


def _experts(spec: MoESpec, share: Share) -> Iterator[tuple[str, Cut]]:
    own = share.features(spec.size)
    both = np.concatenate([own, _shifted(own, spec.size)], 1)
    yield "gate_up.weight", Cut(2, both)
    if spec.has_bias:
        yield "gate_up.bias", Cut(1, both)
    yield "down.weight", Cut(1, own)
    if spec.shared_size:
        for name, cut in _mlp(MLPSpec(size=spec.shared_size), share):
            yield f"shared.{name}", cut


def _spread(heads: np.ndarray, dim: int) -> np.ndarray:
    """Rows of heads of `dim` features."""
    rows = heads[:, :, None] * dim + np.arange(dim)
    return np.where(heads[:, :, None] >= 0, rows, -1).reshape(len(heads), -1)


def _shifted(index: np.ndarray, offset: int) -> np.ndarray:
    return np.where(index >= 0, index + offset, -1)
