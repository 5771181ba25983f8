"""What an engine does in a step: plan, issue, read, hand over, and go on after a failure."""

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from paged_jax.config import EngineConfig, ResolvedConfig
from paged_jax.core import AuditError
from paged_jax.engine import answer, beams
from paged_jax.engine.dispatch import Dispatcher, Issued
from paged_jax.engine.guide import GuideError
from paged_jax.engine.hosts import Group, Step
from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.runner import Runner, tells_prompt
from paged_jax.engine.scheduler import schedule
from paged_jax.engine.scheduler_state import SchedulerState
from paged_jax.engine.step import StepOutputs
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.outputs import FinishReason, RequestOutput
from paged_jax.plan import Plan

_logger = logging.getLogger("paged_jax")


class Loop:
    """The private half of `Engine`: its state, and what moves it from one dispatch to the next.

    plan n+1 -> issue n+1 -> read n -> hand over the tokens of n
    """

    def __init__(
        self,
        runner: Runner,
        config: ResolvedConfig,
        options: EngineConfig,
        tokenizer: Tokenizer | None,
        root: bytes,
    ) -> None:
        self.runner, self.config, self.tokenizer = runner, config, tokenizer
        self.dispatcher = Dispatcher(runner, config, is_checked=options.debug)
        self.error: Exception | None = None
        """Of the last dispatch that failed."""
        self.group: Group | None = None
        """The other processes of this engine."""
        self._told: Step | None = None
        """What the first process says of the step that runs, where there are several."""
        self._options = options
        self._root = root
        self.state = SchedulerState.create(config, root)
        self._requests: dict[str, Request] = {}
        self._planned: Plan | None = None
        self._unread: Issued | None = None
        self._early: list[RequestOutput] = []
        """Outputs that were read between steps; the next step returns them."""
        self._num_failures = 0
        self._is_untouched = False
        """Whether the step that runs has changed nothing yet."""
        self._lock = threading.RLock()
        self._is_stepping = False
        self._aborts: deque[Request] = deque()
        self._counts = dict.fromkeys(("num_preemptions", "prompt_tokens", "generation_tokens"), 0)

    def _step(self, outputs: list[RequestOutput]) -> None:
        if self._planned is None:
            self._is_untouched = True
            self.dispatcher.fault("plan")
            self._is_untouched = False
            self._planned = schedule(self.state, self._now(), self.config)
        plan = self._planned
        outputs += [self._finish(self._requests[name], "timeout") for name in plan.expired]
        for name, index in plan.capped:
            request = self._requests.get(name)
            if request is not None and request.sequences[index].finish_reason is None:
                outputs.append(self._cap(request.sequences[index]))
        issued = None if plan.is_empty else self._issue(plan)
        self._planned = None
        unread, self._unread = self._unread, issued
        if unread is not None:
            self._commit(unread, outputs)
        if self._unread is not None and not self._options.overlap:
            unread, self._unread = self._unread, None
            self._commit(unread, outputs)

    def _now(self) -> float:
        """The same in all processes."""
        return time.monotonic() if self._told is None else self._told.now

    def _issue(self, plan: Plan) -> Issued | None:
        if self.group is not None:
            self.group.agree(plan)
        self._counts["num_preemptions"] += len(plan.preempted)
        return self.dispatcher.issue(plan, self.state, self._requests)

    def _commit(self, issued: Issued, outputs: list[RequestOutput]) -> None:
        """Hands the results of a dispatch to its sequences."""
        result = self.dispatcher.read(issued, self.state.costs)
        plan = issued.plan
        touched: dict[Request, None] = {}
        waited = []
        if self.dispatcher.recorder.sink is not None:
            waited = [s.request for s in issued.sequences if s.request.first_token_time is None]
        # As lists: to take single numbers out of arrays is slow.
        tokens, num_run = result.tokens.T.tolist(), result.num_run.tolist()
        place = 0
        for i, (segment, sequence) in enumerate(zip(plan.segments, issued.sequences, strict=True)):
            num_sampled, request = segment.num_sampled, sequence.request
            sequence.num_unread -= num_sampled
            if tells_prompt(segment, sequence):
                answer.take_prompt_logprobs(request, segment, result.prompt, place, self.tokenizer)
            place += 1 if segment.is_decode else segment.num_tokens
            if not num_sampled or sequence.finish_reason is not None:
                continue
            touched[request] = None
            if request.beam is None:
                end = num_run[i] if segment.is_decode else 1
                self._take_tokens(sequence, tokens[i][:end], result, i)
            else:
                listed = result.top_ids[0, i], result.top_logprobs[0, i]
                sequence.listed = np.asarray(listed[0]), np.asarray(listed[1])
        if touched:
            self._num_failures = 0
        outputs += [self._advance(request) for request in touched]
        for request in dict.fromkeys(waited):
            if request.first_token_time is not None:
                self.dispatcher.recorder.first_token(request)

    def _take_tokens(
        self, sequence: Sequence, tokens: list[int], result: StepOutputs, i: int
    ) -> None:
        for step, token in enumerate(tokens):
            reason = answer.take_token(sequence, token, result, (step, i), self.tokenizer)
            self._counts["generation_tokens"] += 1
            if reason is not None:
                answer.end(sequence, reason)
                break
        self.state.publish(sequence)

    def _advance(self, request: Request) -> RequestOutput:
        """The output of a request whose tokens were read; ends what has ended."""
        if request.is_beam:
            self._counts["generation_tokens"] += beams.advance(request, self.state, self.tokenizer)
        if request.error is not None:
            return self._finish(request, "error")  # one choice failed, and the others with it
        output = self._output(request)
        for sequence in request.sequences:
            if sequence.finish_reason is not None:
                self._drop(sequence)
        return self._close(request, output) if output.finished else output

    def exception_of(self, output: RequestOutput) -> Exception | None:
        """What to raise for a request that ended with an error; None for any other."""
        if output.error is None:
            return None
        kind, _, message = output.error.partition(": ")
        if kind == GuideError.__name__:
            return GuideError(message)
        is_last = self.error is not None and output.error == answer.error_text(self.error)
        return self.error if is_last else RuntimeError(output.error)

    # Ends.

    def _take_aborts(self) -> list[RequestOutput]:
        outputs = []
        while self._aborts:
            request = self._aborts.popleft()
            if self._is_held(request):
                outputs.append(self._finish(request, "abort"))
        return outputs

    def _is_held(self, request: Request) -> bool:
        """Whether it has not ended; another may have its id by now."""
        return self._requests.get(request.request_id) is request

    def _cap(self, sequence: Sequence) -> RequestOutput:
        """Ends one choice, or all beams of a request, that the whole pool cannot hold."""
        request = sequence.request
        if request.is_beam:
            return self._finish(request, "length")
        answer.end(sequence, "length")
        output = self._output(request)
        self._drop(sequence)
        return self._close(request, output) if request.is_finished else output

    def _finish(self, request: Request, reason: FinishReason) -> RequestOutput:
        """Ends all of a request that has not ended."""
        if request.is_beam:
            beams.end(request, self.tokenizer, reason)
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                answer.end(sequence, reason)
        return self._close(request, self._output(request))

    def _drop(self, sequence: Sequence) -> None:
        self.state.drop(sequence)
        sequence.lost_blocks = ()
        self.dispatcher.images.pop(sequence, None)

    def _close(self, request: Request, output: RequestOutput) -> RequestOutput:
        for sequence in request.sequences:
            self._drop(sequence)
        request.finished_time = time.monotonic()
        self.dispatcher.recorder.ended(request, request.sequences[-1].finish_reason or "abort")
        self._requests.pop(request.request_id, None)
        metrics = dataclasses.replace(output.metrics, finished_time=request.finished_time)
        return dataclasses.replace(output, metrics=metrics)

    def _output(self, request: Request) -> RequestOutput:
        tables = self.state.ledger.tables
        held = [
            sequence.lost_blocks if sequence.row is None else tables[sequence.row]
            for sequence in request.sequences
        ]
        # Only choices share blocks.
        num_blocks = len(held[0]) if len(held) == 1 else len(set().union(*held))
        return answer.output_of(request, num_blocks)

    # Failure.

    def _guarded(
        self, run: Callable[[list[RequestOutput]], None], outputs: list[RequestOutput]
    ) -> None:
        """Runs a part of a step; whatever it raises leaves a usable engine and loses no output."""
        try:
            run(outputs)
        except Exception as error:
            if self.group is not None:  # nobody knows how far the others have come
                raise self.group.cause_of(error) from error
            self.error = error
            _logger.exception("a dispatch failed")
            self._recover(error, outputs)
            if self._options.debug and isinstance(error, AssertionError | AuditError):
                raise  # debug mode is there to tell
        except BaseException:
            if self.group is None:
                self._start_over(outputs)
            raise

    def _recover(self, error: Exception, outputs: list[RequestOutput]) -> None:
        """Goes on after a failure, without the requests that fail again and again."""
        self._num_failures += 1
        self.dispatcher.recorder.failed()
        if self._num_failures > self._options.max_step_retries:
            self._num_failures = 0
            segments = self._planned.segments if self._planned is not None else ()
            names = {segment.request_id for segment in segments}
            if self._unread is not None:
                names |= {sequence.request.request_id for sequence in self._unread.sequences}
            names = names or {s.request.request_id for s in self.state.running}
            for name in sorted(names or set(self._requests)):
                if (request := self._requests.get(name)) is not None:
                    request.error = answer.error_text(error)
                    outputs.append(self._finish(request, "error"))
        elif self._is_untouched:
            self._is_untouched = False
            return  # nothing was changed: the plan is made again
        self._start_over(outputs)

    def _start_over(self, outputs: list[RequestOutput]) -> None:
        """Tells those that ended in the dispatch, and lets the others wait for a new pool."""
        ended = [request for request in self._requests.values() if request.is_finished]
        outputs += [self._close(request, self._output(request)) for request in ended]
        self._renew()

    def _renew(self) -> None:
        """A new pool and new states; everybody waits, in order, with the tokens read so far."""
        old, self._planned, self._unread = self.state, None, None
        self.state = SchedulerState.create(self.config, self._root)
        self.state.costs = old.costs
        if self.state.cache is not None and old.cache is not None:
            self.state.cache.set_version(old.cache.version)
        self.state.num_queried_tokens = old.num_queried_tokens
        self.state.num_hit_tokens = old.num_hit_tokens
        self.dispatcher.reset()
        for request in self._requests.values():
            for sequence in request.sequences:
                if sequence not in self.dispatcher.images:
                    sequence.swapped_tokens = 0  # what failed was to read its blocks
            self.state.restore(request)

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Reads what is under way, for the next step to return; aborts wait for that step too."""
        with self._lock:
            self._is_stepping = True
            try:
                self._early += self._take_aborts()
                self._guarded(self._drain_unread, self._early)
                yield
            finally:
                self._is_stepping = False

    def _drain(self, outputs: list[RequestOutput]) -> None:
        """Gives the last blocks back when nobody is left to make a plan for."""
        self._drain_unread(outputs)
        while self.state.released:
            self._issue(schedule(self.state, self._now(), self.config))

    def _forget_cached(self, outputs: list[RequestOutput]) -> None:
        self._drain_unread(outputs)
        if self.state.cache is None:
            return
        released = self.state.cache.clear()
        for request in self._requests.values():
            for sequence in request.sequences:
                sequence.num_published = 0
        if released:
            self._issue(Plan(release_ids=released))

    def _drain_unread(self, outputs: list[RequestOutput]) -> None:
        """Reads what has been issued."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._commit(unread, outputs)
