"""Who runs in the next dispatch. Pure: no clock, randomness, JAX or I/O."""

import heapq
from collections import deque
from dataclasses import dataclass, field

from paged_jax.config import ResolvedConfig
from paged_jax.engine.request import Request
from paged_jax.ledger import Ledger
from paged_jax.plan import Plan, Segment
from paged_jax.shapes import ceil_div


@dataclass(kw_only=True)
class SchedulerState:
    """Queues, rows and blocks as the scheduler sees them."""

    ledger: Ledger
    free_rows: list[int]
    """A heap of rows that no request holds; rows in `released` are among them."""
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    """In order of arrival."""
    released: set[int] = field(default_factory=set)
    """Rows whose request is gone, to be freed by the next plan."""

    @classmethod
    def create(cls, config: ResolvedConfig) -> "SchedulerState":
        """Everything free, nothing queued."""
        ledger = Ledger(
            config.num_blocks, config.block_size, config.max_num_seqs, config.max_blocks_per_seq
        )
        return cls(ledger=ledger, free_rows=list(range(config.max_num_seqs)))

    def release(self, request: Request) -> None:
        """Takes the row of a running request away; its blocks are freed by the next plan."""
        assert request.row is not None
        self.running.remove(request)
        self.released.add(request.row)
        heapq.heappush(self.free_rows, request.row)
        request.row = None


def schedule(state: SchedulerState, config: ResolvedConfig) -> Plan:
    """Plans one dispatch and moves requests between the queues accordingly.

    Running requests come first, those that decode before those in prefill, then waiting ones in
    order of arrival while budget, rows and blocks last. A request that does not fit waits, and so
    does everybody behind it. When a running request cannot grow, the latest arrival is preempted,
    which may be the request itself. The earliest arrival therefore always advances. Nobody is
    admitted in a dispatch that preempts.

    Returns: The plan. Its blocks are certain to be there: it counts frees before growth, as the
      step does.
    """
    round_ = _Round(state, config)
    for request in sorted(state.running, key=lambda request: not request.is_decoding):
        if request.row is not None:
            round_.continue_running(request)
    if not round_.preempted:
        round_.admit()
    return round_.plan()


class _Round:
    """Budget and blocks left while one plan is made."""

    def __init__(self, state: SchedulerState, config: ResolvedConfig) -> None:
        self.state = state
        self.config = config
        self.budget = config.max_num_batched_tokens
        self.available = state.ledger.num_free + state.ledger.releasable(state.released)
        self.planned: dict[Request, tuple[Segment, int]] = {}
        self.preempted: list[Request] = []
        self.capped: list[Request] = []

    def continue_running(self, request: Request) -> None:
        count = min(request.num_known - request.num_computed, self.budget)
        if count == 0:
            return
        assert request.row is not None
        cost = self.state.ledger.growth(request.row, count)
        while cost > self.available:
            victim = self.state.running[-1]
            if victim is request and len(self.state.running) == 1:
                # It holds every block that is not free: no wait can help it.
                self.capped.append(request)
                return
            self._drop(victim)
            self.preempted.append(victim)
            if victim is request:
                return
        self._add(request, count, cost, is_admission=False)

    def admit(self) -> None:
        state, size = self.state, self.config.block_size
        # Blocks that prefills under way will still take are not given to anybody else.
        reserved = sum(
            ceil_div(request.num_known, size) - ceil_div(self._end(request), size)
            for request in state.running
        )
        while state.waiting and state.free_rows and self.budget:
            request = state.waiting[0]
            whole = ceil_div(request.num_known, size)
            if whole > self.config.num_blocks:
                # Submission checked the prompt; this one filled the pool and was then preempted.
                self.capped.append(state.waiting.popleft())
                continue
            if whole > self.available - reserved:
                return
            state.waiting.popleft()
            request.row = heapq.heappop(state.free_rows)
            request.num_prefill = request.num_known
            state.running.append(request)
            state.running.sort(key=lambda request: request.order)
            count = min(request.num_known, self.budget)
            cost = ceil_div(count, size)
            reserved += whole - cost
            self._add(request, count, cost, is_admission=True)

    def plan(self) -> Plan:
        state = self.state
        for request in sorted(self.preempted, key=lambda request: request.order, reverse=True):
            request.num_computed = 0
            request.num_preemptions += 1
            state.waiting.appendleft(request)
        # Freed by this plan: the ledger hears of it when the plan is dispatched.
        freed, state.released = tuple(sorted(state.released)), set()
        segments = [segment for segment, _ in self.planned.values()]
        return Plan(
            free_rows=freed,
            segments=tuple(sorted(segments, key=lambda segment: not segment.is_decode)),
            preempted=tuple(request.request_id for request in self.preempted),
            capped=tuple(request.request_id for request in self.capped),
        )

    def _add(self, request: Request, count: int, cost: int, *, is_admission: bool) -> None:
        assert request.row is not None
        segment = Segment(
            request_id=request.request_id,
            row=request.row,
            start=request.num_computed,
            num_tokens=count,
            is_decode=request.is_decoding,
            is_sampled=request.num_computed + count == request.num_known,
            is_admission=is_admission,
        )
        self.planned[request] = (segment, cost)
        self.available -= cost
        self.budget -= count

    def _drop(self, request: Request) -> None:
        """Takes a running request out of the plan and its blocks back."""
        segment, cost = self.planned.pop(request, (None, 0))
        if segment is not None:
            self.budget += segment.num_tokens
            self.available += cost
        before = self.state.ledger.releasable(self.state.released)
        self.state.release(request)
        self.available += self.state.ledger.releasable(self.state.released) - before

    def _end(self, request: Request) -> int:
        segment = self.planned[request][0] if request in self.planned else None
        return request.num_computed + (segment.num_tokens if segment else 0)
