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
) -> jax.Array:
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
    Returns: float32 [T, H, D]; tokens of no row are zero.
    """
    tokens, heads, width = q.shape
    block_size = kv.shape[3]
    group = heads // (kv.shape[2] // 2)
    pool = np.asarray(kv[layer], np.float64)
    queries = np.asarray(q, np.float64)
    out = np.zeros((tokens, heads, width), np.float64)
    for row in range(len(context_lens)):
        start, stop = int(query_starts[row]), int(query_starts[row + 1])
        for token in range(start, stop):
            last = int(context_lens[row]) - (stop - token)
            seen = np.arange(last + 1)
            blocks, offsets = block_tables[row][seen // block_size], seen % block_size
            for head in range(heads):
                pair = 2 * (head // group)
                keys = pool[blocks, pair, offsets, :width]
                values = pool[blocks, pair + 1, offsets, :width]
                logits = keys @ queries[token, head] * sm_scale
                weights = np.exp(logits - logits.max())
                out[token, head] = weights @ values / weights.sum()
    return jnp.asarray(out, jnp.float32)
