"""Sampling by thresholds on the logits: reductions only, no sort.

Every filter keeps the tokens whose logit is at or above a threshold. Thresholds are found by
bisection over the 32-bit integer image of the float, which orders as the float does, so 32 passes
are exact. A sort of 32 x 49152 logits costs more on CPU than a whole model step.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the quotient would leave the range of float32."""

_GROUP = 256  # tokens per group of the two-level inverse CDF


def sample(
    logits: Float[Array, "R V"],
    *,
    temperature: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    seeds: UInt32[Array, "R 3"],
    positions: Int[Array, " R"],
    min_p: Float[Array, " R"] | None = None,
    axis_name: str | None = None,
) -> Int[Array, " R"]:
    """Chooses one token per row.

    Filter order: temperature, min-p, top-k, then top-p on the renormalised rest. Greedy is the
    argmax of the float32 logits; ties go to the lowest id. A batch of greedy rows pays only the
    argmax. A logit of -inf is never chosen where another is finite.

    Args:
      logits: Any float dtype; compared in float32.
      temperature: Below `GREEDY_BELOW`: greedy.
      top_k: Most likely tokens to keep (ties with the last are kept); 0 or less: off.
      top_p: Least probability mass to keep, in (0, 1]; 1: off.
      seeds: Low word and high word of the request's seed, and the index of the choice.
      positions: Position that the chosen token will have, so that a draw depends on nothing but
        the request: not on its row, its batchmates, preemption or chunking.
      min_p: Least probability to keep, as a fraction of the greatest, in [0, 1]; 0 or None: off.
      axis_name: Of a mesh axis whose ranks have equal parts of the vocabulary in order, each a
        multiple of 256 tokens, with -inf past its end. All get the same tokens.
    Returns: int32 token ids.
    """
    logits = logits.astype(jnp.float32)
    best, greatest = _best(logits, axis_name)
    is_random = temperature >= GREEDY_BELOW

    def draw() -> jax.Array:
        scale = jnp.where(is_random, temperature, 1.0)[:, None]
        # Without ranks it is computed in this branch, lest the logits be kept for it.
        most = jnp.max(logits, axis=-1) if axis_name is None else greatest
        scaled = (logits - most[:, None]) / scale
        kept = _kept(scaled, is_random, top_k, top_p, min_p, axis_name)
        weights = jnp.where(kept, jnp.exp(scaled), 0.0)
        drawn = _inverse_cdf(weights, _uniform(seeds, positions), axis_name)
        return jnp.where(is_random, drawn, best)

    return jax.lax.cond(jnp.any(is_random), draw, lambda: best)


def top_logprobs(
    logits: Float[Array, "R V"],
    chosen: Int[Array, " R"],
    count: int,
    axis_name: str | None = None,
) -> tuple[Float[Array, " R"], Int[Array, " R"], Float[Array, "R count"], Int[Array, "R count"]]:
    """Log-probabilities of the model's own distribution, before temperature and filters.

    Args:
      logits: Any float dtype; computed in float32.
      chosen: Token whose log-probability and rank are wanted.
      count: Most likely tokens to list.
      axis_name: See `sample`.
    Returns: (log-probability of the chosen, its rank from 1, log-probabilities of the `count`
      most likely in descending order, their ids).
    """
    logits = logits.astype(jnp.float32)
    if axis_name is None:
        log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        own = jnp.take_along_axis(logits, chosen[:, None], axis=-1)
        rank = 1 + jnp.sum(logits > own, axis=-1, dtype=jnp.int32)
        values, ids = jax.lax.top_k(logits, count)
        return (own - log_total)[:, 0], rank, values - log_total, ids.astype(jnp.int32)
    first = _first_token(logits, axis_name)
    greatest = jax.lax.pmax(jnp.max(logits, axis=-1, keepdims=True), axis_name)
    total = jnp.sum(jnp.exp(logits - greatest), axis=-1, keepdims=True)
    log_total = greatest + jnp.log(jax.lax.psum(total, axis_name))
    place = chosen[:, None] - first
    is_own = (place >= 0) & (place < logits.shape[1])
    own = jnp.take_along_axis(logits, jnp.where(is_own, place, 0), axis=-1)
    own = jax.lax.pmax(jnp.where(is_own, own, -jnp.inf), axis_name)
    above = jnp.sum(logits > own, axis=-1, dtype=jnp.int32)
    rank = 1 + jax.lax.psum(above, axis_name)
    # The best of each rank, side by side; of equal ones the first, as without ranks.
    values, ids = jax.lax.top_k(logits, min(count, logits.shape[1]))
    values = jax.lax.all_gather(values, axis_name, axis=1, tiled=True)
    ids = jax.lax.all_gather(ids.astype(jnp.int32) + first, axis_name, axis=1, tiled=True)
    values, places = jax.lax.top_k(values, count)
    ids = jnp.take_along_axis(ids, places, axis=1)
    return (own - log_total)[:, 0], rank, values - log_total, ids.astype(jnp.int32)


def _kept(
    scaled: jax.Array,
    is_random: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array | None = None,
    axis_name: str | None = None,
) -> jax.Array:
    """bool[R, V], tokens that pass min-p, top-k and then top-p.

    The last two keep the most likely tokens whose measure reaches a target: each token measures 1
    and the target is k, or its probability and the target is p. So both are one loop, run for the
    filters that any row uses.

    Args:
      scaled: Logits over the temperature, less their maximum: a probability is `exp` of it times
        the greatest.
    """
    order = _ordered_bits(scaled)
    num_ranks = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    uses_k = is_random & (top_k > 0) & (top_k < scaled.shape[1] * num_ranks)
    uses_p = is_random & (top_p < 1.0)

    def apply(phase: jax.Array, kept: jax.Array) -> jax.Array:
        is_k = phase == 0
        weights = jnp.where(kept, jnp.where(is_k, 1.0, jnp.exp(scaled)), 0.0)
        # Counts are exact in float32 up to 2^24 tokens.
        total = _sum(weights, axis_name)
        target = jnp.where(is_k, top_k.astype(jnp.float32), top_p * total)
        # A top_p that underflows still keeps the most likely token.
        target = jnp.maximum(target, jnp.finfo(jnp.float32).tiny)

        def bisect(i: jax.Array, threshold: jax.Array) -> jax.Array:
            bit = jnp.uint32(0x80000000) >> i.astype(jnp.uint32)
            candidate = threshold | bit
            above = jnp.where(order >= candidate[:, None], weights, 0.0)
            return jnp.where(_sum(above, axis_name) >= target, candidate, threshold)

        # The greatest threshold above which the measure still reaches the target.
        threshold = jax.lax.fori_loop(0, 32, bisect, jnp.zeros_like(target, jnp.uint32))
        is_used = jnp.where(is_k, uses_k, uses_p)[:, None]
        return kept & ((order >= threshold[:, None]) | ~is_used)

    first = jnp.where(jnp.any(uses_k), 0, 1)
    last = jnp.where(jnp.any(uses_p), 2, 1)
    # log(0) is -inf, which keeps everything.
    start = scaled >= (-jnp.inf if min_p is None else jnp.log(min_p)[:, None])
    return jax.lax.fori_loop(first, last, apply, start)


def _best(logits: jax.Array, axis_name: str | None) -> tuple[jax.Array, jax.Array]:
    """i32[R], the most likely token, the first of equal ones; and its logit."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    greatest = jnp.max(logits, axis=-1)
    if axis_name is None:
        return best, greatest
    first, own = _first_token(logits, axis_name), greatest
    greatest = jax.lax.pmax(own, axis_name)
    best = jnp.where(own == greatest, best + first, jnp.iinfo(jnp.int32).max)
    return jax.lax.pmin(best, axis_name), greatest


def _first_token(logits: jax.Array, axis_name: str) -> jax.Array:
    """i32[], the first token of this rank."""
    return jax.lax.axis_index(axis_name).astype(jnp.int32) * logits.shape[1]


def _sum(x: jax.Array, axis_name: str | None) -> jax.Array:
    """f32[R], over the vocabulary."""
    total = jnp.sum(x, axis=-1)
    return total if axis_name is None else jax.lax.psum(total, axis_name)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 image of a float32 that orders as the float does; -0 and +0 become one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _uniform(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """f32[R] in [0, 1), one draw per row from its own key."""
    # Two words of seed, because `key` drops the high word of a larger one silently.
    words = jnp.concatenate([seeds[:, 1:], positions[:, None].astype(jnp.uint32)], axis=1)
    keys = jax.vmap(lambda seed: jax.random.key(seed, impl="threefry2x32"))(seeds[:, 0])
    keys = jax.lax.fori_loop(
        0, words.shape[1], lambda i, keys: jax.vmap(jax.random.fold_in)(keys, words[:, i]), keys
    )
    return jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32))(keys)


def _inverse_cdf(weights: jax.Array, uniform: jax.Array, axis_name: str | None = None) -> jax.Array:
    """i32[R], the first token whose cumulative weight passes `uniform` of the total.

    Two levels (groups, then tokens of one group), since a cumulative sum over the whole
    vocabulary costs more than all the rest.
    """
    rows, vocab = weights.shape
    grouped = jnp.pad(weights, ((0, 0), (0, -vocab % _GROUP))).reshape(rows, -1, _GROUP)
    sums = own = jnp.sum(grouped, axis=-1)
    if axis_name is not None:
        # Of all ranks, so that the draw is the same as without them.
        sums = jax.lax.all_gather(own, axis_name, axis=1, tiled=True)
    ends = jnp.cumsum(sums, axis=-1)
    target = uniform * ends[:, -1]
    group = _first_past(sums, ends, target)
    before = jnp.take_along_axis(ends - sums, group[:, None], axis=1)[:, 0]
    place, is_own = group, None
    if axis_name is not None:
        place = group - jax.lax.axis_index(axis_name).astype(jnp.int32) * own.shape[1]
        is_own = (place >= 0) & (place < own.shape[1])
        place = jnp.where(is_own, place, 0)
    inside = jnp.take_along_axis(grouped, place[:, None, None], axis=1)[:, 0]
    token = _first_past(inside, jnp.cumsum(inside, axis=-1), target - before)
    if is_own is not None:
        token = jax.lax.psum(jnp.where(is_own, token, 0), axis_name)
    return group * _GROUP + token


def _first_past(weights: jax.Array, ends: jax.Array, target: jax.Array) -> jax.Array:
    """i32[R], the first index of positive weight with ends > target.

    Where rounding leaves none, the last index of positive weight: a weight of 0 is never chosen.
    """
    size = weights.shape[1]
    index = jnp.arange(size, dtype=jnp.int32)
    is_kept = weights > 0.0
    first = jnp.min(jnp.where(is_kept & (ends > target[:, None]), index, size), axis=-1)
    last = jnp.max(jnp.where(is_kept, index, 0), axis=-1)
    return jnp.minimum(first, last)
