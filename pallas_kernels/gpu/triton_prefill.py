"""Paged prefill in Triton: one program per tile of a row's new tokens and KV head.

    work   row 0: tokens [0, 16) [16, 20)   row 1: [20, 36) ...          one list for all layers
    grid   (tile, KV head): rows = tokens x query heads of the KV head, read and written in place
           keys of the cached prefix and of the chunk itself, 64 at a time, up to the tile's last

Tokens of no row are tiles without keys, so the whole output is written.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu.config import PrefillConfig, prefill_config
from pallas_kernels.gpu.heads import compute_dtypes, heads_of, power_of_two
from pallas_kernels.gpu.triton_softmax import Shape, attend, empty, lanes, load_queries
from pallas_kernels.gpu.work import prefill_work
from pallas_kernels.options import LOG2E, Options, base2_sinks
from pallas_kernels.refs import Refs


def paged_prefill(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array | int,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    *,
    sm_scale: float,
    num_kv_heads: int,
    scales: jax.Array | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    first_row: jax.Array | int = 0,
    num_rows: jax.Array | int | None = None,
    return_lse: bool = False,
    config: PrefillConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attends several new tokens per row, causally, to the cached prefix and to each other.

    Args:
      q: [T, H, D], rows one after another; keys and values must already be in the pool.
      kv: [L, N+1, R, P, C], as in `paged_decode`.
      layer: Layer to read.
      block_tables: i32[R, M]; entries past the length are never used.
      context_lens: i32[R], tokens readable per row, the new ones included.
      query_starts: i32[R+1], prefix sum of new tokens per row.
      sm_scale: Factor on the logits.
      num_kv_heads: K.
      scales: f32[L, N+1, 2K, P], factors of an 8-bit pool.
      sliding_window: Keys that a query sees at most, itself included.
      soft_cap: Logits become `soft_cap * tanh(logits / soft_cap)`.
      sinks: f32[H], logit of a key with value zero that everybody sees.
      first_row: Rows [first_row, num_rows) are computed.
      num_rows: See `first_row`; None: all.
      return_lse: Also return the log of the sum of `exp(logits)`, sinks included.
      config: Sizes of tiles; None: from a table or from the shapes.
      interpret: As in `pallas_call`.
    Returns: outputs [T, H, D] in q's dtype, zero for tokens of no computed row, and f32[T, H],
      -inf for those, or None.
    Raises: NotImplementedError for a shape that the kernel cannot serve.
    """
    heads = heads_of(q.shape[1:], kv, num_kv_heads, scales)
    if not block_tables.size or not q.size:
        lse = jnp.full(q.shape[:2], -jnp.inf, jnp.float32) if return_lse else None
        return jnp.zeros_like(q), lse
    if config is None:
        config = prefill_config(heads, kv, q.dtype)
    shape = Shape(
        heads=heads,
        options=Options(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap),
        compute=compute_dtypes(q, kv),
        block_size=kv.shape[3],
        rows=max(power_of_two(heads.group), config.tile_rows),
        block_k=config.block_k,
    )
    work = prefill_work(
        jnp.clip(context_lens, 0, block_tables.shape[1] * kv.shape[3]),
        query_starts,
        first_row,
        jnp.asarray(block_tables.shape[0] if num_rows is None else num_rows, jnp.int32),
        shape.rows // heads.group,
        num_tokens=q.shape[0],
    )
    inputs = {
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "rows": work.rows,
        "begins": work.begins,
        "ends": work.ends,
        "positions": work.positions,
        "tables": block_tables,
        "q": q,
        "kv": kv,
    }
    if scales is not None:
        inputs["scales"] = scales
    if sinks is not None:
        inputs["sinks"] = base2_sinks(sinks)
    outputs = {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    if return_lse:
        outputs["lse"] = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)

    def body(*refs: Any) -> None:
        _kernel(Refs((*inputs, *outputs), refs), shape)

    out = pl.pallas_call(
        body,
        grid=(work.rows.shape[0], num_kv_heads),
        out_shape=list(outputs.values()),
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_prefill",
    )(*inputs.values())
    return out[0], out[1] if return_lse else None


def _kernel(refs: Refs, shape: Shape) -> None:
    tile, kv_head = pl.program_id(0), pl.program_id(1)
    begin, end = refs.begins[tile], refs.ends[tile]
    pl.when(end > begin)(lambda: _compute(refs, shape, tile, kv_head, begin, end))


def _compute(refs: Refs, shape: Shape, tile: Any, kv_head: Any, begin: Any, end: Any) -> None:
    row, first = refs.rows[tile], refs.positions[tile]
    group, block_k = shape.heads.group, shape.block_k
    window = shape.options.sliding_window
    index = jnp.arange(shape.rows, dtype=jnp.int32)
    token, head = begin + index // group, kv_head * group + index % group
    # Rows that no token has repeat the last one, and are not stored.
    queries = load_queries(refs.q, jnp.minimum(token, end - 1)[:, None], head[:, None], shape)
    position = first + index // group
    num_keys = first + (end - begin)
    low = shape.options.first_seen(first)

    def step(i: Any, state: Any, *, is_whole: bool) -> Any:
        key = low + i * block_k + jnp.arange(block_k, dtype=jnp.int32)
        if is_whole:
            return attend(refs, shape, queries, row, kv_head, key, None, state)
        seen = key[None, :] <= position[:, None]
        if window is not None:
            seen &= key[None, :] > position[:, None] - window
        key = jnp.minimum(key, num_keys - 1)
        return attend(refs, shape, queries, row, kv_head, key, seen, state)

    state = list(empty(shape))
    if "sinks" in refs:
        # A sink is a key of weight 1 relative to the maximum.
        state[0], state[1] = refs.sinks[head], jnp.ones_like(state[1])
    steps = pl.cdiv(num_keys - low, block_k)
    # Keys in front of the tile are seen by all of its tokens, unless there is a window. The tokens
    # of no row have positions below zero.
    whole = 0 if window is not None else jnp.maximum(first + 1, 0) // block_k
    state = tuple(state)
    if window is None:
        state = jax.lax.fori_loop(0, whole, lambda i, s: step(i, s, is_whole=True), state)
    maxima, sums, *values = jax.lax.fori_loop(
        whole, steps, lambda i, s: step(i, s, is_whole=False), state
    )
    mask = token < end
    divisor = jnp.where(sums > 0.0, sums, 1.0)
    for piece, value in zip(shape.heads.pieces, values, strict=True):
        at = token[:, None], head[:, None], lanes(piece)[None, :]
        out = (value / divisor[:, None]).astype(refs.out.dtype)
        out = jnp.where(num_keys > 0, out, jnp.zeros((), out.dtype))
        plt.store(refs.out.at[at], out, mask=mask[:, None])
    if "lse" in refs:
        lse = (maxima + jnp.log2(divisor)) * (1 / LOG2E)
        lse = jnp.where((sums > 0.0) & (num_keys > 0), lse, -jnp.inf)
        plt.store(refs.lse.at[token, head], lse, mask=mask)
