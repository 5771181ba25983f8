"""The device side: parameters, pool, block state, row state, and the programs over them."""

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from paged_jax import core
from paged_jax.config import ResolvedConfig
from paged_jax.decode import RowState, create_row_state, seed_words
from paged_jax.engine.buckets import Program, choose, programs
from paged_jax.engine.moves import apply_moves, row_mask
from paged_jax.engine.request import Request
from paged_jax.engine.step import StepInputs, StepOutputs, make_step
from paged_jax.models.protocol import PagedModel
from paged_jax.plan import Plan

_logger = logging.getLogger("paged_jax")


class Runner:
    """Applies plans on the device and reads back what was sampled."""

    def __init__(
        self,
        model: PagedModel,
        config: ResolvedConfig,
        kv_dtype: Any,
        *,
        strict_compile: bool,
        has_tags: bool,
    ) -> None:
        self.config = config
        self.programs = programs(config)
        self.compiled: set[Program] = set()
        self._strict_compile = strict_compile
        self._is_warm = False
        self._has_tags = has_tags
        self._kv_dtype = kv_dtype
        self._spec = model.cache_spec()
        graphdef, state = nnx.split(model)
        leaves, treedef = jax.tree.flatten(state)
        self._params = tuple(leaves)
        self._step = make_step(graphdef, treedef)
        self._one_row: RowState = jax.device_get(create_row_state(1))
        self.reset()

    def reset(self) -> None:
        """Makes a new, empty pool; a failed step takes the donated one with it."""
        config = self.config
        # Before the new one is made: memory may not hold two.
        self.kv = None
        self.kv = core.create_kv_cache(
            self._spec, config.num_blocks, config.block_size, self._kv_dtype
        )
        if self._has_tags:
            self.kv = core.with_tags(self.kv)
        self.blocks = core.create_block_state(
            config.num_blocks, config.block_size, config.max_num_seqs, config.max_blocks_per_seq
        )
        self.rows = create_row_state(config.max_num_seqs)

    def run(self, plan: Plan, requests: Mapping[str, Request]) -> StepOutputs | None:
        """Applies a plan; returns what was read back, as numpy arrays.

        Returns: None for a plan without tokens, which runs no model.
        """
        if plan.has_moves or not plan.segments:
            self.blocks, self.rows = apply_moves(self.blocks, self.rows, plan)
            plan = dataclasses.replace(plan, free_rows=())
        if not plan.segments:
            return None
        program = choose(self.programs, plan.num_tokens, len(plan.segments))
        return self._dispatch(program, self._inputs(program, plan, requests))

    def warm_up(self) -> None:
        """Compiles every program by running it on padding alone."""
        for program in self.programs:
            self._dispatch(program, self._inputs(program, Plan(), {}))
        self.run(Plan(free_rows=(0,)), {})  # the program that only frees
        self._is_warm = True

    def lower(self, program: Program) -> jax.stages.Lowered:
        """The step of one program before compilation, for checks of what XLA makes of it."""
        inputs = self._inputs(program, Plan(), {})
        return self._step.lower(self._params, self.kv, self.blocks, self.rows, inputs)

    def _dispatch(self, program: Program, inputs: StepInputs) -> StepOutputs:
        is_new = program not in self.compiled
        if is_new:
            if self._is_warm and self._strict_compile:
                raise RuntimeError(f"{program} would be compiled after warm-up (strict_compile)")
            _logger.info(
                "compiling the step for %d tokens and %d rows", program.num_tokens, program.num_rows
            )
        start = time.monotonic()
        self.kv, self.blocks, self.rows, outputs = self._step(
            self._params, self.kv, self.blocks, self.rows, inputs
        )
        outputs = jax.device_get(outputs)
        if is_new:
            self.compiled.add(program)
            _logger.info("compiled and ran in %.1f s", time.monotonic() - start)
        return outputs

    def _inputs(self, program: Program, plan: Plan, requests: Mapping[str, Request]) -> StepInputs:
        """Fills the arrays of a program from a plan."""
        num_tokens, num_rows = program
        tokens = np.zeros(num_tokens, np.int32)
        row_ids = np.full(num_rows, self.config.max_num_seqs, np.int32)
        query_lens = np.zeros(num_rows, np.int32)
        is_sampled = np.zeros(num_rows, bool)
        is_admission = np.zeros(num_rows, bool)
        has_logprobs = np.zeros(num_rows, bool)
        owners = np.zeros(num_rows, np.int32)
        admitted = jax.tree.map(lambda x: np.repeat(x, num_rows, axis=0), self._one_row)
        place = 0
        for i, segment in enumerate(plan.segments):
            request = requests[segment.request_id]
            row_ids[i], query_lens[i] = segment.row, segment.num_tokens
            is_sampled[i], is_admission[i] = segment.is_sampled, segment.is_admission
            if not segment.is_decode:
                tokens[place : place + segment.num_tokens] = request.known(
                    segment.start, segment.num_tokens
                )
            has_logprobs[i] = request.params.logprobs is not None
            owners[i] = request.order
            if segment.is_admission:
                _set_row(admitted, i, request)
            place += segment.num_tokens
        return StepInputs(
            free_rows=row_mask(plan.free_rows, self.config.max_num_seqs),  # type: ignore[arg-type]
            tokens=tokens,  # type: ignore[arg-type]
            row_ids=row_ids,  # type: ignore[arg-type]
            query_lens=query_lens,  # type: ignore[arg-type]
            num_decode=np.int32(plan.num_decode),  # type: ignore[arg-type]
            is_sampled=is_sampled,  # type: ignore[arg-type]
            is_admission=is_admission,  # type: ignore[arg-type]
            has_logprobs=has_logprobs,  # type: ignore[arg-type]
            owners=owners,  # type: ignore[arg-type]
            admitted=admitted,
        )


def probe(model: PagedModel) -> tuple[Any, int]:
    """KV dtype and vocabulary size of a model on the protocol, without running it."""
    spec = model.cache_spec()

    def run() -> tuple[jax.Array, jax.Array]:
        blocks = core.create_block_state(1, 1, 1, 1)
        kv = core.create_kv_cache(spec, 1, 1, np.float32)
        batch = core.make_batch(
            blocks,
            tokens=np.zeros(2, np.int32),
            row_ids=np.ones(1, np.int32),
            query_lens=np.zeros(1, np.int32),
            num_decode=0,
        )
        hidden, _ = model(batch, core.PagedCache(blocks=blocks, kv=kv))
        return hidden, model.logits(hidden)

    hidden, logits = nnx.eval_shape(run)
    return hidden.dtype, logits.shape[-1]


def _set_row(rows: RowState, i: int, request: Request) -> None:
    """Fills entry i of numpy row fields from a request."""
    params = request.params
    rows.temperature[i] = params.temperature  # type: ignore[index]
    rows.top_k[i] = min(max(0, params.top_k), 2**31 - 1)  # type: ignore[index]
    rows.top_p[i] = params.top_p  # type: ignore[index]
    rows.seeds[i] = seed_words(request.seed)  # type: ignore[index]
