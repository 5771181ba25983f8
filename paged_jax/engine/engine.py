"""Requests in, tokens out: joins scheduler, ledger and runner, one dispatch per `step`."""

import contextlib
import random
import time
from collections.abc import Iterator, Sequence

import numpy as np

from paged_jax import core
from paged_jax.config import EngineConfig, ResolvedConfig
from paged_jax.engine.pool import resolve
from paged_jax.engine.request import Request
from paged_jax.engine.runner import Runner, probe
from paged_jax.engine.scheduler import SchedulerState, schedule
from paged_jax.engine.shadow import Shadow
from paged_jax.engine.step import StepOutputs
from paged_jax.engine.submission import Prompt, check_request
from paged_jax.ledger import LedgerAllocation
from paged_jax.models.protocol import PagedModel
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from paged_jax.plan import Plan
from paged_jax.sampling_params import SamplingParams


class Engine:
    """Continuous batching over one model. Not thread-safe.

    Requests join and leave at every `step`. A request that does not fit waits; a running one that
    cannot grow goes back to the queue and is computed again.
    """

    def __init__(
        self,
        model: PagedModel,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        max_position: int | None = None,
    ) -> None:
        """Sizes the pool and makes it.

        Args:
          model: Any module on the protocol `model(batch, cache)`, `logits`, `cache_spec`.
          config: Options.
          tokenizer: None serves token ids only.
          eos_token_ids: Tokens that end a sequence.
          max_position: Most positions of the model; None: any number.
        Raises: ValueError for options that contradict each other or the model.
        """
        kv_dtype, self.vocab_size = probe(model)
        self.config: ResolvedConfig = resolve(
            config,
            model.cache_spec(),
            kv_dtype,
            max_position,
        )
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.runner = Runner(
            model,
            self.config,
            kv_dtype,
            strict_compile=config.strict_compile,
            has_tags=config.debug,
        )
        self.state = SchedulerState.create(self.config)
        self._shadow = self._make_shadow(config.debug)
        self._requests: dict[str, Request] = {}
        self._is_stepping = False
        self._deferred_aborts: list[str] = []
        self._seeds = random.Random(config.seed)
        self._num_added = 0
        self._num_preemptions = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        if config.warmup == "all":
            self.runner.warm_up()

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        """Checks a request and puts it at the end of the queue.

        Args:
          request_id: Unique among the unfinished requests.
          prompt: Text, token ids, or `{"prompt_token_ids": [...]}`.
          params: Sampling fields.
        Raises: ValueError that names the field and the rule; NotImplementedError for a sampling
          field that does not act yet. Nothing is allocated then.
        """
        self.add_requests([(request_id, prompt, params)])

    def add_requests(self, requests: Sequence[tuple[str, Prompt, SamplingParams]]) -> None:
        """Adds all of (request_id, prompt, params), or none when one of them is refused."""
        taken = set(self._requests)
        made = []
        for request_id, prompt, params in requests:
            if request_id in taken:
                raise ValueError(f"request_id {request_id!r} is in use by an unfinished request")
            taken.add(request_id)
            made.append(
                check_request(
                    request_id, prompt, params, self.config, self.vocab_size, self.tokenizer
                )
            )
        for request in made:
            self._add(request)

    def _add(self, request: Request) -> None:
        request.order = self._num_added
        self._num_added += 1
        if request.params.seed in (None, -1):
            request.seed = self._seeds.getrandbits(64)
        self._requests[request.request_id] = request
        self.state.waiting.append(request)
        self._prompt_tokens += len(request.prompt_token_ids)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Runs one dispatch and returns the requests that advanced or ended in it.

        An error in the dispatch ends every request and leaves an empty, usable engine.
        """
        self._is_stepping = True
        with self._empty_on_error():
            plan = schedule(self.state, self.config)
            self._num_preemptions += len(plan.preempted)
            outputs = [self._finish(self._requests[name], "length") for name in plan.capped]
            now = time.monotonic()
            for segment in plan.segments:
                request = self._requests[segment.request_id]
                if request.first_scheduled_time is None:
                    request.first_scheduled_time = now
            result = self._dispatch(plan)
            if result is not None:
                outputs += self._commit(plan, result)
            deferred, self._deferred_aborts = self._deferred_aborts, []
            outputs += [self._abort(name) for name in deferred if name in self._requests]
            self._free_when_idle()
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request; its blocks are free after the next step. Unknown ids are ignored.

        Called while a step runs (by a signal handler, or by a stream that the garbage collector
        closes), it takes effect at the end of that step, which returns the output.
        """
        if request_id not in self._requests:
            return None
        if self._is_stepping:
            self._deferred_aborts.append(request_id)
            return None
        with self._empty_on_error():
            output = self._abort(request_id)
            self._free_when_idle()
        return output

    def _abort(self, request_id: str) -> RequestOutput:
        request = self._requests[request_id]
        if request.row is None:
            self.state.waiting.remove(request)
        return self._finish(request, "abort")

    @contextlib.contextmanager
    def _empty_on_error(self) -> Iterator[None]:
        """An error in a dispatch takes the donated pool with it: start over without requests."""
        try:
            yield
        except BaseException:
            self.reset()
            raise
        finally:
            self._is_stepping = False

    def _free_when_idle(self) -> None:
        """Gives the last blocks back when nobody is left to make a plan for."""
        if not self._requests and self.state.released:
            self._dispatch(schedule(self.state, self.config))

    def reset(self) -> None:
        """Drops every request and starts over with an empty pool."""
        self._requests.clear()
        self._deferred_aborts.clear()
        self.state = SchedulerState.create(self.config)
        self._shadow = self._make_shadow(self._shadow is not None)
        self.runner.reset()

    def _make_shadow(self, is_debug: bool) -> Shadow | None:
        config = self.config
        if not is_debug:
            return None
        return Shadow(config.num_blocks, config.max_num_seqs, config.block_size)

    def stats(self) -> dict[str, int]:
        """Counts of blocks, requests and tokens."""
        num_free = self.state.ledger.num_free
        return {
            "num_blocks": self.config.num_blocks,
            "num_free": num_free,
            "num_used": self.config.num_blocks - num_free,
            "num_running": len(self.state.running),
            "num_waiting": len(self.state.waiting),
            "num_preemptions": self._num_preemptions,
            "prompt_tokens": self._prompt_tokens,
            "generation_tokens": self._generation_tokens,
            "compiles": len(self.runner.compiled),
        }

    def _dispatch(self, plan: Plan) -> StepOutputs | None:
        """Applies a plan on the device and, beside it, to the ledger."""
        if plan.is_empty:
            return None
        result = self.runner.run(plan, self._requests)
        if self._shadow is not None:
            owners = tuple(self._requests[s.request_id].order for s in plan.segments)
            self._shadow.apply(plan, owners, self.state.ledger)
        allocation = self.state.ledger.apply(plan)
        if result is not None:
            assert bool(result.ok), "the device ran out of blocks that the ledger had"
            assert int(result.num_free) == self.state.ledger.num_free
        if self._shadow is not None:
            self._check(allocation, self._shadow)
        return result

    def _check(self, allocation: LedgerAllocation, shadow: Shadow) -> None:
        """Audits the block state, compares every id with the ledger's and every tag."""
        assert allocation.ok, "the ledger refused a plan"
        blocks, ledger = self.runner.blocks, self.state.ledger
        core.audit(blocks, shadow.external)
        tables = np.zeros(blocks.block_tables.shape, np.int32)
        for row, table in enumerate(ledger.tables):
            tables[row, : len(table)] = table
        stack = np.zeros(blocks.free_blocks.shape, np.int32)
        stack[: ledger.num_free] = ledger.free_blocks
        np.testing.assert_array_equal(np.asarray(blocks.block_tables), tables)
        np.testing.assert_array_equal(np.asarray(blocks.free_blocks), stack)
        np.testing.assert_array_equal(np.asarray(blocks.refcounts), ledger.refcounts)
        np.testing.assert_array_equal(np.asarray(blocks.lengths), ledger.lengths)
        assert self.runner.kv is not None
        shadow.check(self.runner.kv, blocks)

    def _commit(self, plan: Plan, result: StepOutputs) -> list[RequestOutput]:
        """Hands the results of a dispatch to its requests."""
        outputs = []
        now = time.monotonic()
        for i, segment in enumerate(plan.segments):
            request = self._requests[segment.request_id]
            request.num_computed += segment.num_tokens
            if segment.is_sampled:
                outputs.append(self._take_token(request, result, i, now))
        return outputs

    def _take_token(
        self, request: Request, result: StepOutputs, i: int, now: float
    ) -> RequestOutput:
        token = int(result.tokens[i])
        request.output_ids.append(token)
        self._generation_tokens += 1
        if request.first_token_time is None:
            request.first_token_time = now
        if request.params.logprobs is not None:
            self._take_logprobs(request, result, i)
        if token in self.eos_token_ids and not request.params.ignore_eos:
            return self._finish(request, "stop")
        stop = request.text.append(token) if request.text else None
        if stop is not None:
            request.stop_reason = stop
            return self._finish(request, "stop")
        if request.num_known >= request.max_total_tokens:
            return self._finish(request, "length")
        return self._output(request)

    def _take_logprobs(self, request: Request, result: StepOutputs, i: int) -> None:
        token = request.output_ids[-1]
        count = request.params.logprobs or 0
        entries = {token: (float(result.logprob[i]), int(result.rank[i]))}
        for rank in range(min(count, result.top_ids.shape[1])):
            entries.setdefault(
                int(result.top_ids[i, rank]), (float(result.top_logprobs[i, rank]), rank + 1)
            )
        request.cumulative_logprob += entries[token][0]
        decode = self.tokenizer.decode_token if self.tokenizer else lambda _: None
        request.logprobs.append(
            {
                token_id: Logprob(logprob=value, rank=rank, decoded_token=decode(token_id))
                for token_id, (value, rank) in entries.items()
            }
        )

    def _finish(self, request: Request, reason: FinishReason) -> RequestOutput:
        """Ends a request and releases its row."""
        if request.text is not None:
            stop = request.text.finish()
            if stop is not None and request.stop_reason is None:
                request.stop_reason, reason = stop, "stop"
        request.finish_reason = reason
        request.finished_time = time.monotonic()
        output = self._output(request)
        if request.row is not None:
            self.state.release(request)
        del self._requests[request.request_id]
        return output

    def _output(self, request: Request) -> RequestOutput:
        has_logprobs = request.params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=request.text.text if request.text else "",
            token_ids=list(request.output_ids),
            cumulative_logprob=request.cumulative_logprob if has_logprobs else None,
            logprobs=list(request.logprobs) if has_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        table = self.state.ledger.tables[request.row] if request.row is not None else []
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[completion],
            finished=request.finish_reason is not None,
            metrics=RequestMetrics(
                arrival_time=request.arrival_time,
                first_scheduled_time=request.first_scheduled_time,
                first_token_time=request.first_token_time,
                finished_time=request.finished_time,
                num_preemptions=request.num_preemptions,
            ),
            num_blocks=len(table),
        )
