"""How a checkpoint's tensors and a decoder's parameters correspond.

A parameter is fused from one or more tensors (q, k and v; gate and up; all experts). `join` and
`split` are inverse, on numpy arrays while loading and on JAX arrays under `jit`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from paged_jax.models.architecture import Names
from paged_jax.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
)


class Tensor(NamedTuple):
    """A tensor of a checkpoint, by its Hugging Face name."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """The tensors that one parameter is made of: their rows, one after the other."""

    tensors: tuple[Tensor, ...]
    shape: tuple[int, ...]
    """Of all rows together, [..., out, in]."""
    is_transposed: bool = False
    """The checkpoint has matrices as [..., in, out]."""
    is_interleaved: bool = False
    """The checkpoint has rows of gate and up in turns, along the axis of features."""
    has_columns: bool = False
    """The parameter has matrices as [..., in, out], as experts have."""

    def join(self, arrays: Sequence[Any]) -> Any:
        """The parameter, from arrays in the order of `tensors`."""
        xp = arrays[0].__array_namespace__()
        if self.is_transposed:
            arrays = [array.swapaxes(-1, -2) for array in arrays]
        if self.is_interleaved:
            arrays = [xp.concat([array[:, ::2], array[:, 1::2]], axis=1) for array in arrays]
        joined = arrays[0] if len(arrays) == 1 else xp.concat(list(arrays), axis=0)
        joined = joined.reshape(self.shape)
        return joined.swapaxes(-1, -2) if self.has_columns else joined

    def split(self, parameter: Any) -> list[Any]:
        """The tensors again."""
        xp = parameter.__array_namespace__()
        if self.has_columns:
            parameter = parameter.swapaxes(-1, -2)
        shapes = [self._stored(tensor.shape) for tensor in self.tensors]
        starts = np.cumsum([0, *(shape[0] for shape in shapes)]).tolist()
        rows = parameter.reshape(starts[-1], *shapes[0][1:])
        arrays = [rows[start:end] for start, end in pairwise(starts)]
        if self.is_interleaved:
            half = shapes[0][1] // 2
            arrays = [
                xp.stack([array[:, :half], array[:, half:]], axis=2).reshape(array.shape)
                for array in arrays
            ]
        if self.is_transposed:
            arrays = [array.swapaxes(-1, -2) for array in arrays]
        return arrays

    def _stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a tensor with its matrices as [..., out, in]."""
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape


def sources(spec: DecoderSpec, names: Names) -> dict[str, Source]:
    """Every parameter of a decoder, and where it comes from."""
    found = _Sources(spec, names)
    found.vectors("embed.weight", names.embed + ".weight", spec.vocab_size, spec.hidden_size)
    if spec.has_learned_positions:
        rows = spec.max_position_embeddings
        found.vectors("positions.weight", names.positions + ".weight", rows, spec.hidden_size)
    for index, layer in enumerate(spec.layers):
        found.block(f"blocks.{index}", names.layer.format(index), layer)
    found.norm("norm", names.norm, spec.hidden_size)
    if not spec.is_tied:
        found.vectors("head.weight", names.head + ".weight", spec.vocab_size, spec.hidden_size)
    return found.by_parameter


class _Sources:
    """Collects sources; `ours` are paths of parameters, `theirs` names of modules."""

    def __init__(self, spec: DecoderSpec, names: Names) -> None:
        self.by_parameter: dict[str, Source] = {}
        self._spec, self._names = spec, names

    def vectors(self, ours: str, theirs: str, *shape: int) -> None:
        self.by_parameter[ours] = Source((Tensor(theirs, shape),), shape)

    def norm(self, ours: str, theirs: str, size: int) -> None:
        self.vectors(f"{ours}.weight", f"{theirs}.weight", size)
        if self._spec.norm.kind == "layer":
            self.vectors(f"{ours}.bias", f"{theirs}.bias", size)

    def linear(
        self, ours: str, theirs: Sequence[str], rows: Sequence[int], width: int, has_bias: bool
    ) -> None:
        """Rows of several layers, or of one that the checkpoint has fused already."""
        total = sum(rows)
        rows = rows if len(theirs) == len(rows) else (total,)
        is_transposed = self._names.has_transposed_matrices
        pairs = list(zip(theirs, rows, strict=True))
        tensors = tuple(
            Tensor(f"{name}.weight", (width, count) if is_transposed else (count, width))
            for name, count in pairs
        )
        self.by_parameter[f"{ours}.weight"] = Source(tensors, (total, width), is_transposed)
        if has_bias:
            tensors = tuple(Tensor(f"{name}.bias", (count,)) for name, count in pairs)
            self.by_parameter[f"{ours}.bias"] = Source(tensors, (total,))

    def block(self, ours: str, theirs: str, layer: LayerSpec) -> None:
        names, size = self._names, self._spec.hidden_size
        if layer.has_pre_norms:
            self.norm(f"{ours}.attention_norm", f"{theirs}.{names.attention_norm}", size)
            self.norm(f"{ours}.mlp_norm", f"{theirs}.{names.mlp_norm}", size)
        if layer.has_post_norms:
            self.norm(f"{ours}.attention_post_norm", f"{theirs}.{names.attention_post_norm}", size)
            self.norm(f"{ours}.mlp_post_norm", f"{theirs}.{names.mlp_post_norm}", size)
        if isinstance(layer.attention, AttentionSpec):
            self._attention(f"{ours}.attention", theirs, layer.attention)
        else:
            self._latent(f"{ours}.attention", f"{theirs}.{names.latent}", layer.attention)
        if isinstance(layer.mlp, MLPSpec):
            modules = [f"{theirs}.{name}" for name in (*names.gate_up, names.down)]
            self._mlp(f"{ours}.mlp", modules, layer.mlp)
        else:
            self._experts(f"{ours}.mlp", theirs, layer.mlp)

    def _attention(self, ours: str, theirs: str, spec: AttentionSpec) -> None:
        names, size = self._names, self._spec.hidden_size
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows = (q_size, kv_size, kv_size)
        modules = [f"{theirs}.{name}" for name in names.qkv]
        self.linear(f"{ours}.qkv", modules, rows, size, spec.has_qkv_bias)
        self.linear(f"{ours}.out", [f"{theirs}.{names.out}"], (size,), q_size, spec.has_out_bias)
        if spec.qk_norm != "none":
            is_joint = spec.qk_norm == "all"
            self.norm(
                f"{ours}.q_norm", f"{theirs}.{names.q_norm}", q_size if is_joint else spec.head_dim
            )
            self.norm(
                f"{ours}.k_norm", f"{theirs}.{names.k_norm}", kv_size if is_joint else spec.head_dim
            )
        if spec.has_sinks:
            self.vectors(f"{ours}.sinks", f"{theirs}.{names.sinks}", spec.num_heads)

    def _latent(self, ours: str, theirs: str, spec: LatentAttentionSpec) -> None:
        size, heads = self._spec.hidden_size, spec.num_heads
        q_size = heads * (spec.nope_dim + spec.rope_dim)
        if spec.q_rank is None:
            self.linear(f"{ours}.q", [f"{theirs}.q_proj"], (q_size,), size, False)
        else:
            rank = spec.q_rank
            self.linear(f"{ours}.q.down", [f"{theirs}.q_a_proj"], (rank,), size, spec.has_bias)
            self.norm(f"{ours}.q.norm", f"{theirs}.q_a_layernorm", rank)
            self.linear(f"{ours}.q.up", [f"{theirs}.q_b_proj"], (q_size,), rank, False)
        rows = (spec.kv_rank + spec.rope_dim,)
        module = f"{theirs}.kv_a_proj_with_mqa"
        self.linear(f"{ours}.kv_down", [module], rows, size, spec.has_bias)
        self.norm(f"{ours}.kv_norm", f"{theirs}.kv_a_layernorm", spec.kv_rank)
        rows = (heads * (spec.nope_dim + spec.v_dim),)
        self.linear(f"{ours}.kv_up", [f"{theirs}.kv_b_proj"], rows, spec.kv_rank, False)
        width = heads * spec.v_dim
        self.linear(f"{ours}.out", [f"{theirs}.o_proj"], (size,), width, spec.has_bias)

    def _mlp(self, ours: str, modules: Sequence[str], spec: MLPSpec) -> None:
        size = self._spec.hidden_size
        rows = (spec.size,) * (1 + spec.is_gated)
        self.linear(f"{ours}.gate_up", modules[:-1], rows, size, spec.has_bias)
        self.linear(f"{ours}.down", modules[-1:], (size,), spec.size, spec.has_bias)

    def _experts(self, ours: str, theirs: str, spec: MoESpec) -> None:
        names, size = self._names, self._spec.hidden_size
        router = f"{theirs}.{names.router}"
        rows = (spec.num_experts,)
        self.linear(f"{ours}.router.gate", [router], rows, size, spec.has_router_bias)
        if spec.has_correction:
            name = f"{router}.e_score_correction_bias"
            self.vectors(f"{ours}.router.correction", name, spec.num_experts)
        if spec.shared_size:
            module = f"{theirs}.{names.shared_expert}"
            modules = [f"{module}.{name}" for name in (*names.expert_gate_up, names.expert_down)]
            self._mlp(f"{ours}.shared", modules, MLPSpec(size=spec.shared_size))
        if "{}" not in names.expert:
            self._fused_experts(ours, f"{theirs}.{names.expert}", spec)
            return
        experts = [f"{theirs}.{names.expert.format(i)}" for i in range(spec.num_experts)]
        inner = tuple(
            Tensor(f"{expert}.{name}.weight", (spec.size, size))
            for expert in experts
            for name in names.expert_gate_up
        )
        outer = tuple(
            Tensor(f"{expert}.{names.expert_down}.weight", (size, spec.size)) for expert in experts
        )
        gate_up = (spec.num_experts, 2 * spec.size, size)
        self.by_parameter[f"{ours}.gate_up.weight"] = Source(inner, gate_up, has_columns=True)
        down = (spec.num_experts, size, spec.size)
        self.by_parameter[f"{ours}.down.weight"] = Source(outer, down, has_columns=True)

    def _fused_experts(self, ours: str, theirs: str, spec: MoESpec) -> None:
        """All experts in one tensor [X, in, out], rows of gate and up in turns."""
        (gate_up_name,), down_name = self._names.expert_gate_up, self._names.expert_down
        count, size, inner = spec.num_experts, self._spec.hidden_size, spec.size
        for name, part, rows, width in (
            (gate_up_name, "gate_up", 2 * inner, size),
            (down_name, "down", size, inner),
        ):
            is_interleaved = part == "gate_up"
            tensor = Tensor(f"{theirs}.{name}", (count, width, rows))
            self.by_parameter[f"{ours}.{part}.weight"] = Source(
                (tensor,), (count, rows, width), True, is_interleaved, has_columns=True
            )
            if spec.has_bias:
                tensor = Tensor(f"{theirs}.{name}_bias", (count, rows))
                self.by_parameter[f"{ours}.{part}.bias"] = Source(
                    (tensor,), (count, rows), False, is_interleaved
                )
