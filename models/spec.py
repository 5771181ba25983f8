"""What a decoder is made of, without any architecture's name."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: base, and how its frequencies are stretched for long contexts."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    freq_divisors: tuple[float, ...] = ()
    """Divisor of each frequency, where a checkpoint stores them ready-made."""


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Sizes and switches of a pre-norm decoder with gated MLP and rotary attention."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    is_tied: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even and at least 2")
        divisors = len(self.rope.freq_divisors)
        if divisors not in (0, self.head_dim // 2):
            raise ValueError(
                f"freq_divisors ({divisors} values) must have head_dim / 2 ({self.head_dim // 2})"
            )
