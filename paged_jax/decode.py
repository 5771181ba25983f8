"""Decode steps on the device: a loop to call from your own `jit`, with your own model.

blocks, kv     who owns which block, and what the blocks hold   (`PagedCache`)
rows           what each row says next, and when it ends        (`RowState`)

position       0 1 2 3 4 5                 the row has 5 tokens in the cache and `token`
cache          a b c d e .                 is the sixth, not yet written: a decode step
token                    f   position = 5  writes it, attends, and samples the seventh
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax import core, ops
from paged_jax.core import Batch, PagedCache
from paged_jax.shapes import ceil_div

MAX_STOP_IDS = 8
"""Token ids per row that end it on the device."""

NO_STOP_ID = -1
"""Padding of stop ids; it is compared with tokens and never used as an index."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowState:
    """What the device knows of each row besides its blocks."""

    token: jax.Array  # i32[S], sampled last and not yet written: the input of the next step
    position: jax.Array  # i32[S], of `token`: the tokens that the row has in the cache
    steps_left: jax.Array  # i32[S], tokens that the row may still sample
    finished: jax.Array  # bool[S], ended, or never started
    stalled: jax.Array  # bool[S], stopped for want of a block in the last `decode_loop`
    stop_ids: jax.Array  # i32[S, MAX_STOP_IDS], NO_STOP_ID in padding
    seeds: jax.Array  # u32[S, 3], low and high word of the seed, index of the choice
    temperature: jax.Array  # f32[S], 0 = greedy
    top_k: jax.Array  # i32[S], 0 = off
    top_p: jax.Array  # f32[S], 1 = off
    min_p: jax.Array  # f32[S], 0 = off
    has_options: jax.Array  # bool[S], whether an engine has `ops.LogitOptions` for the row


StepFn = Callable[[Any, Batch, PagedCache], tuple[jax.Array, PagedCache]]
SampleFn = Callable[[jax.Array, RowState], jax.Array]


def create_row_state(max_seqs: int) -> RowState:
    """Returns S rows, none of them started."""
    return RowState(
        token=jnp.zeros(max_seqs, jnp.int32),
        position=jnp.zeros(max_seqs, jnp.int32),
        steps_left=jnp.zeros(max_seqs, jnp.int32),
        finished=jnp.ones(max_seqs, bool),
        stalled=jnp.zeros(max_seqs, bool),
        stop_ids=jnp.full((max_seqs, MAX_STOP_IDS), NO_STOP_ID, jnp.int32),
        seeds=jnp.zeros((max_seqs, 3), jnp.uint32),
        temperature=jnp.zeros(max_seqs, jnp.float32),
        top_k=jnp.zeros(max_seqs, jnp.int32),
        top_p=jnp.ones(max_seqs, jnp.float32),
        min_p=jnp.zeros(max_seqs, jnp.float32),
        has_options=jnp.zeros(max_seqs, bool),
    )


def start_rows(
    rows: RowState,
    row_ids: core.Values,
    *,
    token: core.Values,
    position: core.Values,
    steps_left: core.Values,
    stop_ids: core.Values = (),
    seeds: core.Values = (0, 0, 0),
    temperature: core.Values = 0.0,
    top_k: core.Values = 0,
    top_p: core.Values = 1.0,
    min_p: core.Values = 0.0,
) -> RowState:
    """Sets all fields of rows whose prompt has been computed; scalars hold for each of them.

    Args:
      row_ids: i32[F]; S is padding, and so is what is out of range.
      token: i32[F], the first token after the prompt.
      position: i32[F], tokens in the cache, `lengths` of the block state.
      steps_left: i32[F], tokens to sample after `token`; 0 leaves the row finished.
      stop_ids: i32[n] or i32[F, n] with n at most MAX_STOP_IDS; a row that samples one of them is
        finished, and so is one that starts with one.
      seeds: u32[3] or u32[F, 3], see `seed_words`.
      temperature: f32[F]; 0 is greedy. Read by `sample`, not by `greedy`.
      top_k: i32[F]; 0 is off.
      top_p: f32[F]; 1 is off.
      min_p: f32[F]; 0 is off.
    Raises: ValueError for more than MAX_STOP_IDS stop ids.
    """
    row_ids = jnp.atleast_1d(core.as_i32(row_ids, "row_ids"))
    row_ids = jnp.where(row_ids < 0, rows.token.shape[0], row_ids)
    stop_ids = jnp.atleast_1d(core.as_i32(stop_ids, "stop_ids"))
    if stop_ids.shape[-1] > MAX_STOP_IDS:
        raise ValueError(f"stop_ids ({stop_ids.shape[-1]}) must be at most {MAX_STOP_IDS} per row")
    padding = [(0, 0)] * (stop_ids.ndim - 1) + [(0, MAX_STOP_IDS - stop_ids.shape[-1])]
    new = RowState(
        token=jnp.asarray(token, jnp.int32),
        position=jnp.asarray(position, jnp.int32),
        steps_left=jnp.asarray(steps_left, jnp.int32),
        finished=jnp.asarray(False),
        stalled=jnp.asarray(False),
        stop_ids=jnp.pad(stop_ids, padding, constant_values=NO_STOP_ID),
        seeds=jnp.asarray(seeds, jnp.uint32),
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
        min_p=jnp.asarray(min_p, jnp.float32),
        has_options=jnp.asarray(False),
    )
    size = row_ids.shape[0]
    new = jax.tree.map(lambda x, old: jnp.broadcast_to(x, (size, *old.shape[1:])), new, rows)
    new = dataclasses.replace(new, finished=(new.steps_left <= 0) | _is_stop(new, new.token))
    return jax.tree.map(lambda old, x: old.at[row_ids].set(x, mode="drop"), rows, new)


def finish_rows(rows: RowState, mask: jax.Array) -> RowState:
    """Ends rows before their time, beside `core.free`.

    Args:
      mask: bool[S], True for rows to end.
    """
    return dataclasses.replace(rows, finished=rows.finished | mask)


def fork_rows(
    rows: RowState,
    parents: core.Values,
    children: core.Values,
    *,
    choices: core.Values | None = None,
) -> RowState:
    """Copies rows beside `core.fork`, so that children go on from where their parents stand.

    Pairs are applied in order, so a child may be the parent of a later pair.

    Args:
      parents: i32[F]; S is padding.
      children: i32[F]; S is padding.
      choices: u32[F], index of each child's choice, so that it draws other tokens than its
        parent; None keeps the parent's.
    """
    max_seqs = rows.token.shape[0]
    parents, children = core.as_lists(parents=parents, children=children)
    if not parents.shape[0]:
        return rows
    numbers = None if choices is None else jnp.asarray(choices, jnp.uint32)

    def body(i, rows: RowState) -> RowState:
        is_valid = (parents[i] >= 0) & (parents[i] < max_seqs) & (children[i] >= 0)
        target = jnp.where(is_valid, children[i], max_seqs)
        source = jnp.where(is_valid, parents[i], 0)
        child = jax.tree.map(lambda x: x[source], rows)
        if numbers is not None:
            child = dataclasses.replace(child, seeds=child.seeds.at[2].set(numbers[i]))
        return jax.tree.map(lambda old, x: old.at[target].set(x, mode="drop"), rows, child)

    return jax.lax.fori_loop(0, parents.shape[0], body, rows)


def seed_words(seed: int, choice: int = 0) -> tuple[int, int, int]:
    """An entry of `RowState.seeds`, on the host: JAX drops the high word of a large seed silently.

    Rows with one seed and one choice draw the same; give n rows of a prompt n choices.
    """
    return seed % 2**32, seed // 2**32 % 2**32, choice


def greedy(logits: jax.Array, rows: RowState) -> jax.Array:
    """i32[S], the argmax of f32 logits [S, V]; ties go to the lowest id."""
    del rows
    return jnp.argmax(logits.astype(jnp.float32), axis=-1).astype(jnp.int32)


def sample(logits: jax.Array, rows: RowState) -> jax.Array:
    """i32[S], drawn by the sampling fields of each row from logits [S, V]; see `ops.sample`."""
    return ops.sample(
        logits,
        temperature=jnp.where(rows.finished, 0.0, rows.temperature),
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        seeds=rows.seeds,
        positions=rows.position,
    )


def decode_loop(
    step_fn: StepFn,
    params: Any,
    cache: PagedCache,
    rows: RowState,
    *,
    num_steps: int,
    sample_fn: SampleFn = greedy,
    reserved: bool = False,
) -> tuple[PagedCache, RowState, jax.Array]:
    """Runs up to `num_steps` decode steps of all rows on the device.

    Each step allocates room for a token per row, copies blocks that are shared and about to be
    written, runs the model, and samples. Blocks are given out in ascending row order. A row is
    frozen when it is finished (stop id or `steps_left`), and when its next token finds no block or
    no room in its table: it is then `stalled` for the rest of this call. Free some rows with
    `core.free` and `finish_rows` and call again. Frozen rows write to the null block and cost no
    attention. The loop ends early when no row is left to run. Nothing is read back; call it under
    `jit` and donate `cache`.

    Args:
      step_fn: `step_fn(params, batch, cache) -> (logits [S, V], cache)`. Token i of the batch is
        row i; a frozen row has `context_lens` 0 and its logits are ignored.
      params: Passed through to `step_fn`.
      cache: Rows hold `rows.position` tokens each.
      rows: See `start_rows`.
      num_steps: Most tokens to sample per row.
      sample_fn: `sample_fn(logits, rows) -> tokens i32[S]`; `rows.position` is the position that
        the sampled token will have. `greedy`, `sample`, or your own.
      reserved: Allocate for all steps before the loop (`min(num_steps, steps_left)` tokens per
        row) and return what was not used after it. The loop is then free of block management,
        and a row that cannot have all its blocks does not start.
    Returns: (cache, rows, tokens i32[num_steps, S]). Row r sampled as many tokens as its position
      moved; they come first in its column, and zeros follow.
    Raises: ValueError when `rows` has another S than the cache, or for a negative `num_steps`.
    """
    max_seqs = rows.token.shape[0]
    if max_seqs != cache.blocks.max_seqs:
        raise ValueError(
            f"rows ({max_seqs}) must be as many as the cache has ({cache.blocks.max_seqs})"
        )
    if num_steps < 0:
        raise ValueError(f"num_steps ({num_steps}) must be at least 0")
    if num_steps == 0:
        return cache, rows, jnp.zeros((0, max_seqs), jnp.int32)
    rows = dataclasses.replace(
        rows,
        finished=rows.finished | (rows.steps_left <= 0),
        stalled=jnp.zeros(max_seqs, bool),
    )
    was_live = _is_live(rows)
    if reserved:
        cache = _reserve(cache, rows, num_steps)

    def has_more(carry: tuple[jax.Array, PagedCache, RowState, jax.Array]) -> jax.Array:
        step, _, rows, _ = carry
        return (step < num_steps) & jnp.any(_is_live(rows))

    def one_step(
        carry: tuple[jax.Array, PagedCache, RowState, jax.Array],
    ) -> tuple[jax.Array, PagedCache, RowState, jax.Array]:
        step, cache, rows, tokens = carry
        if not reserved:
            cache = _reserve(cache, rows, 1)
        has_room = rows.position < cache.blocks.lengths
        rows = dataclasses.replace(rows, stalled=rows.stalled | (_is_live(rows) & ~has_room))
        runs = _is_live(rows)
        batch = core.make_decode_batch(
            cache.blocks, tokens=rows.token, positions=rows.position, runs=runs
        )
        logits, cache = step_fn(params, batch, cache)
        rows = dataclasses.replace(rows, position=rows.position + runs.astype(jnp.int32))
        sampled = sample_fn(logits, rows).astype(jnp.int32)
        rows = _advance(rows, sampled, runs)
        tokens = tokens.at[step].set(jnp.where(runs, sampled, 0))
        return step + 1, cache, rows, tokens

    start = (jnp.int32(0), cache, rows, jnp.zeros((num_steps, max_seqs), jnp.int32))
    _, cache, rows, tokens = jax.lax.while_loop(has_more, one_step, start)
    if reserved:
        kept = jnp.where(was_live, rows.position, jnp.int32(2**31 - 1))
        blocks = core.truncate(cache.blocks, kept)
        cache = dataclasses.replace(cache, blocks=blocks)
    return cache, rows, tokens


def _is_live(rows: RowState) -> jax.Array:
    return ~rows.finished & ~rows.stalled


def _is_stop(rows: RowState, tokens: jax.Array) -> jax.Array:
    return jnp.any(rows.stop_ids == tokens[:, None], axis=1)


def _reserve(cache: PagedCache, rows: RowState, num_steps: int) -> PagedCache:
    """Room for the next `num_steps` tokens of each live row that finds the blocks for them."""
    blocks = cache.blocks
    most = blocks.max_blocks_per_seq * blocks.block_size
    end = jnp.minimum(rows.position + jnp.minimum(rows.steps_left, num_steps), most)
    # A row with fewer tokens than its position was freed or truncated: it must not run on.
    can_run = _is_live(rows) & (rows.position <= blocks.lengths)
    new_tokens = jnp.where(can_run, jnp.maximum(end - blocks.lengths, 0), 0)
    new_tokens = jnp.where(core.fit(blocks, new_tokens), new_tokens, 0)
    # A row grows by what its tokens fill, and copies one block at most.
    bound = blocks.max_seqs * (ceil_div(num_steps, blocks.block_size) + 1)
    blocks, allocation = core.allocate(blocks, new_tokens, max_new_blocks=bound)
    kv = ops.copy_kv(cache.kv, allocation.copy_src, allocation.copy_dst)
    return dataclasses.replace(cache, blocks=blocks, kv=kv)


def _advance(rows: RowState, sampled: jax.Array, runs: jax.Array) -> RowState:
    """Takes the sampled tokens of the rows that ran; `position` has moved already."""
    steps_left = rows.steps_left - runs.astype(jnp.int32)
    ends = runs & ((steps_left <= 0) | _is_stop(rows, sampled))
    return dataclasses.replace(
        rows,
        token=jnp.where(runs, sampled, rows.token),
        steps_left=steps_left,
        finished=rows.finished | ends,
    )
