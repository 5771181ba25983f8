"""What a decoder is made of, without any architecture's name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: base, and how its frequencies are stretched for long contexts."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    fraction: float = 1.0
    """Part of each head that is rotated; the rest passes."""
    original_max_position: int = 8192
    """Context of the training before it was stretched."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    """YaRN's band begins and ends at whole features."""
    attention_factor: float = 1.0
    """Scales cosines and sines, so its square scales the logits."""
    freq_divisors: tuple[float, ...] = ()
    """Divisor of each frequency, where a checkpoint stores them ready-made."""
    long_divisors: tuple[float, ...] = ()
    """The same for contexts longer than `original_max_position` (LongRoPE)."""
    is_interleaved: bool = False
    """Pairs are neighbours (0, 1), (2, 3) and not halves (0, D/2), (1, D/2 + 1)."""


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A normalisation layer."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    """Added to the stored weight: 1 where checkpoints store the difference to 1."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    """None: no rotation in this layer."""
    sm_scale: float | None = None
    """Factor on the logits; None: head_dim ** -0.5."""
    sliding_window: int | None = None
    """Keys that a query sees at most, itself included."""
    soft_cap: float | None = None
    has_sinks: bool = False
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    """Queries and keys are normalised before rotation: per head, or all heads as one vector."""

    def __post_init__(self) -> None:
        _check_positive(self, "num_heads", "num_kv_heads")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even and at least 2")
        if self.sliding_window is not None:
            _check_positive(self, "sliding_window")
        if self.rope is not None:
            _check_rope(self.rope, self.head_dim)


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention: all heads share one latent vector and one rotated key."""

    num_heads: int
    q_rank: int | None
    """Width of the bottleneck of queries; None: projected at once."""
    kv_rank: int
    nope_dim: int
    """Features of a head that are not rotated."""
    rope_dim: int
    v_dim: int
    rope: RopeSpec
    sm_scale: float
    has_bias: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, "num_heads", "kv_rank", "nope_dim", "v_dim")
        if self.q_rank is not None:
            _check_positive(self, "q_rank")
        if self.rope_dim < 2 or self.rope_dim % 2:
            raise ValueError(f"rope_dim ({self.rope_dim}) must be even and at least 2")
        _check_rope(self.rope, self.rope_dim)


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """A dense feed-forward layer."""

    size: int
    activation: Activation = "silu"
    is_gated: bool = True
    has_bias: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, "size")


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A mixture of experts: which of them a token visits, and what each computes."""

    num_experts: int
    num_chosen: int
    """Experts per token."""
    size: int
    """Width inside one expert."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores, over all experts."""
    is_renormalised: bool = True
    """Weights of the chosen experts sum to 1."""
    scale: float = 1.0
    """Factor on the weights."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Experts come from the best groups only."""
    has_correction: bool = False
    """A bias on the scores that chooses but does not weigh."""
    has_router_bias: bool = False
    activation: Activation = "silu"
    activation_limit: float = 7.0
    activation_alpha: float = 1.702
    has_bias: bool = False
    shared_size: int = 0
    """Width of an expert that every token visits; 0: there is none."""

    def __post_init__(self) -> None:
        _check_positive(self, "num_experts", "num_chosen", "size", "num_groups")
        if self.num_chosen > self.num_experts:
            raise ValueError(
                f"num_chosen ({self.num_chosen}) must be at most num_experts ({self.num_experts})"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_experts ({self.num_experts}) must be a multiple of "
                f"num_groups ({self.num_groups})"
            )
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ValueError(
                f"num_chosen_groups ({self.num_chosen_groups}) must be in 1..{self.num_groups}"
            )
        if self.num_chosen > self.num_chosen_groups * (self.num_experts // self.num_groups):
            raise ValueError(
                f"num_chosen ({self.num_chosen}) exceeds the experts of "
                f"{self.num_chosen_groups} groups"
            )


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One block: attention and feed-forward, each with norms before and after."""

    attention: AttentionSpec | LatentAttentionSpec
    mlp: MLPSpec | MoESpec
    has_pre_norms: bool = True
    has_post_norms: bool = False
    """Normalises what attention and MLP give, before it is added to the residual."""


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Sizes and switches of a decoder-only language model."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position_embeddings: int
    context_length: int | None = None
    """Longest sequence that will be served; frequencies of long contexts are chosen by it.
    None: max_position_embeddings."""
    is_tied: bool = False
    """The embedding is the output head."""
    has_learned_positions: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "vocab_size", "hidden_size", "max_position_embeddings")
        if not self.layers:
            raise ValueError("num_layers (0) must be at least 1")

    @property
    def num_layers(self) -> int:
        """Blocks."""
        return len(self.layers)


def uniform_spec(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    mlp_size: int,
    max_position_embeddings: int,
    norm_eps: float = 1e-6,
    rope: RopeSpec | None = None,
    **options: Any,
) -> DecoderSpec:
    """A decoder whose layers are all alike: pre-norm, rotary, gated MLP, as Llama is.

    Args:
      rope: None: the default `RopeSpec`.
      **options: More fields of `DecoderSpec`.
    """
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=RopeSpec() if rope is None else rope,
    )
    layer = LayerSpec(attention=attention, mlp=MLPSpec(size=mlp_size))
    return DecoderSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(layer,) * num_layers,
        norm=NormSpec(eps=norm_eps),
        max_position_embeddings=max_position_embeddings,
        **options,
    )


def _check_positive(spec: Any, *names: str) -> None:
    for name in names:
        if getattr(spec, name) < 1:
            raise ValueError(f"{name} ({getattr(spec, name)}) must be at least 1")


def _check_rope(rope: RopeSpec, head_dim: int) -> None:
    rotated = rope.fraction * head_dim
    if not 0.0 < rope.fraction <= 1.0 or int(rotated) < 2 or int(rotated) % 2:
        raise ValueError(
            f"the rotated part of a head ({rope.fraction} of {head_dim}) must be an even number"
        )
    _check_divisors("freq_divisors", rope.freq_divisors, int(rotated) // 2)
    _check_divisors("long_divisors", rope.long_divisors, int(rotated) // 2)


def _check_divisors(name: str, divisors: Sequence[float], expected: int) -> None:
    if len(divisors) not in (0, expected):
        raise ValueError(
            f"{name} ({len(divisors)} values) must have one per rotated pair ({expected})"
        )
