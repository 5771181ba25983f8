"""Very many requests through scheduler and ledger, without a model: all end, in bounded time."""

import itertools
import random
from collections import Counter, deque

import pytest

from paged_jax.config import ResolvedConfig
from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.scheduler import MAX_BYPASSED, schedule
from paged_jax.engine.scheduler_state import SchedulerState
from paged_jax.sampling_params import SamplingParams
from paged_jax.shapes import ceil_div

SETTINGS = list(
    itertools.product(
        ("fcfs", "priority"), ("recompute", "swap", "auto"), (True, False), ((4, 24), (16, 9))
    )
)
"""Policy, preemption, prefix caching, and (block size, blocks)."""

LONGEST = 64


class Trace:
    """Runs requests that arrive at random; results are read one dispatch late."""

    def __init__(self, seed: int, count: int) -> None:
        policy, mode, is_cached, (size, num_blocks) = SETTINGS[seed % len(SETTINGS)]
        self.draw = random.Random(seed)
        self.config = ResolvedConfig(
            max_model_len=LONGEST,
            block_size=size,
            num_blocks=num_blocks,
            max_num_seqs=8,
            max_num_batched_tokens=self.draw.choice((8, 16, 64)),
            scheduling_policy=policy,
            preemption_mode=mode,
            enable_prefix_caching=is_cached,
            decode_steps=self.draw.choice((1, 4, 8)),
            swap_blocks=self.draw.choice((0, 10, 100)),
        )
        self.state = SchedulerState.create(self.config)
        self.prefixes = [self._tokens(24) for _ in range(4)]
        self.left, self.num_added = count, 0
        self.live: dict[str, Request] = {}
        self.unread: deque = deque()
        self.num_dispatches = self.num_idle = 0
        self.cost_of_all = 0
        """Dispatches that all who have come would need one after the other."""
        self.bounds: dict[str, int] = {}
        self.ends: Counter[str] = Counter()
        self.num_preemptions = 0

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(1000) for _ in range(count)]

    def run(self) -> None:
        while self.left or self.live:
            if self.left and len(self.live) < 40 and self.draw.random() < 0.7:
                for _ in range(min(self.left, self.draw.randint(1, 8))):
                    self._add()
            if self.live and self.draw.random() < 0.05:
                self._end(self.live[self.draw.choice(list(self.live))], "abort")
            self._dispatch()
        while self.unread or self.state.released:
            self._dispatch()
        self._check()
        state = self.state
        assert state.ledger.num_free + state.num_cached == self.config.num_blocks
        assert len(state.free_rows) == self.config.max_num_seqs
        assert state.num_swapped_blocks == 0
        assert not len(state.waiting)

    def _add(self) -> None:
        draw, order = self.draw, self.num_added
        prompt = draw.choice(self.prefixes)[: draw.choice((0, 0, 9, 24))]
        prompt = prompt + self._tokens(draw.randint(1, 16))
        request = Request(
            request_id=str(order),
            prompt=None,
            prompt_token_ids=prompt,
            params=SamplingParams(n=draw.choice((1, 1, 1, 1, 2, 3))),
            max_total_tokens=min(LONGEST, len(prompt) + draw.randint(1, 12)),
            seed=order,
            order=order,
            arrival_time=0.0,
            priority=draw.randint(0, 2),
        )
        request.sequences = [
            Sequence(request=request, index=index, tokens=list(prompt))
            for index in range(request.params.n)
        ]
        self.left -= 1
        self.num_added += 1
        self.live[request.request_id] = request
        # One after the other each computes its prompt in chunks and then a token a dispatch, twice
        # for what it lost; a dispatch that preempts and one that reads come on top.
        chunks = ceil_div(request.max_total_tokens, self.config.max_num_batched_tokens)
        length = request.max_total_tokens - len(prompt)
        self.cost_of_all += request.params.n * 2 * (chunks + length + 2)
        if self.config.scheduling_policy == "fcfs":
            others = sum(other.params.n * 2 * (LONGEST // 8 + 14) for other in self.live.values())
            slack = (MAX_BYPASSED + self.config.max_num_seqs) * 2 * (LONGEST // 8 + 14)
            self.bounds[request.request_id] = self.num_dispatches + others + slack
        self.state.add(request)

    def _dispatch(self) -> None:
        state = self.state
        plan = schedule(state, 0.0, self.config)
        self.num_dispatches += 1
        self.num_preemptions += len(plan.preempted)
        for name, index in plan.capped:
            self._finish(self.live[name].sequences[index], "capped")
        sequences = [self.live[s.request_id].sequences[s.index] for s in plan.segments]
        assert sum(s.num_tokens for s in plan.segments if not s.is_decode) + plan.num_decode <= (
            self.config.max_num_batched_tokens
        )
        assert len({segment.row for segment in plan.segments}) == len(plan.segments)
        assert state.apply(plan, sequences).ok, "a plan's blocks must be there"
        is_idle = not (plan.segments or self.unread or plan.capped)
        self.num_idle = self.num_idle + 1 if is_idle and self.live else 0
        assert self.num_idle < 3, "work is pending and nothing happens"
        unread = len(self.unread)
        if plan.segments:
            self.unread.append(list(zip(plan.segments, sequences, strict=True)))
        for _ in range(unread):
            self._read()
        if self.num_dispatches % 64 == 0:
            self._check()

    def _read(self) -> None:
        for segment, sequence in self.unread.popleft():
            sequence.num_unread -= segment.num_sampled
            if sequence.finish_reason is not None or not segment.num_sampled:
                continue
            for _ in range(segment.num_sampled):
                sequence.tokens.append(self.draw.randrange(1000))
                if sequence.num_known >= sequence.request.max_total_tokens:
                    break
            self.state.publish(sequence)
            if sequence.num_known >= sequence.request.max_total_tokens:
                self._finish(sequence, "length")

    def _end(self, request: Request, reason: str) -> None:
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        assert sequence.finish_reason is None
        sequence.finish_reason = reason  # type: ignore[assignment]
        self.state.drop(sequence)
        request = sequence.request
        if request.is_finished:
            del self.live[request.request_id]
            self.ends[reason] += 1
            bound = self.bounds.pop(request.request_id, self.num_dispatches)
            assert self.num_dispatches <= bound, "a request waited without bound"

    def _check(self) -> None:
        """Every block has as many owners as the ledger counts; every row one holder."""
        state, ledger = self.state, self.state.ledger
        owners = Counter(block for table in ledger.tables for block in table)
        for block in range(1, self.config.num_blocks + 1):
            is_kept = state.cache is not None and block in state.cache
            is_kept = is_kept and not state.cache.has_pending([block])
            assert ledger.refcounts[block] == owners[block] + is_kept
        assert len(set(ledger.free_blocks)) == ledger.num_free
        assert all(ledger.refcounts[block] == 0 for block in ledger.free_blocks)
        rows = [sequence.row for sequence in state.running]
        assert sorted([*rows, *state.released, *state.free_rows]) == list(range(8))
        swapped = [s for r in self.live.values() for s in r.sequences if s.swapped_tokens]
        blocks = sum(ceil_div(s.swapped_tokens, self.config.block_size) for s in swapped)
        assert state.num_swapped_blocks == blocks <= self.config.swap_blocks


def run_traces(count: int, each: int) -> None:
    ends: Counter[str] = Counter()
    num_dispatches = num_preemptions = 0
    for seed in range(count):
        trace = Trace(seed, each)
        trace.run()
        assert trace.num_dispatches <= trace.cost_of_all
        assert sum(trace.ends.values()) == each
        ends += trace.ends
        num_dispatches += trace.num_dispatches
        num_preemptions += trace.num_preemptions
    assert ends.keys() <= {"length", "abort"}, "each request fits into the pool"
    assert ends["abort"] > count * each // 100
    assert num_preemptions > count
    print(f"{ends}, {num_dispatches} dispatches, {num_preemptions} preemptions")  # see by -s


@pytest.mark.slow
def test_ten_thousand_requests_end_and_leave_nothing():
    run_traces(len(SETTINGS), 10_000 // len(SETTINGS) + 1)


@pytest.mark.exhaustive
def test_a_hundred_thousand_requests_end_and_leave_nothing():
    run_traces(4 * len(SETTINGS), 100_000 // (4 * len(SETTINGS)) + 1)
