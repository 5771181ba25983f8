"""Oracle for every paged-attention backend: plain array code on the host, one query at a time.

It shares no helper, mask or constant with a kernel. It is slow, and right by inspection: for each
query it collects the keys and values of the positions it may see out of the pool, and applies an
ordinary softmax to exactly those. Nothing is masked because nothing unseen is read. It computes in
float64 and rounds once to float32, so that what a comparison shows is the backend's error.
"""

import jax
import jax.numpy as jnp
import numpy as np


def attention_reference(
    q: jax.Array,
    kv: jax.Array,
    layer: int,
    block_tables: np.ndarray,
    context_lens: np.ndarray,
    query_starts: np.ndarray,
    sm_scale: float,
    *,
    scales: jax.Array | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of packed rows over a paged pool. Runs on the host, not under `jit`.

    Args:
      q: [T, H, D]; row r owns tokens [query_starts[r], query_starts[r + 1]), which are the last
        of its `context_lens[r]` positions.
      kv: [L, N+1, 2K, P, C] with row 2h keys and row 2h + 1 values of head h; C >= D.
      layer: Layer to read.
      block_tables: i32[R, M].
      context_lens: i32[R].
      query_starts: i32[R+1].
      sm_scale: Factor on the logits.
      scales: f32[L, N+1, 2K, P], factors of an 8-bit pool.
      sliding_window: Keys seen at most, the query's own included.
      soft_cap: Bound on the logits.
      sinks: f32[H], logit of a key with value zero.
    Returns: float32 outputs [T, H, D], zero for tokens of no row, and the log of the sum of
      exp(logits) [T, H], sink included, -inf for tokens of no row.
    """
    tokens, heads, width = q.shape
    block_size = kv.shape[3]
    group = heads // (kv.shape[2] // 2)
    pool = np.asarray(kv[layer], np.float64)
    if scales is not None:
        pool = pool * np.asarray(scales[layer], np.float64)[..., None]
    queries = np.asarray(q, np.float64)
    out = np.zeros((tokens, heads, width), np.float64)
    lse = np.full((tokens, heads), -np.inf)
    for row in range(len(context_lens)):
        start, stop = int(query_starts[row]), int(query_starts[row + 1])
        for token in range(start, stop):
            last = int(context_lens[row]) - (stop - token)
            seen = np.arange(last + 1)
            if sliding_window is not None:
                seen = seen[-sliding_window:]
            blocks, offsets = block_tables[row][seen // block_size], seen % block_size
            for head in range(heads):
                pair = 2 * (head // group)
                keys = pool[blocks, pair, offsets, :width]
                values = pool[blocks, pair + 1, offsets, :width]
                logits = keys @ queries[token, head] * sm_scale
                if soft_cap is not None:
                    logits = np.tanh(logits / soft_cap) * soft_cap
                if sinks is not None:
                    logits = np.append(logits, np.float64(sinks[head]))
                    values = np.vstack([values, np.zeros(width)])
                weights = np.exp(logits - logits.max())
                out[token, head] = weights @ values / weights.sum()
                lse[token, head] = np.log(weights.sum()) + logits.max()
    return jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32)
