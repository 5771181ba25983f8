"""Paged attention in plain XLA, for any device: the CPU path and the fallback of the others.

Online softmax over chunks of blocks in float32. Trip counts are data: a row costs its own length
and a padding row nothing.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.core import KVCache
from paged_jax.shapes import ceil_div

DECODE_CHUNK = 128
"""Tokens per chunk in decode: keys and values of a chunk stay in the second-level cache."""
PREFILL_CHUNK = 128
QUERY_TILE = 64
"""Query tokens per tile in prefill."""

# Finite, so that a difference of two masked maxima is 0 and not NaN.
_MASKED = -1e30

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum [K, Q], sum [K, Q] and accumulator [K, Q, D] of K heads and Q queries each."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What is computed; see `paged_jax.ops.paged_decode`."""

    sm_scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_lse: bool = False

    def kernel_options(self, cache: KVCache) -> dict[str, Any]:
        """Keyword arguments of `paged_decode` and `paged_prefill` in `pallas_kernels`."""
        return {
            "sm_scale": self.sm_scale,
            "num_kv_heads": cache.num_kv_heads,
            "scales": cache.scales if cache.is_quantized else None,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
            "return_lse": self.has_lse,
        }


def decode(
    q: jax.Array,
    cache: KVCache,
    layer: jax.Array | int,
    block_tables: jax.Array,
    context_lens: jax.Array,
    sinks: jax.Array | None,
    num_rows: jax.Array | int,
    attention: Attention,
) -> tuple[jax.Array, jax.Array | None]:
    """See `paged_jax.ops.paged_decode`; q is [S, H, D]. Returns outputs and log-sum-exp [S, H].

    What an option does not need is left out: a model compiles this once per layer.
    """
    rows, heads, width = q.shape
    if not rows:
        return q, _no_lse((0, heads), attention)
    tables, chunk = _padded_tables(block_tables, cache.block_size, DECODE_CHUNK)
    grouped = _scaled(q, attention).reshape(rows, cache.num_kv_heads, -1, width)
    start = _start(grouped.shape[1:], sinks)

    def one_row(i, carry):
        out, lse = carry
        length = context_lens[i]
        first = _first_seen(length - 1, attention)

        def one_chunk(c, carry):
            chunk_of_row = _read_chunk(cache, layer, tables[i], c, chunk)
            seen = _seen(chunk_of_row.positions, length[None] - 1, attention)
            return _accumulate(carry, grouped[i], chunk_of_row, seen, attention)

        carry = jax.lax.fori_loop(first // chunk, ceil_div(length, chunk), one_chunk, start)
        out = out.at[i].set(_normalise(carry).reshape(heads, width).astype(q.dtype))
        if lse is not None:
            lse = lse.at[i].set(_log_sum_exp(carry).reshape(heads))
        return out, lse

    empty = jnp.zeros_like(q), _no_lse((rows, heads), attention)
    return jax.lax.fori_loop(0, num_rows, one_row, empty)


def prefill(
    q: jax.Array,
    cache: KVCache,
    layer: jax.Array | int,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    sinks: jax.Array | None,
    first_row: jax.Array | int,
    num_rows: jax.Array | int,
    attention: Attention,
) -> tuple[jax.Array, jax.Array | None]:
    """See `paged_jax.ops.paged_prefill`; q is [T, H, D]. Returns outputs and log-sum-exp [T, H]."""
    total, heads, width = q.shape
    if not total or not block_tables.shape[0]:
        return jnp.zeros_like(q), _no_lse((total, heads), attention)
    kv_heads = cache.num_kv_heads
    group = heads // kv_heads
    tile = min(QUERY_TILE, total)
    tables, chunk = _padded_tables(block_tables, cache.block_size, PREFILL_CHUNK)
    # A tile may start at any token, so the last one reads past the end of the axis.
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    within = jnp.arange(tile, dtype=jnp.int32)
    sinks = None if sinks is None else jnp.repeat(sinks, tile)
    start_carry = _start((kv_heads, group * tile, width), sinks)

    def one_row(r, carry):
        start, length = query_starts[r], context_lens[r]
        count = query_starts[r + 1] - start

        def one_tile(t, carry):
            first = start + t * tile
            # [tile, H, D] -> [K, G * tile, D]
            queries = _scaled(jax.lax.dynamic_slice_in_dim(padded, first, tile), attention)
            queries = queries.reshape(tile, kv_heads, group, width).transpose(1, 2, 0, 3)
            queries = queries.reshape(kv_heads, group * tile, width)
            position = length - count + t * tile + within
            # The positions that the tile's live queries see: from the window of the first to the
            # last of all.
            begin = _first_seen(position[0], attention)
            end = jnp.minimum(length - count + (t + 1) * tile, length)

            def one_chunk(c, carry):
                chunk_of_row = _read_chunk(cache, layer, tables[r], c, chunk)
                last = jnp.minimum(position, length - 1)
                seen = jnp.tile(_seen(chunk_of_row.positions, last, attention), (group, 1))
                return _accumulate(carry, queries, chunk_of_row, seen, attention)

            out, lse = carry
            carry = jax.lax.fori_loop(begin // chunk, ceil_div(end, chunk), one_chunk, start_carry)
            result = _normalise(carry).reshape(kv_heads, group, tile, width).transpose(2, 0, 1, 3)
            result = result.reshape(tile, heads, width).astype(q.dtype)
            # The tile may reach into the next row or into padding, which it leaves alone.
            is_own = t * tile + within < count
            if lse is not None:
                lse = _merge(lse, _log_sum_exp(carry).reshape(heads, tile).T, is_own, first)
            return _merge(out, result, is_own, first), lse

        return jax.lax.fori_loop(0, ceil_div(count, tile), one_tile, carry)

    empty = jnp.zeros_like(padded), _no_lse(padded.shape[:2], attention)
    out, lse = jax.lax.fori_loop(first_row, num_rows, one_row, empty)
    return out[:total], None if lse is None else lse[:total]


def _scaled(q: jax.Array, attention: Attention) -> jax.Array:
    return q.astype(jnp.float32) * jnp.float32(attention.sm_scale)


def _first_seen(position: jax.Array, attention: Attention) -> jax.Array | int:
    """The first key that a query at this position sees."""
    if attention.sliding_window is None:
        return 0
    return jnp.maximum(position + 1 - attention.sliding_window, 0)


def _seen(keys: jax.Array, queries: jax.Array, attention: Attention) -> jax.Array:
    """bool[Q, C], which keys [C] queries [Q] see, by their positions."""
    key, query = keys[None, :], queries[:, None]
    seen = key <= query
    if attention.sliding_window is None:
        return seen
    return seen & (key > query - attention.sliding_window)


def _no_lse(shape: tuple[int, ...], attention: Attention) -> jax.Array | None:
    return jnp.full(shape, -jnp.inf, jnp.float32) if attention.has_lse else None


def _merge(whole: jax.Array, tile: jax.Array, is_own: jax.Array, first: jax.Array) -> jax.Array:
    """Writes the tokens of a tile that are its own at `first` of the token axis."""
    old = jax.lax.dynamic_slice_in_dim(whole, first, tile.shape[0])
    mask = is_own.reshape(-1, *[1] * (tile.ndim - 1))
    return jax.lax.dynamic_update_slice_in_dim(whole, jnp.where(mask, tile, old), first, axis=0)


def _padded_tables(tables: jax.Array, block_size: int, tokens: int) -> tuple[jax.Array, int]:
    """Tables whose width is a multiple of the chunk, and the chunk in tokens.

    `dynamic_slice` clamps at the end of a table: without the padding the last chunk would silently
    read earlier blocks again.
    """
    width = tables.shape[1]
    blocks = min(max(1, tokens // block_size), width)
    return jnp.pad(tables, ((0, 0), (0, -width % blocks))), blocks * block_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive tokens of one row; scales only of 8-bit pools."""

    keys: jax.Array  # f32[K, chunk, D]
    values: jax.Array  # f32[K, chunk, D]
    key_scales: jax.Array | None  # f32[K, chunk]
    value_scales: jax.Array | None
    positions: jax.Array  # i32[chunk]


def _read_chunk(
    cache: KVCache, layer: jax.Array | int, table: jax.Array, index: jax.Array, chunk: int
) -> Chunk:
    """Reads chunk `index` of the row that `table` belongs to."""
    kv_heads, width = cache.num_kv_heads, cache.kv.shape[4]
    blocks = chunk // cache.block_size
    ids = jax.lax.dynamic_slice_in_dim(table, index * blocks, blocks)
    gathered = _gather_rows(cache.kv, layer, ids)
    if cache.layout == "latent":
        keys = values = gathered.reshape(1, chunk, width)[..., : cache.head_dim].astype(jnp.float32)
    else:
        gathered = gathered.reshape(2, -1, chunk, width)
        if cache.heads_per_row > 1:
            heads = gathered.reshape(*gathered.shape[:3], cache.heads_per_row, cache.head_dim)
            gathered = heads.transpose(0, 1, 3, 2, 4).reshape(2, -1, chunk, cache.head_dim)
        keys, values = gathered[:, :kv_heads, :, : cache.head_dim].astype(jnp.float32)
    key_scales = value_scales = None
    if cache.is_quantized:
        scales = _gather_rows(cache.scales, layer, ids)
        key_scales, value_scales = scales.reshape(2, -1, chunk)[:, :kv_heads]
    return Chunk(
        keys=keys,
        values=values,
        key_scales=key_scales,
        value_scales=value_scales,
        positions=index * chunk + jnp.arange(chunk, dtype=jnp.int32),
    )


def _gather_rows(pool: jax.Array, layer: jax.Array | int, ids: jax.Array) -> jax.Array:
    """Blocks `ids` of one layer of [L, N+1, R, ...] as [R * ids, ...]: even rows, then odd ones.

    Keys of all heads come first, then values, so that no transpose or strided slice follows.
    """
    layers, num_blocks, pool_rows, *inner = pool.shape
    # One index per row of a flat view: XLA:CPU gathers that four times faster than by (layer,
    # block, head).
    flat = pool.reshape(layers * num_blocks * pool_rows, *inner)
    pair_rows = jnp.arange(pool_rows, dtype=jnp.int32)
    if pool_rows > 1:  # a latent head is no pair
        pair_rows = pair_rows.reshape(-1, 2).T
    pair_rows = pair_rows.reshape(-1, 1)
    rows = (layer * num_blocks + ids)[None, :] * pool_rows + pair_rows
    return flat.at[rows.reshape(-1)].get(mode="promise_in_bounds")


def _start(shape: tuple[int, ...], sinks: jax.Array | None) -> Carry:
    """Nothing seen yet; a sink counts as a key with this logit and a value of zero."""
    kv_heads, queries, width = shape
    maximum = jnp.full((kv_heads, queries), _MASKED, jnp.float32)
    if sinks is not None:
        # An infinite sink takes everything; infinity minus infinity would be NaN.
        sinks = jnp.minimum(jnp.asarray(sinks, jnp.float32), jnp.finfo(jnp.float32).max)
        maximum = sinks.reshape(kv_heads, queries)
    total = jnp.full((kv_heads, queries), 0.0 if sinks is None else 1.0, jnp.float32)
    return maximum, total, jnp.zeros((kv_heads, queries, width), jnp.float32)


def _accumulate(
    carry: Carry, queries: jax.Array, chunk: Chunk, seen: jax.Array, attention: Attention
) -> Carry:
    """Folds one chunk in. queries [K, Q, D], seen bool[Q or 1, chunk]."""
    running_max, running_sum, accumulator = carry
    precision = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("kqd,kcd->kqc", queries, chunk.keys, precision=precision)
    if chunk.key_scales is not None:
        logits = logits * chunk.key_scales[:, None, :]
    if attention.soft_cap is not None:
        cap = jnp.float32(attention.soft_cap)
        logits = cap * jnp.tanh(logits / cap)
    logits = jnp.where(seen[None], logits, _MASKED)
    new_max = jnp.maximum(running_max, jnp.max(logits, axis=-1))
    weights = jnp.where(seen[None], jnp.exp(logits - new_max[..., None]), 0.0)
    scale = jnp.exp(running_max - new_max)
    factors = weights
    if chunk.value_scales is not None:
        # The scale of a dead slot may be NaN too.
        factors = jnp.where(seen[None], weights * chunk.value_scales[:, None, :], 0.0)
    # Dead slots may hold NaN, and 0 * NaN is NaN: values are masked, not only logits.
    is_live = jnp.any(seen, axis=0)[None, :, None]
    values = jnp.where(is_live, chunk.values, 0.0)
    update = jnp.einsum("kqc,kcd->kqd", factors, values, precision=precision)
    return (
        new_max,
        running_sum * scale + jnp.sum(weights, axis=-1),
        accumulator * scale[..., None] + update,
    )


def _normalise(carry: Carry) -> jax.Array:
    """Outputs [K, Q, D]; zero where nothing was seen."""
    _, total, accumulator = carry
    return accumulator / jnp.where(total > 0.0, total, 1.0)[..., None]


def _log_sum_exp(carry: Carry) -> jax.Array:
    """Log-sum-exp [K, Q]; -inf where nothing was seen."""
    maximum, total, _ = carry
    has_seen = total > 0.0
    return jnp.where(has_seen, maximum + jnp.log(jnp.where(has_seen, total, 1.0)), -jnp.inf)
