"""A trace of arrivals through scheduler and ledger, without a model: seconds instead of hours.

What is simulated is who runs when and which blocks they hold, by the code that the engine runs.
What a dispatch takes is a formula, and nothing overlaps with it.
"""

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from paged_jax.config import ResolvedConfig
from paged_jax.engine.events import Event
from paged_jax.engine.report import RunLog, latencies, percentile
from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.scheduler import schedule
from paged_jax.engine.scheduler_state import SchedulerState
from paged_jax.engine.trace import TraceRequest, token_ids
from paged_jax.plan import Plan
from paged_jax.sampling_params import SamplingParams
from paged_jax.shapes import ceil_div


@dataclass(frozen=True, kw_only=True)
class DispatchCost:
    """Seconds that a dispatch takes: linear in its decode steps and in its tokens."""

    step_seconds: float
    """Per decode step, or per dispatch with prefill: weights are read once."""
    token_seconds: float
    """Per token."""

    def seconds(self, plan: Plan) -> float:
        """What a plan costs."""
        tokens = sum(segment.num_tokens for segment in plan.segments)
        return self.step_seconds * plan.num_steps + self.token_seconds * tokens


def simulate(
    trace: SequenceOf[TraceRequest],
    config: ResolvedConfig,
    cost: DispatchCost,
    log: RunLog,
) -> dict[str, float]:
    """Runs a trace to its end.

    Args:
      trace: By arrival.
      config: Sizes and policies; preemption is by recomputing.
      cost: What a dispatch takes.
      log: Is shown every event and, after each dispatch, the blocks.
    Returns: The figures of the log; `prefix_hit_fraction`, prompt tokens that were cached when
      their request was first admitted; `urgent_ttft_p99_s`, of the requests of the lowest number
      of priority.
    Raises: ValueError for a request that the pool or `max_model_len` cannot hold.
    """
    _check(trace, config)
    run = _Simulation(trace, config, cost, log)
    while run.pending or run.requests:
        run.step()
    queries = sum(request.prompt_tokens for request in trace)
    lowest = min(request.priority for request in trace)
    urgent = {str(i) for i, request in enumerate(trace) if request.priority == lowest}
    times = latencies(event for event in log.events if event.request_id in urgent)
    return {
        **log.figures(),
        "prefix_hit_fraction": run.num_hits / queries,
        "urgent_ttft_p99_s": percentile(times.first_token, 99),
    }


def _check(trace: SequenceOf[TraceRequest], config: ResolvedConfig) -> None:
    for i, request in enumerate(trace):
        total = request.prompt_tokens + request.output_tokens
        if total > config.max_model_len:
            raise ValueError(
                f"request {i} of the trace ({total} tokens) must be at most "
                f"max_model_len ({config.max_model_len})"
            )
        needed = ceil_div(request.prompt_tokens, config.block_size)
        if needed > config.num_blocks:
            raise ValueError(
                f"the prompt of request {i} of the trace ({needed} blocks) must fit into the pool "
                f"({config.num_blocks} blocks)"
            )


class _Simulation:
    def __init__(
        self,
        trace: SequenceOf[TraceRequest],
        config: ResolvedConfig,
        cost: DispatchCost,
        log: RunLog,
    ) -> None:
        self.config, self.cost, self.log = config, cost, log
        self.state = SchedulerState.create(config)
        self.pending = deque(
            (arrival.arrival, _request(i, arrival, prompt), output)
            for i, (arrival, (prompt, output)) in enumerate(
                zip(trace, token_ids(trace), strict=True)
            )
        )
        self.requests: dict[str, tuple[Sequence, list[int]]] = {}
        """Of each request that is in: its sequence, and the tokens that it will sample."""
        self.now = 0.0
        self.num_dispatches = 0
        self.num_hits = 0

    def step(self) -> None:
        """Takes in who has arrived and runs one dispatch, or waits for the next arrival."""
        if not self.requests:
            self.now = max(self.now, self.pending[0][0])
        self._arrive()
        self._dispatch()
        if not self.requests and self.state.released:
            self._dispatch()  # as the engine does: gives the last blocks back

    def _dispatch(self) -> None:
        plan = schedule(self.state, self.now, self.config)
        self.num_dispatches += 1
        sequences = [self.requests[segment.request_id][0] for segment in plan.segments]
        for name, _ in plan.preempted:
            self._tell("preempt", name)
        self._admit(plan)
        allocation = self.state.apply(plan, sequences)
        assert allocation.ok, "a plan's blocks must be there"
        if allocation.num_new:
            self._tell("allocate", count=allocation.num_new)
        if plan.release_ids:
            self._tell("evict", ids=plan.release_ids, count=len(plan.release_ids))
        seconds = self.cost.seconds(plan) if plan.segments else 0.0
        self.now += seconds
        self.log.look(self.state.ledger, self._names)
        for name, _ in plan.capped:
            self._finish(self.requests[name][0])
        for segment, sequence in zip(plan.segments, sequences, strict=True):
            self._sample(sequence, segment.num_sampled)
        self._tell_dispatch(plan, seconds)

    def _arrive(self) -> None:
        while self.pending and self.pending[0][0] <= self.now:
            arrival, request, output = self.pending.popleft()
            self.requests[request.request_id] = request.sequences[0], output
            self.state.add(request)
            self._tell("add", request.request_id, time=arrival, count=len(request.prompt_token_ids))

    def _admit(self, plan: Plan) -> None:
        shared = {row: num_tokens for row, _, num_tokens in plan.shares}
        for segment in plan.segments:
            request = self.requests[segment.request_id][0].request
            if not segment.is_admission:
                continue
            self._tell("admit", segment.request_id, count=shared.get(segment.row, 0))
            if request.first_scheduled_time is None:
                request.first_scheduled_time = self.now
                self.num_hits += shared.get(segment.row, 0)

    def _sample(self, sequence: Sequence, count: int) -> None:
        """Reads what a dispatch sampled for a sequence."""
        request = sequence.request
        _, output = self.requests[request.request_id]
        done = sequence.num_known - sequence.num_prompt
        sequence.tokens += output[done : done + count]
        sequence.num_unread -= count
        if count and request.first_token_time is None:
            request.first_token_time = self.now
            self._tell("first_token", request.request_id, count=1)
        if done + count >= len(output):
            self._finish(sequence)
        else:
            self.state.publish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        name = sequence.request.request_id
        sequence.finish_reason = "length"
        self.state.drop(sequence)
        del self.requests[name]
        self._tell("finish", name, count=sequence.num_known - sequence.num_prompt)

    def _names(self) -> dict[int, str]:
        return {
            sequence.row: sequence.request.request_id
            for sequence in self.state.running
            if sequence.row is not None
        }

    def _tell(self, kind, request_id=None, *, time=None, **fields) -> None:
        self.log(
            Event(
                time=self.now if time is None else time,
                dispatch=self.num_dispatches,
                kind=kind,
                request_id=request_id,
                **fields,
            )
        )

    def _tell_dispatch(self, plan: Plan, seconds: float) -> None:
        state = self.state
        data = {
            "num_tokens": sum(segment.num_tokens for segment in plan.segments),
            "num_rows": len(plan.segments),
            "num_decode": plan.num_decode,
            "num_running": len(state.running),
            "num_waiting": len(state.waiting),
            "num_swapped": 0,
            "num_free": state.ledger.num_free,
            "num_cached": state.num_cached,
            "seconds": seconds,
        }
        self._tell("dispatch", data=data)


def _request(number: int, arrival: TraceRequest, prompt: list[int]) -> Request:
    request = Request(
        request_id=str(number),
        prompt=None,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=arrival.output_tokens),
        max_total_tokens=arrival.prompt_tokens + arrival.output_tokens,
        seed=0,
        order=number,
        arrival_time=arrival.arrival,
        priority=arrival.priority,
    )
    request.sequences = [Sequence(request=request, tokens=list(prompt))]
    return request
