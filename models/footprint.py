"""How much memory a model takes on each rank, by arithmetic on its sizes; nothing is made."""

from paged_jax.models.parallel import Share
from paged_jax.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
)

_ALONE = Share(axis="tp", num_ranks=1)


def parameters_per_rank(spec: DecoderSpec, share: Share | None = None) -> int:
    """Numbers that a rank keeps, padding and copies included; None: of the whole model."""
    own = _ALONE if share is None else share
    vocab = spec.vocab_size if share is None else share.vocab_size(spec.vocab_size)
    total = (1 if spec.is_tied else 2) * vocab * spec.hidden_size
    if spec.has_learned_positions:
        total += spec.max_position_embeddings * spec.hidden_size
    norm = _norm(spec.norm, spec.hidden_size)
    total += norm
    for layer in spec.layers:
        total += norm * 2 * (layer.has_pre_norms + layer.has_post_norms)
        if isinstance(layer.attention, AttentionSpec):
            total += _attention(layer.attention, spec, own)
        else:
            total += _latent(layer.attention, spec, own)
        is_dense = isinstance(layer.mlp, MLPSpec)
        mlp = layer.mlp
        total += _mlp(mlp, spec, own) if is_dense else _experts(mlp, spec, own)  # type: ignore[arg-type]
    return total


def kv_bytes_per_token(spec: DecoderSpec, itemsize: int, share: Share | None = None) -> int:
    """Bytes of the pool of a rank per token, without scales and without padding of a platform."""
    own = _ALONE if share is None else share
    total = 0
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, AttentionSpec):
            _, heads = own.heads(attention.num_heads, attention.num_kv_heads)
            total += 2 * heads * attention.head_dim * itemsize
        else:
            total += (attention.kv_rank + attention.rope_dim) * itemsize
    return total


def features_per_token(spec: DecoderSpec, share: Share | None = None) -> int:
    """Numbers per token that are alive at once in the widest layer of a rank: the stream with what
    is added to it, and the widest of what attention and MLP make of it."""
    own = _ALONE if share is None else share
    return 4 * spec.hidden_size + max(_features(layer, own) for layer in spec.layers)


def _features(layer: LayerSpec, share: Share) -> int:
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, AttentionSpec):
        heads, kv_heads = share.heads(attention.num_heads, attention.num_kv_heads)
        inside = 2 * (heads + kv_heads) * attention.head_dim
    else:
        heads = share.heads(attention.num_heads, 1)[0]
        inside = 2 * heads * (attention.kv_rank + attention.rope_dim)
    if isinstance(mlp, MLPSpec):
        return max(inside, (2 + mlp.is_gated) * share.width(mlp.size))
    shared = 3 * share.width(mlp.shared_size) if mlp.shared_size else 0
    return max(inside, mlp.num_chosen * 3 * share.width(mlp.size) + shared)


def summed_bytes_per_token(spec: DecoderSpec, itemsize: int) -> int:
    """Bytes that the ranks sum per token: after the embedding, and twice in every layer.

    A ring of n ranks sends 2 (n - 1) / n times as many from each device.
    """
    return (1 + 2 * spec.num_layers) * spec.hidden_size * itemsize


def _norm(norm: NormSpec, size: int) -> int:
    return (2 if norm.kind == "layer" else 1) * size


def _attention(spec: AttentionSpec, model: DecoderSpec, share: Share) -> int:
    heads, kv_heads = share.heads(spec.num_heads, spec.num_kv_heads)
    q, kv, size = heads * spec.head_dim, kv_heads * spec.head_dim, model.hidden_size
    total = (q + 2 * kv) * size + q * size
    total += (q + 2 * kv) * spec.has_qkv_bias + size * spec.has_out_bias
    if spec.qk_norm == "all":
        total += _norm(model.norm, q) + _norm(model.norm, kv)
    elif spec.qk_norm == "head":
        total += 2 * _norm(model.norm, spec.head_dim)
    return total + heads * spec.has_sinks


def _latent(spec: LatentAttentionSpec, model: DecoderSpec, share: Share) -> int:
    heads, size = share.heads(spec.num_heads, 1)[0], model.hidden_size
    width, rank = heads * (spec.nope_dim + spec.rope_dim), spec.q_rank
    if rank is None:
        total = width * size
    else:
        total = rank * size + rank * spec.has_bias + _norm(model.norm, rank) + width * rank
    down = spec.kv_rank + spec.rope_dim
    total += down * size + down * spec.has_bias + _norm(model.norm, spec.kv_rank)
    total += heads * (spec.nope_dim + spec.v_dim) * spec.kv_rank
    return total + heads * spec.v_dim * size + size * spec.has_bias


def _mlp(spec: MLPSpec, model: DecoderSpec, share: Share) -> int:
    own, size = share.width(spec.size), model.hidden_size
    rows = (1 + spec.is_gated) * own
    return rows * size + own * size + (rows + size) * spec.has_bias


def _experts(spec: MoESpec, model: DecoderSpec, share: Share) -> int:
    own, size, count = share.width(spec.size), model.hidden_size, spec.num_experts
    total = count * size + count * (spec.has_router_bias + spec.has_correction)
    total += 3 * count * own * size + count * (2 * own + size) * spec.has_bias
    if spec.shared_size:
        total += _mlp(MLPSpec(size=spec.shared_size), model, share)
    return total
