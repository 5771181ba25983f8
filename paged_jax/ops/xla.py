"""Paged attention in plain XLA, for any device: the CPU path and the fallback of the others.

Online softmax over chunks of blocks in float32. Trip counts are data: a row costs its own length
and a padding row nothing.
"""

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


def decode(
    q: jax.Array,
    cache: KVCache,
    layer: jax.Array | int,
    block_tables: jax.Array,
    context_lens: jax.Array,
    num_rows: jax.Array | int,
    sm_scale: float,
) -> jax.Array:
    """See `paged_jax.ops.paged_decode`; q is [S, H, D]."""
    rows, heads, width = q.shape
    tables, chunk = _padded_tables(block_tables, cache.block_size, DECODE_CHUNK)
    grouped = (q.astype(jnp.float32) * jnp.float32(sm_scale)).reshape(
        rows, cache.num_kv_heads, -1, width
    )

    def one_row(i, out):
        length = context_lens[i]

        def one_chunk(c, carry):
            keys, values, positions = _read_chunk(cache, layer, tables[i], c, chunk)
            live = (positions < length)[None, :]
            return _accumulate(carry, grouped[i], keys, values, live)

        carry = _empty(grouped.shape[1:])
        carry = jax.lax.fori_loop(0, ceil_div(length, chunk), one_chunk, carry)
        return out.at[i].set(_normalise(carry).reshape(heads, width).astype(q.dtype))

    return jax.lax.fori_loop(0, num_rows, one_row, jnp.zeros_like(q))


def prefill(
    q: jax.Array,
    cache: KVCache,
    layer: jax.Array | int,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    first_row: jax.Array | int,
    num_rows: jax.Array | int,
    sm_scale: float,
) -> jax.Array:
    """See `paged_jax.ops.paged_prefill`; q is [T, H, D]."""
    total, heads, width = q.shape
    kv_heads = cache.num_kv_heads
    group = heads // kv_heads
    tile = min(QUERY_TILE, total)
    tables, chunk = _padded_tables(block_tables, cache.block_size, PREFILL_CHUNK)
    # A tile may start at any token, so the last one reads past the end of the axis.
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    within = jnp.arange(tile, dtype=jnp.int32)

    def one_row(r, out):
        start, length = query_starts[r], context_lens[r]
        count = query_starts[r + 1] - start

        def one_tile(t, out):
            first = start + t * tile
            # [tile, H, D] -> [K, G * tile, D]
            queries = jax.lax.dynamic_slice_in_dim(padded, first, tile)
            queries = queries.astype(jnp.float32) * jnp.float32(sm_scale)
            queries = queries.reshape(tile, kv_heads, group, width).transpose(1, 2, 0, 3)
            queries = queries.reshape(kv_heads, group * tile, width)
            position = length - count + t * tile + within
            # The last position that the tile's live queries see, plus one.
            end = jnp.minimum(length - count + (t + 1) * tile, length)

            def one_chunk(c, carry):
                keys, values, positions = _read_chunk(cache, layer, tables[r], c, chunk)
                seen = positions[None, :] <= jnp.minimum(position, length - 1)[:, None]
                return _accumulate(carry, queries, keys, values, jnp.tile(seen, (group, 1)))

            carry = _empty(queries.shape)
            carry = jax.lax.fori_loop(0, ceil_div(end, chunk), one_chunk, carry)
            result = _normalise(carry).reshape(kv_heads, group, tile, width)
            result = result.transpose(2, 0, 1, 3).reshape(tile, heads, width).astype(q.dtype)
            # The tile may reach into the next row or into padding, which it leaves alone.
            is_own = (t * tile + within < count)[:, None, None]
            old = jax.lax.dynamic_slice_in_dim(out, first, tile)
            result = jnp.where(is_own, result, old)
            return jax.lax.dynamic_update_slice_in_dim(out, result, first, axis=0)

        return jax.lax.fori_loop(0, ceil_div(count, tile), one_tile, out)

    return jax.lax.fori_loop(first_row, num_rows, one_row, jnp.zeros_like(padded))[:total]


def _padded_tables(tables: jax.Array, block_size: int, tokens: int) -> tuple[jax.Array, int]:
    """Tables whose width is a multiple of the chunk, and the chunk in tokens.

    `dynamic_slice` clamps at the end of a table: without the padding the last chunk would silently
    read earlier blocks again.
    """
    width = tables.shape[1]
    blocks = min(max(1, tokens // block_size), width)
    return jnp.pad(tables, ((0, 0), (0, -width % blocks))), blocks * block_size


def _read_chunk(
    cache: KVCache, layer: jax.Array | int, table: jax.Array, index: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values [K, chunk, D] in float32 and positions [chunk] of one chunk of a row."""
    layers, num_blocks, pool_rows, size, width = cache.kv.shape
    kv_heads, blocks = cache.num_kv_heads, chunk // size
    ids = jax.lax.dynamic_slice_in_dim(table, index * blocks, blocks)
    # One index per [P, C] row of a flat view: XLA:CPU gathers that four times faster than by
    # (layer, block, head). Keys of all heads come first, then values, so that no transpose or
    # strided slice follows.
    flat = cache.kv.reshape(layers * num_blocks * pool_rows, size * width)
    pair_rows = jnp.arange(pool_rows, dtype=jnp.int32).reshape(-1, 2).T.reshape(-1, 1)
    rows = (layer * num_blocks + ids)[None, :] * pool_rows + pair_rows
    gathered = flat.at[rows.reshape(-1)].get(mode="promise_in_bounds")
    gathered = gathered.reshape(2, pool_rows // 2, chunk, width)
    if cache.heads_per_row > 1:
        heads = gathered.reshape(2, pool_rows // 2, chunk, cache.heads_per_row, cache.head_dim)
        gathered = heads.transpose(0, 1, 3, 2, 4).reshape(2, -1, chunk, cache.head_dim)
    gathered = gathered[:, :kv_heads, :, : cache.head_dim]
    keys, values = gathered.astype(jnp.float32)
    return keys, values, index * chunk + jnp.arange(chunk)


def _empty(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Running maximum [K, Q], sum [K, Q] and accumulator [K, Q, D] of nothing."""
    kv_heads, queries, width = shape
    return (
        jnp.full((kv_heads, queries), _MASKED, jnp.float32),
        jnp.zeros((kv_heads, queries), jnp.float32),
        jnp.zeros((kv_heads, queries, width), jnp.float32),
    )


def _accumulate(
    carry: tuple[jax.Array, jax.Array, jax.Array],
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Folds one chunk in. queries [K, Q, D], keys and values [K, C, D], seen bool[Q or 1, C]."""
    running_max, running_sum, accumulator = carry
    precision = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("kqd,kcd->kqc", queries, keys, precision=precision)
    logits = jnp.where(seen[None], logits, _MASKED)
    new_max = jnp.maximum(running_max, jnp.max(logits, axis=-1))
    weights = jnp.where(seen[None], jnp.exp(logits - new_max[..., None]), 0.0)
    scale = jnp.exp(running_max - new_max)
    # Dead slots may hold NaN, and 0 * NaN is NaN: values are masked, not only logits.
    is_live = jnp.any(seen, axis=0)[None, :, None]
    update = jnp.einsum(
        "kqc,kcd->kqd", weights, jnp.where(is_live, values, 0.0), precision=precision
    )
    return (
        new_max,
        running_sum * scale + jnp.sum(weights, axis=-1),
        accumulator * scale[..., None] + update,
    )


def _normalise(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Outputs [K, Q, D]; zero where nothing was seen."""
    _, total, accumulator = carry
    return accumulator / jnp.where(total > 0.0, total, 1.0)[..., None]
