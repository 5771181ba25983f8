"""The jitted step: apply a plan to the blocks, run the model, sample.

`step(params, kv, blocks, rows, inputs, options) -> (kv, blocks, rows, outputs, options)`. The pool
and the logit options are donated and updated in place; `blocks` and `rows` are small and never
donated.

Programs with T = R are for rows of one token each and run up to K of them, one step after the
other: what a row samples is its next input, and a row that ends is frozen. Blocks for all of them
are allocated before. The other programs run one step with prefill.
"""

import dataclasses
import functools
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from paged_jax import core, ops
from paged_jax.core import Batch, BlockState, KVCache, PagedCache
from paged_jax.decode import RowState
from paged_jax.engine.step_logprobs import logprobs, no_logprobs, prompt_logprobs
from paged_jax.ops import LogitOptions
from paged_jax.shapes import ceil_div


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """A plan as arrays of bucket sizes T and R; decode rows first."""

    free_rows: jax.Array  # bool[S], freed before anything else
    retain_ids: jax.Array  # i32[B], blocks that the prefix cache keeps; 0 in padding
    tokens: jax.Array  # i32[T], tokens of the host in their places; others are in RowState
    row_ids: jax.Array  # i32[R], S in padding
    query_lens: jax.Array  # i32[R], tokens to allocate and run; 0 in padding
    sources: jax.Array  # i32[R], entry from whose last token an entry samples; mostly itself
    num_decode: jax.Array  # i32[]
    num_steps: jax.Array  # i32[], decode steps of a program with T = R
    is_given: jax.Array  # bool[R], rows whose first token is of the host, decoding or not
    is_sampled: jax.Array  # bool[R], rows whose next token is wanted
    is_admission: jax.Array  # bool[R], rows whose sampling fields are set from here
    has_logprobs: jax.Array  # bool[R], rows whose log-probabilities are wanted
    owners: jax.Array  # i32[R], a number per sequence; only shadow tags read it
    next_tokens: jax.Array  # i32[T], what follows in the prompt where its log-probability is wanted
    admitted: RowState  # [R], the fields of those rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """What the host reads back; K steps of R rows in the order of the inputs."""

    tokens: jax.Array  # i32[K, R]
    num_run: jax.Array  # i32[R], tokens that a row ran; a row that had ended runs none
    ok: jax.Array  # bool[], whether the blocks were there; the ledger says they always are
    num_free: jax.Array  # i32[]
    checksums: jax.Array  # u32[ranks], of the blocks of each rank, in debug mode; else u32[0]
    logprob: jax.Array  # f32[K, R], of the sampled token; 0 where no row asks for logprobs
    rank: jax.Array  # i32[K, R], from 1
    top_logprobs: jax.Array  # f32[K, R, n], the most likely tokens
    top_ids: jax.Array  # i32[K, R, n]
    prompt: dict[str, jax.Array]  # the last four of prompt tokens, [T] and [T, n]


class Sizes(NamedTuple):
    """Sizes of an engine that its programs share."""

    decode_steps: int
    """K, most decode steps of a call."""
    num_listed: int
    """Most likely tokens that are listed per position."""
    axis_name: str | None = None
    """Of the ranks that have parts of the vocabulary."""
    has_checksums: bool = False
    """Whether the blocks of all ranks are compared."""


COMMAND_BUFFER_OPTION = "xla_gpu_enable_command_buffer"


def step_options(platform: str) -> dict[str, str]:
    """Compiler options of the step on a platform; pass them to `Lowered.compile` for another.

    On GPU, loops and branches become part of the CUDA graph: the host then launches one graph a
    step, and does not wait in the middle of it to learn which way to go. Whoever sets the option in
    XLA_FLAGS, to nothing for no graphs, is not overruled.
    """
    if platform not in ("gpu", "cuda") or COMMAND_BUFFER_OPTION in os.environ.get("XLA_FLAGS", ""):
        return {}
    captured = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
    return {COMMAND_BUFFER_OPTION: captured}


class OnMesh(NamedTuple):
    """Where the step of a divided model runs, and how its arrays are divided."""

    mesh: Mesh
    params: tuple[PartitionSpec, ...]
    kv: KVCache
    """With a `PartitionSpec` in the place of each array."""


def make_step(
    graphdef: Any, treedef: Any, sizes: Sizes, on_mesh: OnMesh | None = None
) -> jax.stages.Wrapped:
    """The jitted step of one model; engines of equal models share it and its programs.

    Args:
      on_mesh: For a divided model, whose `graphdef` is that of one rank. All ranks get the same
        blocks, rows and inputs, and make the same transitions.
    """
    try:
        hash((graphdef, on_mesh))
    except TypeError:
        # A module may keep a list or a dict as an attribute; its step is then its own.
        return _build_step(graphdef, treedef, sizes, on_mesh)
    return _shared_step(graphdef, treedef, sizes, on_mesh)


def _build_step(
    graphdef: Any, treedef: Any, sizes: Sizes, on_mesh: OnMesh | None
) -> jax.stages.Wrapped:
    """Builds the jitted step.

    Args:
      graphdef: From `nnx.split`; the module is merged again inside the trace, because a module or
        an `nnx.State` at the boundary costs milliseconds a call.
      treedef: Structure of the state whose leaves are passed as `params`.
      sizes: See `Sizes`.
    """

    def step(
        params: tuple[jax.Array, ...],
        kv: KVCache,
        blocks: BlockState,
        rows: RowState,
        inputs: StepInputs,
        options: LogitOptions,
    ) -> tuple[KVCache, BlockState, RowState, StepOutputs, LogitOptions]:
        model = nnx.merge(graphdef, treedef.unflatten(params))
        blocks, kv, ok = _allocate(blocks, kv, inputs, sizes.decode_steps)
        rows = _admit(rows, inputs)
        is_decode_only = inputs.tokens.shape == inputs.row_ids.shape
        run = _decode if is_decode_only else _run_once
        kv, rows, options, found = run(model, kv, blocks, rows, inputs, options, sizes)
        checksums = _checksums(blocks, sizes)
        outputs = StepOutputs(ok=ok, num_free=blocks.num_free, checksums=checksums, **found)
        return kv, blocks, rows, outputs, options

    run = step
    if on_mesh is not None:
        whole = PartitionSpec()
        run = jax.shard_map(
            step,
            mesh=on_mesh.mesh,
            in_specs=(on_mesh.params, on_mesh.kv, whole, whole, whole, whole),
            out_specs=(on_mesh.kv, whole, whole, whole, whole),
            check_vma=False,  # kernels do not say how their results vary
        )
    compiler_options = step_options(jax.default_backend())
    return jax.jit(run, donate_argnums=(1, 5), compiler_options=compiler_options or None)


_shared_step = functools.lru_cache(maxsize=16)(_build_step)


def _checksums(blocks: BlockState, sizes: Sizes) -> jax.Array:
    """u32[ranks], equal where all ranks have the same blocks."""
    if not sizes.has_checksums:
        return jnp.zeros(0, jnp.uint32)
    total = jnp.uint32(0)
    for i, leaf in enumerate(jax.tree.leaves(blocks)):
        flat = leaf.reshape(-1).astype(jnp.uint32)
        place = jnp.arange(flat.size, dtype=jnp.uint32)
        # Odd multipliers lose no bit, and differ so that swapped numbers are seen.
        factor = (place + jnp.uint32(i)) * jnp.uint32(0x3C6EF362) + jnp.uint32(1)
        total = total * jnp.uint32(31) + jnp.sum(flat * factor, dtype=jnp.uint32)
    return jax.lax.all_gather(total, sizes.axis_name)


def _allocate(
    blocks: BlockState, kv: KVCache, inputs: StepInputs, decode_steps: int
) -> tuple[BlockState, KVCache, jax.Array]:
    """Frees rows, retains blocks and makes room for all tokens of the call."""
    num_tokens, num_rows = inputs.tokens.shape[0], inputs.row_ids.shape[0]
    blocks = core.free(blocks, inputs.free_rows)
    blocks = core.retain(blocks, inputs.retain_ids)
    new_tokens = jnp.zeros(blocks.max_seqs, jnp.int32)
    new_tokens = new_tokens.at[inputs.row_ids].set(inputs.query_lens, mode="drop")
    # A row takes at most one block more than its tokens fill, and copies at most one.
    growth = min(num_tokens, ceil_div(num_tokens, blocks.block_size) + num_rows)
    if num_tokens == num_rows:
        growth = num_rows * ceil_div(decode_steps, blocks.block_size)
    blocks, allocation = core.allocate(blocks, new_tokens, max_new_blocks=growth + num_rows)
    return blocks, ops.copy_kv(kv, allocation.copy_src, allocation.copy_dst), allocation.ok


def _decode(
    model: Any,
    kv: KVCache,
    blocks: BlockState,
    rows: RowState,
    inputs: StepInputs,
    options: LogitOptions,
    sizes: Sizes,
) -> tuple[KVCache, RowState, LogitOptions, dict[str, Any]]:
    """Up to K tokens of each row, one step after the other."""
    num_rows = inputs.row_ids.shape[0]
    is_row, row, mine = _mine(rows, inputs)
    base = blocks.lengths[row] - inputs.query_lens
    is_wanted = is_row & inputs.is_sampled

    def runs_at(step: jax.Array, finished: jax.Array) -> jax.Array:
        return is_row & (step < inputs.query_lens) & ~finished

    def has_more(carry: tuple) -> jax.Array:
        step, *_, finished, _, _ = carry
        return (step < inputs.num_steps) & jnp.any(runs_at(step, finished))

    def one_step(carry: tuple) -> tuple:
        step, kv, token, finished, options, out = carry
        runs = runs_at(step, finished)
        batch = core.make_decode_batch(
            blocks, tokens=token, positions=base + step, runs=runs, row_ids=inputs.row_ids
        )
        kv = _write_tags(kv, blocks, batch, inputs)
        hidden, cache = model(batch, PagedCache(blocks=blocks, kv=kv))
        sampled, options, found = _sample(
            model, hidden, mine, batch.context_lens, is_wanted & runs, inputs, options, sizes
        )
        ends = is_wanted & jnp.any(mine.stop_ids == sampled[:, None], axis=1)
        out = {name: x.at[step].set(found[name]) for name, x in out.items() if name in found} | {
            "num_run": out["num_run"] + runs.astype(jnp.int32)
        }
        token = jnp.where(runs, sampled, token)
        return step + 1, cache.kv, token, finished | (runs & ends), options, out

    token = jnp.where(inputs.is_given, inputs.tokens, mine.token)
    out = {"tokens": jnp.zeros(num_rows, jnp.int32)} | no_logprobs(num_rows, sizes.num_listed)
    steps = sizes.decode_steps
    out = {name: jnp.zeros((steps, *x.shape), x.dtype) for name, x in out.items()}
    out["num_run"] = jnp.zeros(num_rows, jnp.int32)
    start = (jnp.int32(0), kv, token, mine.finished, options, out)
    _, kv, token, finished, options, out = jax.lax.while_loop(has_more, one_step, start)
    rows = _remember(rows, inputs, is_wanted, token, finished)
    return kv, rows, options, out | {"prompt": no_logprobs(0, sizes.num_listed)}


def _run_once(
    model: Any,
    kv: KVCache,
    blocks: BlockState,
    rows: RowState,
    inputs: StepInputs,
    options: LogitOptions,
    sizes: Sizes,
) -> tuple[KVCache, RowState, LogitOptions, dict[str, Any]]:
    """One step of rows that decode and rows in prefill."""
    num_rows, max_seqs = inputs.row_ids.shape[0], blocks.max_seqs
    is_row, _, mine = _mine(rows, inputs)
    is_decode = jnp.arange(num_rows) < inputs.num_decode
    leading = jnp.where(is_decode & ~inputs.is_given, mine.token, inputs.tokens[:num_rows])
    batch = core.make_batch(
        blocks,
        tokens=inputs.tokens.at[:num_rows].set(leading),
        row_ids=inputs.row_ids,
        query_lens=inputs.query_lens,
        num_decode=inputs.num_decode,
    )
    # A row that has ended, which the host did not know yet, is in the way but writes nothing.
    is_frozen = is_decode & mine.finished
    frozen = jnp.zeros(max_seqs + 1, bool).at[inputs.row_ids].set(is_frozen).at[max_seqs].set(False)
    batch = dataclasses.replace(batch, slots=jnp.where(frozen[batch.rows], 0, batch.slots))
    kv = _write_tags(kv, blocks, batch, inputs)
    hidden, cache = model(batch, PagedCache(blocks=blocks, kv=kv))
    is_wanted = is_row & inputs.is_sampled & ~is_frozen
    last = hidden[batch.last_tokens[inputs.sources]]
    lengths = batch.context_lens[inputs.sources]
    sampled, options, found = _sample(model, last, mine, lengths, is_wanted, inputs, options, sizes)
    ends = jnp.any(mine.stop_ids == sampled[:, None], axis=1)
    rows = _remember(rows, inputs, is_wanted, sampled, ends)
    found = {name: x[None] for name, x in found.items()} | {
        "num_run": jnp.where(is_frozen, 0, inputs.query_lens),
        "prompt": prompt_logprobs(
            model, hidden, inputs.next_tokens, sizes.num_listed, sizes.axis_name
        ),
    }
    return cache.kv, rows, options, found


def _mine(rows: RowState, inputs: StepInputs) -> tuple[jax.Array, jax.Array, RowState]:
    """bool[R], which entries are rows; i32[R], their rows, 0 in padding; the fields of those."""
    is_row = inputs.row_ids < rows.token.shape[0]
    row = jnp.where(is_row, inputs.row_ids, 0)
    return is_row, row, jax.tree.map(lambda x: x[row], rows)


def _remember(
    rows: RowState,
    inputs: StepInputs,
    is_wanted: jax.Array,
    token: jax.Array,
    finished: jax.Array,
) -> RowState:
    """Keeps the last token of the rows that are wanted, and whether they ended with it."""
    target = jnp.where(is_wanted, inputs.row_ids, rows.token.shape[0])
    return dataclasses.replace(
        rows,
        token=rows.token.at[target].set(token, mode="drop"),
        finished=rows.finished.at[target].set(finished, mode="drop"),
    )


def _write_tags(kv: KVCache, blocks: BlockState, batch: Batch, inputs: StepInputs) -> KVCache:
    if kv.tags is None:
        return kv
    owners = jnp.zeros(blocks.max_seqs + 1, jnp.int32)
    owners = owners.at[inputs.row_ids].set(inputs.owners)[batch.rows]
    return core.write_tags(kv, batch.slots, core.make_tags(owners, batch.positions))


def _sample(
    model: Any,
    hidden: jax.Array,
    rows: RowState,
    lengths: jax.Array,
    is_wanted: jax.Array,
    inputs: StepInputs,
    options: LogitOptions,
    sizes: Sizes,
) -> tuple[jax.Array, LogitOptions, dict[str, jax.Array]]:
    """Next tokens of `hidden[R, E]` after `lengths` others, and what is told of them."""
    logits = model.logits(hidden).astype(jnp.float32)
    max_seqs = options.num_prompt.shape[0]
    has_options = is_wanted & rows.has_options

    def adjust() -> jax.Array:
        mine = jax.tree.map(lambda x: x.at[inputs.row_ids].get(mode="clip"), options)
        adjusted = ops.adjust_logits(logits, mine, lengths, sizes.axis_name)
        # A row that wants nothing does not notice those that do.
        return jnp.where(has_options[:, None], adjusted, logits)

    sampled = ops.sample(
        jax.lax.cond(jnp.any(has_options), adjust, lambda: logits),
        # Rows that sample nothing must not make a greedy batch pay for sampling.
        temperature=jnp.where(is_wanted, rows.temperature, 0.0),
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        seeds=rows.seeds,
        positions=lengths,
        axis_name=sizes.axis_name,
    )
    row = jnp.where(has_options, inputs.row_ids, max_seqs)
    tokens = options.tokens.at[row, lengths].set(sampled, mode="drop")
    found = jax.lax.cond(
        jnp.any(is_wanted & inputs.has_logprobs),
        lambda: logprobs(logits, sampled, sizes.num_listed, sizes.axis_name),
        lambda: no_logprobs(hidden.shape[0], sizes.num_listed),
    )
    return sampled, dataclasses.replace(options, tokens=tokens), found | {"tokens": sampled}


def _admit(rows: RowState, inputs: StepInputs) -> RowState:
    """Sets the fields of rows in which a request starts."""
    target = jnp.where(inputs.is_admission, inputs.row_ids, rows.token.shape[0])
    return jax.tree.map(
        lambda old, new: old.at[target].set(new, mode="drop"), rows, inputs.admitted
    )
