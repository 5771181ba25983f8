"""The scheduler and the ledger against random arrivals, without a model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.config import ResolvedConfig
from paged_jax.engine.request import Request
from paged_jax.engine.scheduler import SchedulerState, schedule
from paged_jax.sampling_params import SamplingParams
from paged_jax.shapes import ceil_div


def make_request(order: int, prompt_len: int, max_tokens: int) -> Request:
    return Request(
        request_id=str(order),
        prompt=None,
        prompt_token_ids=[0] * prompt_len,
        params=SamplingParams(),
        max_total_tokens=prompt_len + max_tokens,
        seed=0,
        order=order,
        arrival_time=0.0,
    )


class Simulation:
    """Dispatches plans to the ledger alone and pretends that every sample is token 0."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.state = SchedulerState.create(config)
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, str] = {}

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.state.waiting.append(request)

    def step(self):
        state, config = self.state, self.config
        plan = schedule(state, config)
        for name in plan.capped:
            self._end(name, "capped")
        assert plan.num_tokens <= config.max_num_batched_tokens
        rows = [segment.row for segment in plan.segments]
        assert len(set(rows)) == len(rows) <= config.max_num_seqs
        decode = [segment.is_decode for segment in plan.segments]
        assert decode == sorted(decode, reverse=True), "decode rows come first"
        admitted = [segment for segment in plan.segments if segment.is_admission]
        assert not (plan.preempted and admitted)
        assert state.ledger.apply(plan).ok, "a plan's blocks must be there"
        for segment in plan.segments:
            request = self.requests[segment.request_id]
            assert segment.start == request.num_computed
            if segment.is_decode:
                assert segment.num_tokens == 1
                assert segment.is_sampled
            request.num_computed += segment.num_tokens
            assert state.ledger.lengths[segment.row] == request.num_computed
            if segment.is_sampled:
                assert request.num_computed == request.num_known
                request.output_ids.append(0)
                if request.num_known >= request.max_total_tokens:
                    self._end(request.request_id, "length")
        return plan

    def _end(self, name: str, how: str) -> None:
        assert name not in self.ended
        self.ended[name] = how
        request = self.requests.pop(name)
        if request.row is not None:
            self.state.release(request)


CONFIG = ResolvedConfig(
    max_model_len=64, block_size=4, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=16
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 20)),
        min_size=1,
        max_size=30,
    ),
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_blocks=st.integers(3, 40),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 40),
)
def test_every_request_ends_and_no_invariant_breaks(
    arrivals, block_size, num_blocks, max_num_seqs, budget
):
    config = ResolvedConfig(
        max_model_len=64,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    simulation = Simulation(config)
    added = 0
    for order, (gap, prompt_len, max_tokens) in enumerate(arrivals):
        for _ in range(gap):
            simulation.step()
        if ceil_div(prompt_len, block_size) <= num_blocks:
            simulation.add(make_request(order, prompt_len, max_tokens))
            added += 1
    work = sum(prompt + tokens for _, prompt, tokens in arrivals)
    for _ in range(4 * len(arrivals) * work):
        if not simulation.requests:
            break
        running = list(simulation.state.running)
        plan = simulation.step()
        assert plan.segments or plan.capped, "work is pending and nothing happens"
        if running:
            advanced = {segment.request_id for segment in plan.segments} | set(plan.capped)
            assert running[0].request_id in advanced, "the earliest arrival always advances"
    assert len(simulation.ended) == added
    simulation.step()
    assert simulation.state.ledger.num_free == num_blocks
    assert sorted(simulation.state.free_rows) == list(range(max_num_seqs))


def test_first_come_is_first_served():
    simulation = Simulation(CONFIG)
    for order in range(12):
        simulation.add(make_request(order, 6, 3))
    first_run: list[str] = []
    while simulation.requests:
        plan = simulation.step()
        first_run += [s.request_id for s in plan.segments if s.is_admission]
    assert first_run == [str(order) for order in range(12)]


def test_a_head_that_does_not_fit_is_not_overtaken():
    simulation = Simulation(CONFIG)
    simulation.add(make_request(0, 24, 4))
    simulation.step()
    simulation.add(make_request(1, 40, 2))
    simulation.add(make_request(2, 1, 1))
    assert {s.request_id for s in simulation.step().segments} == {"0"}
    while "0" in simulation.requests:
        simulation.step()
    plan = simulation.step()
    assert plan.segments[0].request_id == "1"


def test_the_latest_arrival_is_preempted_and_returns_to_the_front():
    simulation = Simulation(CONFIG)
    for order in range(3):
        simulation.add(make_request(order, 15, 12))
    plan = simulation.step()
    while not plan.preempted:
        plan = simulation.step()
    assert plan.preempted == ("2",)
    assert simulation.state.waiting[0].request_id == "2"
    assert simulation.state.waiting[0].num_computed == 0
    simulation.add(make_request(3, 1, 1))
    assert [r.request_id for r in simulation.state.waiting] == ["2", "3"]


def test_chunks_of_a_prompt_fill_the_budget():
    simulation = Simulation(CONFIG)
    simulation.add(make_request(0, 40, 2))
    chunks = []
    while "0" in simulation.requests:
        chunks += [s.num_tokens for s in simulation.step().segments]
    assert chunks == [16, 16, 8, 1]


def test_the_last_single_token_of_a_prompt_is_not_taken_for_a_decode():
    simulation = Simulation(CONFIG)
    simulation.add(make_request(0, 17, 2))
    simulation.step()
    (segment,) = simulation.step().segments
    assert segment.num_tokens == 1
    assert not segment.is_decode
    assert segment.is_sampled


@pytest.mark.parametrize("seed", range(3))
def test_long_random_traces_keep_the_pool_whole(seed):
    rng = np.random.default_rng(seed)
    simulation = Simulation(CONFIG)
    order = 0
    for _ in range(3000):
        if rng.random() < 0.2:
            prompt_len, max_tokens = int(rng.integers(1, 48)), int(rng.integers(1, 16))
            simulation.add(make_request(order, prompt_len, max_tokens))
            order += 1
        if rng.random() < 0.02 and simulation.requests:
            victim = str(rng.choice(list(simulation.requests)))
            request = simulation.requests[victim]
            if request.row is None:
                simulation.state.waiting.remove(request)
            simulation._end(victim, "abort")
        simulation.step()
        ledger = simulation.state.ledger
        held = sum(map(len, ledger.tables))
        assert held + ledger.num_free == CONFIG.num_blocks
    while simulation.requests:
        simulation.step()
    assert len(simulation.ended) == order
