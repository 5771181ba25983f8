"""The jitted step: apply a plan to the blocks, run the model, sample.

`step(params, kv, blocks, rows, inputs) -> (kv, blocks, rows, outputs)`. The pool is donated and
updated in place; `blocks` and `rows` are small and never donated.
"""

import dataclasses
import functools
import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax import core, ops
from paged_jax.core import BlockState, KVCache, PagedCache
from paged_jax.decode import RowState
from paged_jax.sampling_params import MAX_LOGPROBS
from paged_jax.shapes import ceil_div


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """A plan as arrays of bucket sizes T and R; decode rows first."""

    free_rows: jax.Array  # bool[S], freed before anything else
    tokens: jax.Array  # i32[T], prefill tokens in their places; decode tokens are in RowState
    row_ids: jax.Array  # i32[R], S in padding
    query_lens: jax.Array  # i32[R], tokens to allocate and run; 0 in padding
    num_decode: jax.Array  # i32[]
    is_sampled: jax.Array  # bool[R], rows whose next token is wanted
    is_admission: jax.Array  # bool[R], rows whose sampling fields are set from here
    has_logprobs: jax.Array  # bool[R], rows whose log-probabilities are wanted
    owners: jax.Array  # i32[R], a number per request; only shadow tags read it
    admitted: RowState  # [R], the fields of those rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """What the host reads back; R rows in the order of the inputs."""

    tokens: jax.Array  # i32[R]
    ok: jax.Array  # bool[], whether the blocks were there; the ledger says they always are
    num_free: jax.Array  # i32[]
    logprob: jax.Array  # f32[R], of the sampled token; 0 where no row asks for logprobs
    rank: jax.Array  # i32[R], from 1
    top_logprobs: jax.Array  # f32[R, MAX_LOGPROBS]
    top_ids: jax.Array  # i32[R, MAX_LOGPROBS]


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


def make_step(graphdef: Any, treedef: Any) -> jax.stages.Wrapped:
    """The jitted step of one model; engines of equal models share it and its programs."""
    try:
        hash(graphdef)
    except TypeError:
        # A module may keep a list or a dict as an attribute; its step is then its own.
        return _build_step(graphdef, treedef)
    return _shared_step(graphdef, treedef)


def _build_step(graphdef: Any, treedef: Any) -> jax.stages.Wrapped:
    """Builds the jitted step.

    Args:
      graphdef: From `nnx.split`; the module is merged again inside the trace, because a module or
        an `nnx.State` at the boundary costs milliseconds a call.
      treedef: Structure of the state whose leaves are passed as `params`.
    """

    def step(
        params: tuple[jax.Array, ...],
        kv: KVCache,
        blocks: BlockState,
        rows: RowState,
        inputs: StepInputs,
    ) -> tuple[KVCache, BlockState, RowState, StepOutputs]:
        model = nnx.merge(graphdef, treedef.unflatten(params))
        num_tokens, num_rows = inputs.tokens.shape[0], inputs.row_ids.shape[0]

        blocks = core.free(blocks, inputs.free_rows)
        new_tokens = jnp.zeros(blocks.max_seqs, jnp.int32)
        new_tokens = new_tokens.at[inputs.row_ids].set(inputs.query_lens, mode="drop")
        # A row takes at most one block more than its tokens fill, and copies at most one.
        growth = min(num_tokens, ceil_div(num_tokens, blocks.block_size) + num_rows)
        blocks, allocation = core.allocate(blocks, new_tokens, max_new_blocks=growth + num_rows)
        kv = ops.copy_kv(kv, allocation.copy_src, allocation.copy_dst)

        rows = _admit(rows, inputs)
        is_row = inputs.row_ids < blocks.max_seqs
        mine = jax.tree.map(lambda x: x[jnp.where(is_row, inputs.row_ids, 0)], rows)
        is_decode = jnp.arange(num_rows) < inputs.num_decode
        leading = jnp.where(is_decode, mine.token, inputs.tokens[:num_rows])
        batch = core.make_batch(
            blocks,
            tokens=inputs.tokens.at[:num_rows].set(leading),
            row_ids=inputs.row_ids,
            query_lens=inputs.query_lens,
            num_decode=None if num_tokens == num_rows else inputs.num_decode,
        )
        if kv.tags is not None:
            owners = jnp.zeros(blocks.max_seqs + 1, jnp.int32)
            owners = owners.at[inputs.row_ids].set(inputs.owners)[batch.rows]
            kv = core.write_tags(kv, batch.slots, core.make_tags(owners, batch.positions))
        hidden, cache = model(batch, PagedCache(blocks=blocks, kv=kv))
        logits = model.logits(hidden[batch.last_tokens]).astype(jnp.float32)

        is_wanted = is_row & inputs.is_sampled
        sampled = ops.sample(
            logits,
            # Rows that sample nothing must not make a greedy batch pay for sampling.
            temperature=jnp.where(is_wanted, mine.temperature, 0.0),
            top_k=mine.top_k,
            top_p=mine.top_p,
            seeds=mine.seeds,
            positions=batch.context_lens,
        )
        target = jnp.where(is_wanted, inputs.row_ids, blocks.max_seqs)
        rows = dataclasses.replace(rows, token=rows.token.at[target].set(sampled, mode="drop"))
        logprob, rank, top_logprobs, top_ids = jax.lax.cond(
            jnp.any(is_wanted & inputs.has_logprobs),
            lambda: ops.top_logprobs(logits, sampled, min(MAX_LOGPROBS, logits.shape[1])),
            lambda: _no_logprobs(num_rows, min(MAX_LOGPROBS, logits.shape[1])),
        )
        outputs = StepOutputs(
            tokens=sampled,
            ok=allocation.ok,
            num_free=blocks.num_free,
            logprob=logprob,
            rank=rank,
            top_logprobs=top_logprobs,
            top_ids=top_ids,
        )
        return cache.kv, blocks, rows, outputs

    options = step_options(jax.default_backend())
    return jax.jit(step, donate_argnums=1, compiler_options=options or None)


_shared_step = functools.lru_cache(maxsize=16)(_build_step)


def _admit(rows: RowState, inputs: StepInputs) -> RowState:
    """Sets the fields of rows in which a request starts."""
    target = jnp.where(inputs.is_admission, inputs.row_ids, rows.token.shape[0])
    return jax.tree.map(
        lambda old, new: old.at[target].set(new, mode="drop"), rows, inputs.admitted
    )


def _no_logprobs(num_rows: int, count: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    return (
        jnp.zeros(num_rows, jnp.float32),
        jnp.zeros(num_rows, jnp.int32),
        jnp.zeros((num_rows, count), jnp.float32),
        jnp.zeros((num_rows, count), jnp.int32),
    )
