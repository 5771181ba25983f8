"""Paged decode in Triton: programs over ranges of keys, and one to join the ranges of a row.

    work   row 0: [0, 320) [320, 600)   row 2: [0, 17)   row 3: ...      one list for all layers
    grid   (range, KV head): gathers 64 tokens at a time, each from its own block
           -> sums of values, maximum and sum of weights, per query head
    grid   (row, query head): joins them, adds the sink, divides

Tokens are gathered one by one, so a program's tile of keys is the same for every block size. A
range ends at its row's last token at most: what is left of a tile repeats the last one, and no dead
slot is read at all.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu.config import DecodeConfig, decode_config
from pallas_kernels.gpu.heads import MIN_ROWS, compute_dtypes, heads_of, power_of_two
from pallas_kernels.gpu.triton_softmax import Shape, attend, empty, lanes, load_queries
from pallas_kernels.gpu.work import DecodeWork, decode_work
from pallas_kernels.options import LOG2E, MASKED, Options, base2_sinks
from pallas_kernels.refs import Refs

JOIN_RANGES = 16
"""Ranges of a row that are read at once when they are joined."""


def paged_decode(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array | int,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    sm_scale: float,
    num_kv_heads: int,
    scales: jax.Array | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    num_rows: jax.Array | int | None = None,
    return_lse: bool = False,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attends one new token per row to the keys and values that a paged pool holds for the row.

    Args:
      q: [S, H, D]; keys and values of these tokens must already be in the pool.
      kv: [L, N+1, R, P, C]: row 2j keys and row 2j + 1 values of head j, or of C // D heads side by
        side.
      layer: Layer to read.
      block_tables: i32[S, M]; entries past the length are never used.
      context_lens: i32[S], tokens readable per row; 0 for padding rows.
      sm_scale: Factor on the logits.
      num_kv_heads: K.
      scales: f32[L, N+1, 2K, P], factors of an 8-bit pool.
      sliding_window: Keys that a query sees at most, itself included.
      soft_cap: Logits become `soft_cap * tanh(logits / soft_cap)`.
      sinks: f32[H], logit of a key with value zero that everybody sees.
      num_rows: Rows [0, num_rows) are computed; None: all.
      return_lse: Also return the log of the sum of `exp(logits)`, sinks included.
      config: Sizes of tiles; None: from a table or from the shapes.
      interpret: As in `pallas_call`.
    Returns: outputs [S, H, D] in q's dtype, zero in rows without tokens, and f32[S, H] or None.
    Raises: NotImplementedError for a shape that the kernel cannot serve.
    """
    heads = heads_of(q.shape[1:], kv, num_kv_heads, scales)
    num_seqs = q.shape[0]
    if not block_tables.size:
        lse = jnp.full(q.shape[:2], -jnp.inf, jnp.float32) if return_lse else None
        return jnp.zeros_like(q), lse
    if config is None:
        config = decode_config(heads, kv, q.dtype)
    shape = Shape(
        heads=heads,
        options=Options(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap),
        compute=compute_dtypes(q, kv),
        block_size=kv.shape[3],
        rows=max(power_of_two(heads.group), MIN_ROWS),
        block_k=config.block_k,
    )
    rows = jnp.asarray(num_seqs if num_rows is None else num_rows, jnp.int32)
    lens = jnp.clip(context_lens, 0, block_tables.shape[1] * kv.shape[3])
    lens = jnp.where(jnp.arange(num_seqs) < rows, lens, 0)
    work = decode_work(
        lens,
        config.block_k,
        sliding_window,
        num_slots=num_seqs + max(config.num_programs // num_kv_heads, 1),
    )
    parts = _attend(shape, config, work, layer, q, kv, scales, block_tables, interpret)
    return _join(shape, work, parts, sinks, rows, q, return_lse, interpret)


def _attend(
    shape: Shape,
    config: DecodeConfig,
    work: DecodeWork,
    layer: jax.Array | int,
    q: jax.Array,
    kv: jax.Array,
    scales: jax.Array | None,
    tables: jax.Array,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Sums of values f32[W, H, D], maxima and sums f32[W, H] of every range."""
    heads, num_slots = shape.heads, work.rows.shape[0]
    inputs = {
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "rows": work.rows,
        "begins": work.begins,
        "ends": work.ends,
        "tables": tables,
        "q": q,
        "kv": kv,
    }
    if scales is not None:
        inputs["scales"] = scales
    per_head = (num_slots, heads.num_heads)
    outputs = {"values": (*per_head, heads.head_dim), "maxima": per_head, "sums": per_head}

    def body(*refs: Any) -> None:
        _attend_kernel(Refs((*inputs, *outputs), refs), shape)

    return pl.pallas_call(
        body,
        grid=(num_slots, heads.num_kv_heads),
        out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in outputs.values()],
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_decode",
    )(*inputs.values())


def _attend_kernel(refs: Refs, shape: Shape) -> None:
    slot, kv_head = pl.program_id(0), pl.program_id(1)
    row, begin, end = refs.rows[slot], refs.begins[slot], refs.ends[slot]

    @pl.when(end > begin)
    def _():
        group, block_k = shape.heads.group, shape.block_k
        index = jnp.arange(shape.rows, dtype=jnp.int32)
        first = kv_head * group
        # Rows that no head uses repeat the last head, and are not stored.
        own = first + jnp.minimum(index, group - 1)
        queries = load_queries(refs.q, row, own[:, None], shape)

        def step(i: Any, state: Any) -> Any:
            tokens = begin + i * block_k + jnp.arange(block_k, dtype=jnp.int32)
            seen = (tokens < end)[None, :]
            tokens = jnp.minimum(tokens, end - 1)
            return attend(refs, shape, queries, row, kv_head, tokens, seen, state)

        steps = pl.cdiv(end - begin, block_k)
        maxima, sums, *values = jax.lax.fori_loop(0, steps, step, empty(shape))
        mask, head = index < group, first + index
        plt.store(refs.maxima.at[slot, head], maxima, mask=mask)
        plt.store(refs.sums.at[slot, head], sums, mask=mask)
        for piece, value in zip(shape.heads.pieces, values, strict=True):
            at = slot, head[:, None], lanes(piece)[None, :]
            plt.store(refs.values.at[at], value, mask=mask[:, None])


def _join(
    shape: Shape,
    work: DecodeWork,
    parts: tuple[jax.Array, ...],
    sinks: jax.Array | None,
    num_rows: jax.Array,
    q: jax.Array,
    has_lse: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Outputs [S, H, D] and, on request, log-sum-exp f32[S, H]."""
    inputs = {"num_rows": num_rows.reshape(1), "offsets": work.offsets}
    inputs |= dict(zip(("values", "maxima", "sums"), parts, strict=True))
    if sinks is not None:
        inputs["sinks"] = base2_sinks(sinks)
    outputs = {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    if has_lse:
        outputs["lse"] = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)

    def body(*refs: Any) -> None:
        _join_kernel(Refs((*inputs, *outputs), refs), shape)

    out = pl.pallas_call(
        body,
        grid=q.shape[:2],
        out_shape=list(outputs.values()),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="paged_decode_join",
    )(*inputs.values())
    return out[0], out[1] if has_lse else None


def _join_kernel(refs: Refs, shape: Shape) -> None:
    row, head = pl.program_id(0), pl.program_id(1)
    begin, end = refs.offsets[row], refs.offsets[row + 1]
    index = jnp.arange(JOIN_RANGES, dtype=jnp.int32)

    def step(i: Any, state: Any) -> Any:
        top, total, *values = state
        slot = begin + i * JOIN_RANGES + index
        is_own = slot < end
        slot = jnp.minimum(slot, end - 1)
        maxima = jnp.where(is_own, refs.maxima[slot, head], MASKED)
        new = jnp.maximum(top, jnp.max(maxima))
        decay = jnp.exp2(top - new)
        weights = jnp.where(is_own, jnp.exp2(maxima - new), 0.0)
        total = total * decay + jnp.sum(weights * refs.sums[slot, head])
        values = [
            value * decay
            + jnp.sum(
                weights[:, None] * refs.values[slot[:, None], head, lanes(piece)[None]], axis=0
            )
            for value, piece in zip(values, shape.heads.pieces, strict=True)
        ]
        return new, total, *values

    has_sinks = "sinks" in refs
    # A sink is a key of weight 1 relative to the maximum.
    top = refs.sinks[head] if has_sinks else jnp.float32(MASKED)
    zeros = [jnp.zeros((width,), jnp.float32) for _, width in shape.heads.pieces]
    state = top, jnp.float32(has_sinks), *zeros
    steps = pl.cdiv(end - begin, JOIN_RANGES)
    top, total, *values = jax.lax.fori_loop(0, steps, step, state)
    divisor = jnp.where(total > 0.0, total, 1.0)
    for piece, value in zip(shape.heads.pieces, values, strict=True):
        refs.out[row, head, lanes(piece)] = (value / divisor).astype(refs.out.dtype)
    if "lse" in refs:
        # Nothing but a sink of -inf is nothing.
        is_seen = (total > 0.0) & (top > MASKED) & (row < refs.num_rows[0])
        lse = (top + jnp.log2(divisor)) * (1 / LOG2E)
        refs.lse[row, head] = jnp.where(is_seen, lse, -jnp.inf)
