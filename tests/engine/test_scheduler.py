"""The scheduler and the ledger against random arrivals, without a model."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.config import ResolvedConfig
from paged_jax.engine.scheduler import MAX_BYPASSED
from paged_jax.shapes import ceil_div
from tests.engine.simulation import CONFIG, Simulation, answer, long_answers, with_options


def names_of(plan, *, admitted: bool = False) -> list[str]:
    return [s.request_id for s in plan.segments if s.is_admission or not admitted]


def prompts(most: int):
    """Many prompts begin alike, so that there is something to share."""
    shared = st.builds(
        lambda head, length, tail: [*([head] * length), *tail][:most],
        st.integers(1, 2),
        st.integers(1, most),
        st.lists(st.integers(1, 6), max_size=6),
    )
    return st.one_of(shared, st.lists(st.integers(1, 6), min_size=1, max_size=most))


ARRIVALS = st.lists(
    st.fixed_dictionaries(
        {
            "gap": st.integers(0, 3),
            "prompt": prompts(40),
            "max_tokens": st.integers(1, 20),
            "n": st.sampled_from([1, 1, 1, 2, 4]),
            "priority": st.integers(-1, 1),
            "time": st.sampled_from([None] * 5 + [2, 10]),
            "aborted": st.sampled_from([None] * 5 + [0, 1, 3, 8]),
        }
    ),
    min_size=1,
    max_size=20,
)
CONFIGS = st.builds(
    ResolvedConfig,
    max_model_len=st.just(64),
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_blocks=st.integers(3, 40),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 40),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
    preemption_mode=st.sampled_from(["recompute", "swap", "auto"]),
    enable_prefix_caching=st.booleans(),
    decode_steps=st.sampled_from([1, 3, 8]),
    swap_blocks=st.sampled_from([0, 5, 100]),
)


@settings(max_examples=250, deadline=None)
@given(arrivals=ARRIVALS, config=CONFIGS, num_unread=st.integers(0, 1))
def test_every_request_ends_and_no_invariant_breaks(arrivals, config, num_unread):
    """With and without overlap, choices, sharing, swap, priorities, deadlines and aborts."""
    simulation = Simulation(config, num_unread=num_unread)
    now, num_choices, aborts = 0, 0, []
    for arrival in arrivals:
        for _ in range(arrival["gap"]):
            simulation.step(now)
            now += 1
        prompt, time = arrival["prompt"], arrival["time"]
        if ceil_div(len(prompt), config.block_size) <= config.num_blocks:
            name = simulation.add(
                prompt,
                arrival["max_tokens"],
                n=arrival["n"],
                priority=arrival["priority"],
                deadline=None if time is None else now + time,
            )
            num_choices += arrival["n"]
            if arrival["aborted"] is not None:
                aborts.append((now + arrival["aborted"], name))
    work = sum(a["n"] * (len(a["prompt"]) + a["max_tokens"]) for a in arrivals)
    for _ in range(10 * work + 100):
        for time, name in aborts:
            if time <= now and name in simulation.requests:
                simulation.abort(name)
        if not simulation.requests:
            break
        simulation.step(now)
        now += 1
    assert len(simulation.ended) == num_choices
    simulation.assert_idle()


def test_first_come_is_first_served():
    simulation = Simulation(CONFIG)
    for _ in range(12):
        simulation.add(6, 3)
    first_run: list[str] = []
    while simulation.requests:
        first_run += names_of(simulation.step(), admitted=True)
    assert first_run == [str(order) for order in range(12)]


def test_the_lowest_number_is_first_served_and_preempted_last():
    simulation = Simulation(with_options(scheduling_policy="priority", num_blocks=9))
    for priority in (1, 0, -5, 0, 1, -5):
        simulation.add(15, 12, priority=priority)
    assert names_of(simulation.step()) == ["2", "5"]
    first_run, lost = ["2", "5"], []
    while simulation.requests:
        plan = simulation.step()
        first_run += [name for name in names_of(plan, admitted=True) if name not in first_run]
        lost += plan.preempted
    assert first_run == ["2", "5", "1", "3", "0", "4"]
    assert lost
    assert ("2", 0) not in lost
    # One that comes late passes all that wait, but takes nothing from those who run.
    simulation = Simulation(with_options(scheduling_policy="priority", max_num_seqs=1))
    for priority in (0, 0, 1, -1):
        simulation.add(4, 9, priority=priority)
        simulation.step()
    order = ["0"]
    while simulation.requests:
        order += [name for name in names_of(simulation.step()) if name not in order]
    assert order == ["0", "3", "1", "2"]


def test_priorities_mean_nothing_to_first_come_first_served():
    simulation = Simulation(with_options(max_num_seqs=1))
    for priority in (1, 0, -1):
        simulation.add(4, 2, priority=priority)
    order = []
    while simulation.requests:
        order += [name for name in names_of(simulation.step()) if name not in order]
    assert order == ["0", "1", "2"]


def test_a_head_that_does_not_fit_is_overtaken_a_few_times_and_never_starves():
    simulation = Simulation(with_options(max_num_seqs=3))
    simulation.add([1, 2, 3, 4] * 6, 20)
    simulation.step()
    head = simulation.add(40, 2)
    small = [simulation.add(1, 1) for _ in range(3 * MAX_BYPASSED)]
    order: list[str] = []
    while simulation.requests:
        order += [name for name in names_of(simulation.step(), admitted=True) if name != "0"]
    assert order == [*small[:MAX_BYPASSED], head, *small[MAX_BYPASSED:]]


def test_all_small_ones_pass_a_head_that_stays_below_the_bound():
    simulation = Simulation(CONFIG)
    simulation.add([1, 2, 3, 4] * 6, 20)
    simulation.step()
    simulation.add(40, 2)
    for _ in range(3):
        simulation.add(1, 1)
    assert names_of(simulation.step(), admitted=True) == ["2", "3", "4"]


def test_the_latest_arrival_is_preempted_and_returns_to_the_front():
    # Room for three prompts and for a block more of the two that come first.
    simulation = Simulation(with_options(num_blocks=16))
    for prompt in long_answers(3, 12, 15):
        simulation.add(prompt, 12)
    plan = simulation.step()
    while not plan.preempted:
        plan = simulation.step()
    assert plan.preempted == (("2", 0),)
    (waiting,) = simulation.state.waiting
    assert waiting.key == ("2", 0)
    assert waiting.num_computed == 0
    assert waiting.row is None
    simulation.add(1, 1)
    assert [s.request.request_id for s in simulation.state.waiting] == ["2", "3"]


def test_a_preempted_request_waits_behind_an_equal_that_came_before_it():
    """B26: even if that one has never run, since it did not fit."""
    config = with_options(scheduling_policy="priority", num_blocks=8)
    simulation = Simulation(config)
    first, _, last = long_answers(3, 18, 8)
    for prompt, max_tokens in ((first, 18), (30, 2), (last, 18)):
        simulation.add(prompt, max_tokens)
    order = []
    while simulation.requests:
        order += names_of(simulation.step(), admitted=True)
    assert order == ["0", "2", "1", "2"]
    assert simulation.num_preemptions == 1


def test_chunks_of_a_prompt_fill_the_budget():
    simulation = Simulation(CONFIG)
    simulation.add([2] * 40, 2)
    chunks = []
    while "0" in simulation.requests:
        chunks += [s.num_tokens for s in simulation.step().segments]
    assert chunks == [16, 16, 8, 1]


def test_the_last_single_token_of_a_prompt_is_not_taken_for_a_decode():
    simulation = Simulation(CONFIG)
    simulation.add(17, 2)
    simulation.step()
    (segment,) = simulation.step().segments
    assert segment.num_tokens == 1
    assert not segment.is_decode
    assert segment.is_sampled


def test_several_steps_fall_to_one_where_blocks_or_prompts_are_in_the_way():
    simulation = Simulation(with_options(decode_steps=8))
    first, second = long_answers(2, 12, 8)
    simulation.add(first, 12)
    assert simulation.step().num_steps == 1, "its prompt"
    assert simulation.step().num_steps == 8
    simulation.add(second, 12)
    assert simulation.step().num_steps == 1, "another prompt"
    plan = simulation.step()
    assert [s.num_tokens for s in plan.segments] == [2, 8], "no more than is left to say"
    simulation = Simulation(with_options(decode_steps=8, num_blocks=5))
    for prompt in (first, second):
        simulation.add(prompt, 12)
    steps = [simulation.step() for _ in range(3)]
    # Five blocks hold both prompts and one more: two rows of eight tokens need four.
    assert [plan.num_steps for plan in steps] == [1, 1, 8]
    assert steps[1].preempted == (("1", 0),)


def test_an_unread_dispatch_is_followed_by_the_next_token():
    simulation = Simulation(CONFIG, num_unread=1)
    (prompt,) = long_answers(1, 5, 6)
    name = simulation.add(prompt, 5)
    (sequence,) = simulation.requests[name].sequences
    starts = [simulation.step().segments[0].start for _ in range(3)]
    assert starts == [0, 6, 7]
    assert (sequence.num_known, sequence.num_expected) == (8, 9)
    simulation.step()
    simulation.step()
    assert not simulation.step().segments, "what will end by length is read first"
    simulation.assert_idle()


def test_deadlines_end_who_waits_and_who_runs():
    simulation = Simulation(with_options(max_num_seqs=1))
    (prompt,) = long_answers(1, 9, 4)
    running = simulation.add(prompt, 50, deadline=5.0)
    waiting = simulation.add(4, 4, deadline=3.0)
    later = simulation.add(4, 4, deadline=100.0)
    expired = {now: simulation.step(now).expired for now in (0.0, 2.9, 3.0, 4.9)}
    assert expired == {0.0: (), 2.9: (), 3.0: (waiting,), 4.9: ()}
    plan = simulation.step(5.0)
    assert plan.expired == (running,)
    # Its row is freed and given away in the same plan.
    assert plan.free_rows == (0,)
    assert names_of(plan) == [later]
    said = simulation.ended[running, 0]
    assert said == ("timeout", answer(prompt, 4, 0, 0))
    while simulation.requests:
        simulation.step(6.0)
    simulation.assert_idle()


def test_deadlines_of_requests_that_ended_do_not_pile_up():
    simulation = Simulation(CONFIG)
    for _ in range(500):
        name = simulation.add(1, 1, deadline=1e9)
        while name in simulation.requests:
            simulation.step()
    assert len(simulation.state.deadlines) < 100


@pytest.mark.parametrize("length", [8, 11, 12])
def test_a_cached_prompt_that_fills_the_pool_runs_again(length):
    simulation = Simulation(with_options(num_blocks=3, enable_prefix_caching=True))
    prompt = [1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1][:length]
    for _ in range(2):
        simulation.add(prompt, 4)
        for _ in range(20):
            simulation.step()
    assert len(simulation.ended) == 2
    simulation.assert_idle()


def test_what_was_cached_when_a_request_did_not_fit_may_be_gone_when_it_does():
    """A5: one that waits is looked up again; the request that runs has evicted its prefix."""
    simulation = Simulation(with_options(num_blocks=8, enable_prefix_caching=True))
    head, growing = long_answers(2, 20, 12)
    simulation.add(head, 1)
    simulation.step()
    running = simulation.add(growing, 20)
    late = simulation.add([*head, *growing], 2)
    assert names_of(simulation.step()) == [running]
    (sequence,) = simulation.requests[late].sequences
    assert simulation.state.cache.match(sequence.tokens, None, []).num_tokens == 12
    while running in simulation.requests:
        assert names_of(simulation.step()) == [running]
    while simulation.requests:
        simulation.step()
    assert simulation.cached[late] == 0
    simulation.assert_idle()


@pytest.mark.parametrize("num_unread", [0, 1])
def test_the_last_choice_may_take_the_blocks_of_those_that_ended(num_unread):
    """Two blocks hold a prompt of five tokens and one choice of it, but not a copy as well."""
    config = with_options(num_blocks=2, max_num_seqs=2)
    simulation = Simulation(config, num_unread=num_unread)
    # The first choice ends with its first token, the second goes on.
    prompt = next(
        [*head, 1]
        for head in itertools.product(range(1, 7), repeat=4)
        if len(answer([*head, 1], 4, 0, 0)) == 1 and len(answer([*head, 1], 4, 0, 1)) == 4
    )
    simulation.add(prompt, 4, n=2)
    while simulation.requests:
        simulation.step()
    assert len(simulation.ended["0", 1][1]) == 4
    assert "capped" not in {how for how, _ in simulation.ended.values()}
    simulation.assert_idle()


def test_choices_share_the_blocks_of_their_prompt():
    simulation = Simulation(CONFIG)
    simulation.add([1, 2, 3, 4, 5, 6], 6, n=3)
    plan = simulation.step()
    assert [(s.index, s.num_tokens, s.source) for s in plan.segments] == [
        (0, 6, None),
        (1, 0, 0),
        (2, 0, 0),
    ]
    plan = simulation.step()
    assert plan.branches == tuple((0, row) for row in (1, 2) if row in plan.new_tokens)
    tables = [simulation.state.ledger.tables[row] for row in plan.new_tokens]
    assert len({table[0] for table in tables}) == 1, "the full block is shared"
    assert len({table[1] for table in tables}) == len(tables), "the one in part is copied"
    while simulation.requests:
        simulation.step()
    simulation.assert_idle()


def test_choices_without_a_row_wait_for_one():
    simulation = Simulation(with_options(max_num_seqs=2, enable_prefix_caching=True))
    simulation.add([1, 2, 3, 4, 5, 6], 6, n=4)
    simulation.step()
    assert [s.index for s in simulation.state.waiting] == [2, 3]
    while simulation.requests:
        simulation.step()
    assert sorted(index for _, index in simulation.ended) == [0, 1, 2, 3]
    simulation.assert_idle()


@pytest.mark.parametrize(("length", "hits"), [(7, 6), (8, 7), (9, 8), (12, 11)])
def test_hits_are_counted_in_tokens_and_leave_one_to_compute(length, hits):
    simulation = Simulation(with_options(enable_prefix_caching=True))
    prompt = [1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1][:length]
    for _ in range(2):
        name = simulation.add(prompt, 3)
        while simulation.requests:
            simulation.step()
    assert simulation.cached == {"0": 0, "1": hits}
    state = simulation.state
    assert (state.num_hit_tokens, state.num_queried_tokens) == (hits, 2 * length)
    assert simulation.ended[name, 0][1] == answer(prompt, 3, 1, 0)
    simulation.assert_idle()


@pytest.mark.parametrize("num_unread", [0, 1])
@pytest.mark.parametrize("options", [{}, {"decode_steps": 4, "enable_prefix_caching": True}])
def test_long_random_traces_keep_the_pool_whole(options, num_unread):
    rng = np.random.default_rng(num_unread)
    config = with_options(preemption_mode="swap", swap_blocks=8, **options)
    simulation = Simulation(config, num_unread=num_unread)
    order = 0
    for _ in range(2000):
        if rng.random() < 0.2:
            prompt = [*[1] * int(rng.integers(1, 40)), *rng.integers(1, 7, rng.integers(1, 8))]
            n = int(rng.choice([1, 1, 1, 3]))
            simulation.add(map(int, prompt), int(rng.integers(1, 16)), n=n)
            order += 1
        if rng.random() < 0.02 and simulation.requests:
            simulation.abort(str(rng.choice(list(simulation.requests))))
        simulation.step()
    while simulation.requests:
        simulation.step()
    assert len({name for name, _ in simulation.ended}) == order
    assert simulation.num_preemptions > 20
    simulation.assert_idle()
