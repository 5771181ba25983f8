"""The device side: parameters, pool, block state, row state, and the programs over them."""

import dataclasses
import logging
import time
from collections.abc import Sequence as Listed
from typing import Any

import jax
import numpy as np
from flax import nnx

from paged_jax import core
from paged_jax.config import ResolvedConfig
from paged_jax.core import KVCache, PagedCache
from paged_jax.decode import MAX_STOP_IDS, NO_STOP_ID, RowState, create_row_state, seed_words
from paged_jax.engine import logit_options, swap
from paged_jax.engine.buckets import Program, choose, programs
from paged_jax.engine.moves import MAX_IDS, apply_moves, padding_plan, row_mask
from paged_jax.engine.places import Places
from paged_jax.engine.request import Sequence
from paged_jax.engine.step import Sizes, StepInputs, StepOutputs, make_step
from paged_jax.engine.weights import fit, leaf_specs
from paged_jax.models.protocol import PagedModel
from paged_jax.ops import LogitOptions
from paged_jax.plan import Plan, Segment
from paged_jax.sampling_params import MAX_LOGPROBS

_logger = logging.getLogger("paged_jax")


class Runner:
    """Applies plans on the device and reads back what was sampled."""

    def __init__(
        self,
        model: PagedModel,
        config: ResolvedConfig,
        kv_dtype: Any,
        vocab_size: int,
        places: Places,
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
        self.is_asleep = False
        """Whether the pool was given back; see `sleep`."""
        self._kv_dtype = kv_dtype
        self._spec = model.cache_spec()
        self._places = places
        graphdef, state = nnx.split(model)
        state = self._places.bind(state)
        leaves, treedef = jax.tree.flatten(state)
        self.leaf_specs = leaf_specs(state)
        self._params: tuple[jax.Array, ...] | None = tuple(leaves)
        self._vocab_size = vocab_size
        axis_name = self._places.axis_name
        sizes = Sizes(
            config.decode_steps,
            min(MAX_LOGPROBS, vocab_size),
            axis_name,
            has_checksums=has_tags and axis_name is not None,
        )
        self._one_row: RowState = jax.device_get(create_row_state(1))
        self.reset()
        assert self.kv is not None
        on_mesh = self._places.on_mesh(self._params, self.kv)
        self._step = make_step(graphdef, treedef, sizes, on_mesh)

    def reset(self) -> None:
        """Makes a new, empty pool; a failed step takes the donated one with it."""
        config = self.config
        # Before the new one is made: memory may not hold two.
        self.kv = None
        blocks = core.create_block_state(
            config.num_blocks, config.block_size, config.max_num_seqs, config.max_blocks_per_seq
        )
        self.blocks, self.rows = self._places.put((blocks, create_row_state(config.max_num_seqs)))
        self._options: LogitOptions | None = None
        self._options = self._places.put(
            logit_options.create(config.max_num_seqs, config.max_model_len, self._vocab_size)
        )
        if not self.is_asleep:
            self._set_pool(
                self._places.pool(self._spec, config.num_blocks, config.block_size, self._kv_dtype)
            )

    def adopt(self, cache: PagedCache, rows: RowState, running: Listed[Sequence]) -> None:
        """Goes on with the blocks, without tags, and rows of another runner of the same sizes.

        Args:
          running: Who has the rows.
        """
        assert self._options is not None
        for sequence in running:
            if sequence.row is not None:
                self._options = logit_options.write_row(
                    self._options, sequence.row, sequence, self._vocab_size
                )
        self.blocks, self.rows = self._places.put((cache.blocks, rows))
        self._set_pool(cache.kv)

    def fit(self, params: Any) -> tuple[jax.Array, ...]:
        """Checks other parameters for `set_params`; see `weights.fit`."""
        return fit(params, self.leaf_specs, self._places.placer)

    def set_params(self, params: tuple[jax.Array, ...]) -> None:
        """Computes with these from `fit` from now on; no program is compiled again."""
        self._params = params

    @property
    def has_params(self) -> bool:
        """Whether there are parameters to compute with."""
        return self._params is not None

    def sleep(self, *, keeps_params: bool) -> None:
        """Gives the memory of the pool back, and that of the parameters, until `wake_up`."""
        self.is_asleep = True
        self.reset()
        if not keeps_params:
            self._params = None

    def wake_up(self) -> None:
        """Makes an empty pool again."""
        assert self.has_params
        self.is_asleep = False
        try:
            self.reset()
        except BaseException:
            self.is_asleep = True
            raise

    def _set_pool(self, kv: KVCache) -> None:
        kv = core.with_tags(kv) if self._has_tags else kv
        self.kv: KVCache | None = self._places.put_pool(kv)

    def issue(
        self,
        plan: Plan,
        sequences: Listed[Sequence],
        images: Listed[tuple[Listed[int], KVCache, int]],
    ) -> StepOutputs | None:
        """Applies a plan on the device, without waiting for it.

        Args:
          plan: From the scheduler.
          sequences: One per segment.
          images: (block ids, host image, first block of it) to write once rows have their blocks.
        Returns: Arrays on the device, for `jax.device_get`; None for a plan without tokens, which
          runs no model.
        """
        program = self._choose(plan, sequences) if plan.segments else None
        is_outside = program is None or len(plan.retain_ids) > self._num_retained(program)
        if plan.has_moves or is_outside:
            self.blocks, self.rows = apply_moves(self.blocks, self.rows, plan)
            plan = dataclasses.replace(plan, free_rows=(), retain_ids=())
        for ids, image, first in images:
            assert self.kv is not None
            self.kv = swap.write_image(self.kv, ids, image, first)
        if program is None:
            return None
        assert self._options is not None
        self._options = logit_options.write(
            self._options, plan.segments, sequences, self._vocab_size
        )
        return self._dispatch(program, self._inputs(program, plan, sequences))

    def swap_out(self, ids: Listed[int]) -> KVCache:
        """Reads blocks to the host, after every dispatch that was issued."""
        assert self.kv is not None
        return swap.read_image(self.kv, ids)

    def warm_up(self) -> None:
        """Compiles every program by running it on padding alone."""
        config = self.config
        for program in self.programs:
            jax.block_until_ready(self._dispatch(program, self._inputs(program, Plan(), ())))
        self.issue(padding_plan(config.max_num_seqs), (), ())
        assert self._options is not None
        self._options = logit_options.warm_up(self._options)
        if config.preemption_mode != "recompute":
            assert self.kv is not None
            self.kv = swap.warm_up(self.kv, config.max_blocks_per_seq)
        self._is_warm = True

    def lower(self, program: Program) -> jax.stages.Lowered:
        """The step of one program before compilation, for checks of what XLA makes of it."""
        inputs = self._inputs(program, Plan(), ())
        return self._step.lower(
            self._params, self.kv, self.blocks, self.rows, inputs, self._options
        )

    def _dispatch(self, program: Program, inputs: StepInputs) -> StepOutputs:
        is_new = program not in self.compiled
        if is_new:
            if self._is_warm and self._strict_compile:
                raise RuntimeError(f"{program} would be compiled after warm-up (strict_compile)")
            _logger.info(
                "compiling the step for %d tokens and %d rows", program.num_tokens, program.num_rows
            )
        start = time.monotonic()
        self.kv, self.blocks, self.rows, outputs, self._options = self._step(
            self._params, self.kv, self.blocks, self.rows, inputs, self._options
        )
        if is_new:
            self.compiled.add(program)
            _logger.info("compiled in %.1f s", time.monotonic() - start)
        return outputs

    def _choose(self, plan: Plan, sequences: Listed[Sequence]) -> Program:
        is_single = all(
            segment.is_decode or (segment.num_tokens == 1 and not tells_prompt(segment, sequence))
            for segment, sequence in zip(plan.segments, sequences, strict=True)
        )
        return choose(self.programs, plan.num_tokens, len(plan.segments), is_single=is_single)

    def _num_retained(self, program: Program) -> int:
        """Blocks that a step of a program can retain; more of them go through `apply_moves`."""
        return min(program.num_tokens, MAX_IDS)

    def _inputs(self, program: Program, plan: Plan, sequences: Listed[Sequence]) -> StepInputs:
        """Fills the arrays of a program from a plan."""
        num_tokens, num_rows = program
        segments = plan.segments
        tokens = np.zeros(num_tokens, np.int32)
        next_tokens = np.full(num_tokens, -1, np.int32)
        sources = np.arange(num_rows, dtype=np.int32)
        admitted = jax.tree.map(lambda x: np.repeat(x, num_rows, axis=0), self._one_row)
        given = [segment.is_given or not segment.is_decode for segment in segments]
        entries = {segment.row: i for i, segment in enumerate(segments)}
        place = 0
        for i, (segment, is_given) in enumerate(zip(segments, given, strict=True)):
            count = 1 if segment.is_decode else segment.num_tokens
            if is_given:
                known = sequences[i].tokens[segment.start : segment.start + count]
                tokens[place : place + count] = known
            if segment.source is not None:
                sources[i] = entries[segment.source]
            if tells_prompt(segment, sequences[i]):
                following = sequences[i].request.prompt_token_ids[segment.start + 1 :][:count]
                next_tokens[place : place + len(following)] = following
            if segment.is_admission:
                self._set_row(admitted, i, sequences[i])
            place += count
        has_logprobs = [sequence.request.num_logprobs is not None for sequence in sequences]
        owners = [sequence.owner for sequence in sequences] if self._has_tags else []

        most_rows = self.config.max_num_seqs
        return StepInputs(
            free_rows=row_mask(plan.free_rows, most_rows),  # type: ignore[arg-type]
            retain_ids=_padded(plan.retain_ids, self._num_retained(program), np.int32),
            tokens=tokens,  # type: ignore[arg-type]
            row_ids=_padded([s.row for s in segments], num_rows, np.int32, rest=most_rows),
            query_lens=_padded([s.num_tokens for s in segments], num_rows, np.int32),
            sources=sources,  # type: ignore[arg-type]
            num_decode=np.int32(plan.num_decode),  # type: ignore[arg-type]
            num_steps=np.int32(plan.num_steps),  # type: ignore[arg-type]
            is_given=_padded(given, num_rows, bool),
            is_sampled=_padded([s.is_sampled for s in segments], num_rows, bool),
            is_admission=_padded([s.is_admission for s in segments], num_rows, bool),
            has_logprobs=_padded(has_logprobs, num_rows, bool),
            owners=_padded(owners, num_rows, np.int32),
            admitted=admitted,
            next_tokens=next_tokens,  # type: ignore[arg-type]
        )

    def _set_row(self, rows: RowState, i: int, sequence: Sequence) -> None:
        """Fills entry i of numpy row fields from a sequence."""
        request = sequence.request
        params = request.params
        rows.temperature[i] = params.temperature  # type: ignore[index]
        rows.top_k[i] = min(max(0, params.top_k), 2**31 - 1)  # type: ignore[index]
        rows.top_p[i] = params.top_p  # type: ignore[index]
        rows.min_p[i] = params.min_p  # type: ignore[index]
        rows.has_options[i] = request.has_logit_options  # type: ignore[index]
        rows.seeds[i] = seed_words(request.seed, sequence.index)  # type: ignore[index]
        # The host looks at every token too: more of them than fit here only run on for a while.
        stop_ids = sorted(request.stop_ids)[:MAX_STOP_IDS]
        rows.stop_ids[i] = NO_STOP_ID  # type: ignore[index]
        rows.stop_ids[i, : len(stop_ids)] = stop_ids  # type: ignore[index]
        rows.finished[i] = False  # type: ignore[index]


def tells_prompt(segment: Segment, sequence: Sequence) -> bool:
    """Whether log-probabilities of prompt tokens are read from a segment."""
    return not segment.is_decode and sequence.request.lacks_prompt_logprobs


def _padded(values: Listed[int], size: int, dtype: Any, *, rest: int = 0) -> Any:
    array = np.full(size, rest, dtype)
    array[: len(values)] = values
    return array
