"""Paged attention: argument checks and the choice of a backend."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paged_jax import core
from paged_jax.core import KVCache
from paged_jax.ops import kernels, xla
from paged_jax.ops.dispatch import Backend, check_backend, run

SMALLEST_CAP = 1e-6
"""Soft caps below this leave float32: the quotient overflows, and 0 / 0 is NaN."""
LARGEST_CAP = 1e30
"""Soft caps above this do nothing but leave float32."""


def paged_decode(
    q: Float[Array, "S H D"],
    cache: KVCache,
    layer: Int[Array, ""] | int,
    block_tables: Int[Array, "S M"],
    context_lens: Int[Array, " S"],
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_lse: bool = False,
    num_rows: Int[Array, ""] | int | None = None,
    backend: Backend | None = None,
    interpret: Any = False,
) -> Float[Array, "S H D"] | tuple[Float[Array, "S H D"], Float[Array, "S H"]]:
    """Attends one new token per row to that row's cached keys and values.

    Args:
      q: Queries; the key and value of each must already be written.
      cache: The whole pool.
      layer: Layer to read.
      block_tables: Physical blocks per row; entries past the length are never used.
      context_lens: Tokens readable per row, the new one included; 0 for padding rows.
      sm_scale: Factor on the logits before softmax, usually `D ** -0.5`.
      sliding_window: Keys that a query sees at most, itself included; None: all.
      soft_cap: Logits become `soft_cap * tanh(logits / soft_cap)`, after scale and before mask.
      sinks: Logit per head of a key that everybody sees and whose value is zero.
      return_lse: Also return the log of the sum of `exp(logits)`, sink included.
      num_rows: Rows [0, num_rows) are computed, the others are zero; None: all.
      backend: A named backend runs or raises; None chooses by platform and shape.
      interpret: Of a kernel that is named, as in `pallas_call`.
    Returns: Outputs in q's dtype; rows with nothing to attend to are zero. With `return_lse`
      (outputs, log-sum-exp in float32), -inf in those rows without sinks.
    Raises: ValueError if H is not a multiple of K, D is not the pool's, or an option is out of
      range; NotImplementedError for what a named backend cannot serve.
    Source: Kwon et al. 2023, section 4.1; Milakov and Gimelshein 2018 (online softmax).
    """
    _check(q, cache, layer, sinks, backend, interpret)
    tables = core.as_i32(block_tables, "block_tables")
    lens = core.as_i32(context_lens, "context_lens")
    if tables.shape[:1] != q.shape[:1] or lens.shape != q.shape[:1]:
        raise ValueError(
            f"block_tables {tables.shape} and context_lens {lens.shape} must have a row per query "
            f"({q.shape[0]})"
        )
    if not tables.shape[1]:
        raise ValueError(f"block_tables {tables.shape} must have at least one block per row")
    attention = _options(sm_scale, sliding_window, soft_cap, return_lse)
    rows = q.shape[0] if num_rows is None else num_rows
    out, lse = run(
        backend,
        cache,
        q.shape[1],
        functools.partial(xla.decode, attention=attention),
        kernels.by_backend(kernels.paged_decode, attention=attention, interpret=interpret),
        q,
        cache,
        jnp.asarray(layer, jnp.int32),
        tables,
        lens,
        sinks,
        jnp.asarray(rows, jnp.int32),
    )
    return out if lse is None else (out, lse)


def paged_prefill(
    q: Float[Array, "T H D"],
    cache: KVCache,
    layer: Int[Array, ""] | int,
    block_tables: Int[Array, "R M"],
    context_lens: Int[Array, " R"],
    query_starts: Int[Array, " R+1"],
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_lse: bool = False,
    first_row: Int[Array, ""] | int = 0,
    num_rows: Int[Array, ""] | int | None = None,
    backend: Backend | None = None,
    interpret: Any = False,
) -> Float[Array, "T H D"] | tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Attends several new tokens per row, causally, to the cached prefix and to each other.

    Row r owns tokens [query_starts[r], query_starts[r + 1]) of the packed axis; they are the last
    of its `context_lens[r]` positions, so a chunk may start in the middle of a block.

    Args:
      q: Queries on the packed token axis; their keys and values must already be written.
      cache: The whole pool.
      layer: Layer to read.
      block_tables: Physical blocks per row; entries past the length are never used.
      context_lens: Tokens readable per row; the new ones are among them, so not fewer than those.
      query_starts: Prefix sum of new tokens per row.
      sm_scale: Factor on the logits before softmax, usually `D ** -0.5`.
      sliding_window: Keys that a query sees at most, itself included; None: all.
      soft_cap: Logits become `soft_cap * tanh(logits / soft_cap)`, after scale and before mask.
      sinks: Logit per head of a key that everybody sees and whose value is zero.
      return_lse: Also return the log of the sum of `exp(logits)`, sink included.
      first_row: Rows [first_row, num_rows) are computed; tokens of other rows come out zero.
      num_rows: See `first_row`; None: all.
      backend: A named backend runs or raises; None chooses by platform and shape.
      interpret: Of a kernel that is named, as in `pallas_call`.
    Returns: Outputs in q's dtype; tokens that belong to no computed row are zero. With `return_lse`
      (outputs, log-sum-exp in float32), -inf for those tokens.
    Raises: ValueError if H is not a multiple of K, D is not the pool's, or an option is out of
      range; NotImplementedError for what a named backend cannot serve.
    Source: Dao et al. 2022 (tiling); Agrawal et al. 2023 (chunked prefill).
    """
    _check(q, cache, layer, sinks, backend, interpret)
    tables = core.as_i32(block_tables, "block_tables")
    lens = core.as_i32(context_lens, "context_lens")
    starts = core.as_i32(query_starts, "query_starts")
    count = tables.shape[0]
    if lens.shape != (count,) or starts.shape != (count + 1,):
        raise ValueError(
            f"context_lens {lens.shape} must have R and query_starts {starts.shape} R + 1 entries "
            f"for R = {count} rows of block_tables"
        )
    if not tables.shape[1]:
        raise ValueError(f"block_tables {tables.shape} must have at least one block per row")
    attention = _options(sm_scale, sliding_window, soft_cap, return_lse)
    end = count if num_rows is None else num_rows
    out, lse = run(
        backend,
        cache,
        q.shape[1],
        functools.partial(xla.prefill, attention=attention),
        kernels.by_backend(kernels.paged_prefill, attention=attention, interpret=interpret),
        q,
        cache,
        jnp.asarray(layer, jnp.int32),
        tables,
        lens,
        starts,
        sinks,
        jnp.asarray(first_row, jnp.int32),
        jnp.asarray(end, jnp.int32),
    )
    return out if lse is None else (out, lse)


def _options(
    sm_scale: float, sliding_window: int | None, soft_cap: float | None, has_lse: bool
) -> xla.Attention:
    if sliding_window is not None:
        sliding_window = min(operator.index(sliding_window), 2**30)  # longer than any row
        if sliding_window < 1:
            raise ValueError(f"sliding_window ({sliding_window}) must be at least 1")
    if soft_cap is not None:
        soft_cap = _number("soft_cap", soft_cap)
        if not soft_cap >= SMALLEST_CAP:
            raise ValueError(f"soft_cap ({soft_cap}) must be at least {SMALLEST_CAP}")
        soft_cap = None if soft_cap > LARGEST_CAP else soft_cap
    return xla.Attention(
        sm_scale=_number("sm_scale", sm_scale),
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        has_lse=has_lse,
    )


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except jax.errors.ConcretizationTypeError:
        raise TypeError(f"{name} must be known when the program is traced") from None


def _check(
    q: jax.Array,
    cache: KVCache,
    layer: jax.Array | int,
    sinks: jax.Array | None,
    backend: str | None,
    interpret: Any,
) -> None:
    check_backend(backend, interpret)
    core.check_layer(cache, layer)
    _, heads, width = q.shape
    if heads % cache.num_kv_heads:
        raise ValueError(
            f"num_heads ({heads}) must be a multiple of num_kv_heads ({cache.num_kv_heads})"
        )
    if width != cache.head_dim:
        raise ValueError(f"head_dim of q ({width}) must be that of the cache ({cache.head_dim})")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks {sinks.shape} must have one entry per query head ({heads})")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q must be floating point, not {q.dtype}")
