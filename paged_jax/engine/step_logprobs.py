"""Log-probabilities of tokens, sampled or of prompts, and nothing where nobody asks."""

from typing import Any

import jax
import jax.numpy as jnp

from paged_jax import ops

_LOGIT_ROWS = 64
"""Prompt tokens whose logits exist at a time."""


def prompt_logprobs(
    model: Any, hidden: jax.Array, next_tokens: jax.Array, count: int, axis_name: str | None
) -> dict[str, jax.Array]:
    """What is told of the tokens that follow those of `hidden[T, E]`, where it is asked for."""
    num_tokens = hidden.shape[0]
    chunk = min(num_tokens, _LOGIT_ROWS)
    rest = -num_tokens % chunk
    hidden = jnp.pad(hidden, ((0, rest), (0, 0)))
    wanted = jnp.pad(next_tokens, (0, rest), constant_values=-1)
    is_wanted = jnp.any(wanted.reshape(-1, chunk) >= 0, axis=1)
    # A loop of no turns where nobody asks: on GPU, loops are in the CUDA graph, those in branches
    # are not.
    end = jnp.max(jnp.where(is_wanted, jnp.arange(is_wanted.size) + 1, 0))
    start = jnp.where(jnp.any(is_wanted), jnp.argmax(is_wanted), end)

    def one_chunk(i: jax.Array, out: dict[str, jax.Array]) -> dict[str, jax.Array]:
        # Logits of all tokens at once may take more memory than the model.
        rows, tokens = (jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk) for x in (hidden, wanted))
        logits = model.logits(rows).astype(jnp.float32)
        found = logprobs(logits, jnp.maximum(tokens, 0), count, axis_name)
        return {
            name: jax.lax.dynamic_update_slice_in_dim(x, found[name], i * chunk, axis=0)
            for name, x in out.items()
        }

    out = no_logprobs(num_tokens + rest, count)
    out = jax.lax.fori_loop(start, end, one_chunk, out)
    return {name: x[:num_tokens] for name, x in out.items()}


LISTED = ("logprob", "rank", "top_logprobs", "top_ids")
"""Outputs in the order of `ops.top_logprobs`."""


def logprobs(
    logits: jax.Array, chosen: jax.Array, count: int, axis_name: str | None
) -> dict[str, jax.Array]:
    """Of the chosen tokens and the `count` most likely ones; see `ops.top_logprobs`."""
    found = ops.top_logprobs(logits, chosen, count, axis_name)
    return dict(zip(LISTED, found, strict=True))


def no_logprobs(num_rows: int, count: int) -> dict[str, jax.Array]:
    """The same of rows that nobody asks about."""
    return {
        "logprob": jnp.zeros(num_rows, jnp.float32),
        "rank": jnp.zeros(num_rows, jnp.int32),
        "top_logprobs": jnp.zeros((num_rows, count), jnp.float32),
        "top_ids": jnp.zeros((num_rows, count), jnp.int32),
    }
