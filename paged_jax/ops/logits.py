"""What a request asks of the logits before a token is chosen: bans, biases and penalties."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from paged_jax.bitmask import WORD_BITS
from paged_jax.shapes import ceil_div

Leaf = Any
"""An array, or what JAX puts in its place where it makes a tree of something else."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LogitOptions:
    """Per row: its tokens, and what is done to the logits of the next one."""

    tokens: Leaf  # i32[S, L], prompt and output by position
    num_prompt: Leaf  # i32[S]
    allowed: Leaf  # u32[S, W], the tokens that may be chosen
    deferred: Leaf  # u32[S, W], those that may not before `min_length`
    min_length: Leaf  # i32[S], prompt and output tokens
    bias_ids: Leaf  # i32[S, B], V or more in padding
    biases: Leaf  # f32[S, B]
    presence: Leaf  # f32[S], taken from tokens in the output
    frequency: Leaf  # f32[S], taken for each time that a token is in the output
    repetition: Leaf  # f32[S], divides what is in prompt or output; 1 = off


def create_logit_options(
    max_seqs: int, max_length: int, vocab_size: int, max_biases: int
) -> LogitOptions:
    """Returns S rows that change nothing."""
    words = ceil_div(vocab_size, WORD_BITS)
    return LogitOptions(
        tokens=jnp.zeros((max_seqs, max_length), jnp.int32),
        num_prompt=jnp.zeros(max_seqs, jnp.int32),
        allowed=jnp.full((max_seqs, words), 0xFFFFFFFF, jnp.uint32),
        deferred=jnp.zeros((max_seqs, words), jnp.uint32),
        min_length=jnp.zeros(max_seqs, jnp.int32),
        bias_ids=jnp.full((max_seqs, max_biases), words * WORD_BITS, jnp.int32),
        biases=jnp.zeros((max_seqs, max_biases), jnp.float32),
        presence=jnp.zeros(max_seqs, jnp.float32),
        frequency=jnp.zeros(max_seqs, jnp.float32),
        repetition=jnp.ones(max_seqs, jnp.float32),
    )


def adjust_logits(
    logits: Float[Array, "R V"],
    options: LogitOptions,
    lengths: Int[Array, " R"],
    axis_name: str | None = None,
) -> Float[Array, "R V"]:
    """Applies in this order: bans, biases, repetition, frequency and presence penalties.

    Args:
      logits: float32.
      options: Of these R rows.
      lengths: Tokens before the one that is chosen; those of `options.tokens` are counted up to
        there.
      axis_name: Of a mesh axis whose ranks have parts of the vocabulary; see `ops.sample`. The
        options are of the whole one.
    Returns: float32; banned tokens are -inf.
    """
    vocab_size = logits.shape[1]
    options = _own_part(options, vocab_size, axis_name)
    rows = jnp.arange(logits.shape[0])[:, None]
    is_early = (lengths < options.min_length)[:, None]
    banned = ~options.allowed | jnp.where(is_early, options.deferred, 0)
    logits = jnp.where(_unpack(banned, vocab_size), -jnp.inf, logits)
    logits = logits.at[rows, options.bias_ids].add(options.biases, mode="drop")

    def penalise() -> jax.Array:
        position = jnp.arange(options.tokens.shape[1])[None]
        is_known = position < lengths[:, None]
        is_output = is_known & (position >= options.num_prompt[:, None])
        known = jnp.where(is_known, options.tokens, vocab_size)
        is_seen = jnp.zeros(logits.shape, bool).at[rows, known].set(True, mode="drop")
        counts = jnp.zeros(logits.shape, jnp.float32)
        counts = counts.at[rows, known].add(is_output.astype(jnp.float32), mode="drop")
        factor = jnp.where(is_seen, options.repetition[:, None], 1.0)
        found = jnp.where(logits > 0.0, logits / factor, logits * factor)
        found -= options.frequency[:, None] * counts
        return found - jnp.where(counts > 0.0, options.presence[:, None], 0.0)

    has_penalty = (
        (options.presence != 0.0) | (options.frequency != 0.0) | (options.repetition != 1.0)
    )
    return jax.lax.cond(jnp.any(has_penalty), penalise, lambda: logits)


def _own_part(options: LogitOptions, size: int, axis_name: str | None) -> LogitOptions:
    """The options for the `size` tokens of a rank, which are numbered from 0 then."""
    if axis_name is None:
        return options
    rank, num_ranks = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    first = rank.astype(jnp.int32) * size

    def words(x: jax.Array) -> jax.Array:
        own = size // WORD_BITS
        padded = jnp.pad(x, ((0, 0), (0, num_ranks * own - x.shape[1])))
        return jax.lax.dynamic_slice_in_dim(padded, rank * own, own, axis=1)

    def ids(x: jax.Array) -> jax.Array:
        # Negative ones would count from the end.
        return jnp.where(x >= first, x - first, size)

    return dataclasses.replace(
        options,
        tokens=ids(options.tokens),
        bias_ids=ids(options.bias_ids),
        allowed=words(options.allowed),
        deferred=words(options.deferred),
    )


def _unpack(words: UInt32[Array, "R W"], size: int) -> jax.Array:
    """bool[R, size]."""
    places = jnp.arange(WORD_BITS, dtype=jnp.uint32)[None, None]
    bits = (words[:, :, None] >> places) & 1
    return bits.reshape(words.shape[0], -1)[:, :size] != 0
