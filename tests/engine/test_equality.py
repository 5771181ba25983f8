"""However the engine computes a request, its tokens are those that it gets alone."""

import dataclasses

import pytest

from paged_jax.models.tokenizer import Tokenizer
from paged_jax.sampling_params import SamplingParams
from tests.byte_tokenizer import byte_backend
from tests.engine.equality_table import MOST_DIFFERENT, NUM_WORKLOADS, Tally, covering_cases
from tests.engine.equality_table import run_case as run_one
from tests.engine.workloads import (
    NUM_BLOCKS,
    Alone,
    Ask,
    assert_empty,
    differences,
    limit,
    make_engine,
    preempted,
    run_asks,
)

CASES = list(enumerate(covering_cases(30)))


@pytest.fixture(scope="module")
def alone(toy):
    return Alone(toy)


@pytest.fixture(scope="module")
def tally():
    return Tally()


def draw_prompt(rng, length):
    return tuple(int(token) for token in rng.integers(0, 258, length))


@pytest.mark.slow
@pytest.mark.parametrize(
    "block_size", [4, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (1, 2, 16))]
)
def test_requests_get_the_tokens_that_they_get_alone(toy, alone, tally, block_size):
    """A pairwise covering set of options, each cold and warm; tags are checked at every step."""
    for i, case in CASES:
        if case["block_size"] == block_size:
            run_one(toy, alone, case, tally, seed=i % NUM_WORKLOADS)
    assert tally.faults == []


def test_near_ties_are_rare(tally, capsys):
    with capsys.disabled():
        print(f"\n{tally}")
    assert tally.num_requests >= 150
    assert tally.num_different <= MOST_DIFFERENT * tally.num_requests


def test_a_difference_is_told_from_a_near_tie(alone, rng, monkeypatch):
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    ask = Ask(name="a", prompt=draw_prompt(rng, 5), params=params)
    [(tokens, _)] = alone(ask)
    other = [*tokens[:3], (tokens[3] + 1) % 258, *tokens[4:]]
    assert not alone.is_near(ask, 0, other)
    assert not alone.is_near(ask, 0, tokens)
    monkeypatch.setattr("tests.engine.workloads.TOLERANCE", 100.0)
    assert alone.is_near(ask, 0, other)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_after_some_tokens_repeats_and_loses_none(toy, alone, rng, mode, overlap):
    """A10: after 1, 4 and 5 tokens, of one request twice."""
    engine = make_engine(toy, preemption_mode=mode, overlap=overlap)
    limit(engine, chunk=64, decode_steps=1)
    engine.tokenizer = Tokenizer(byte_backend(["<s>", "</s>"], 258), special_tokens={})
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    asks = [Ask(name=name, prompt=draw_prompt(rng, 8), params=params) for name in "ab"]
    places = {"a": {1, 5}, "b": {4}}

    def is_due(sequence):
        name = sequence.request.request_id
        due = {place for place in places[name] if place <= len(sequence.output_ids)}
        places[name] -= due
        return bool(due)

    with preempted(is_due):
        run = run_asks(engine, asks)
    assert places == {"a": set(), "b": set()}
    assert differences(asks, run, alone) == []
    assert [run.ends[name].metrics.num_preemptions for name in "ab"] == [2, 1]
    for output in run.ends.values():
        assert output.outputs[0].text == engine.tokenizer.decode(output.outputs[0].token_ids)
    stats = engine.stats()
    assert (stats["prompt_tokens"], stats["generation_tokens"]) == (16, 24)
    assert_empty(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_every_end_gives_each_block_back_once(toy, rng, overlap, caching):
    """A16: by stop token, stop string, length and abort, twice each in one engine."""
    engine = make_engine(toy, overlap=overlap, enable_prefix_caching=caching)
    engine.tokenizer = Tokenizer(byte_backend(["<s>", "</s>"], 258), special_tokens={})
    prompt = draw_prompt(rng, 9)
    greedy = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    run = run_asks(engine, [Ask(name="a", prompt=prompt, params=greedy)])
    assert run.ends["a"].outputs[0].finish_reason == "length"
    output = run.ends["a"].outputs[0]
    text = next((char for char in output.text if char.isprintable() and char.isascii()), None)
    assert text is not None
    stop = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, stop=text)
    sampled = SamplingParams(temperature=1.0, max_tokens=50, seed=1)
    asks = [
        Ask(name="string", prompt=prompt, params=stop),
        Ask(name="eos", prompt=prompt, params=sampled),
        Ask(name="length", prompt=prompt, params=greedy),
        Ask(name="abort", prompt=prompt, params=greedy, aborted=2),
    ]
    for ask in asks * 2:
        run = run_asks(engine, [ask])
        reason = run.ends[ask.name].outputs[0].finish_reason
        assert reason == {"length": "length", "abort": "abort"}.get(ask.name, "stop")
        assert_empty(engine)


def test_a_seeded_request_does_not_know_its_neighbours(toy, alone, rng):
    """A26: beside one without a seed, which may end earlier, and as one of two choices."""
    engine = make_engine(toy)
    params = SamplingParams(temperature=0.7, seed=9, max_tokens=10)
    mine = Ask(name="mine", prompt=draw_prompt(rng, 7), params=params)
    [(tokens, _)] = alone(mine)
    for length in (10, 10, 3, 1):
        unseeded = SamplingParams(temperature=0.7, max_tokens=length)
        other = Ask(name="other", prompt=mine.prompt, params=unseeded)
        for asks in ([mine, other], [other, mine]):
            assert run_asks(engine, asks).ends["mine"].outputs[0].token_ids == tokens
    two = SamplingParams(temperature=0.7, seed=9, max_tokens=10, n=2)
    run = run_asks(engine, [Ask(name="two", prompt=mine.prompt, params=two)])
    assert run.ends["two"].outputs[0].token_ids == tokens


def test_choices_of_one_seed_differ_and_repeat(toy, rng):
    """A27: a choice draws by seed and index; equal prompts with equal seeds get equal tokens."""
    prompt = draw_prompt(rng, 6)
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=8)
    asks = [Ask(name=str(i), prompt=prompt, params=params) for i in range(4)]
    seen = []
    for _ in range(2):
        run = run_asks(make_engine(toy), asks)
        seen += [[tuple(x.token_ids) for x in run.ends[ask.name].outputs] for ask in asks]
    assert len(set(seen[0])) == 4
    assert all(choices == seen[0] for choices in seen)
    unseeded = SamplingParams(temperature=1.0, max_tokens=8)
    asks = [Ask(name=str(i), prompt=prompt, params=unseeded) for i in range(4)]
    run = run_asks(make_engine(toy), asks)
    assert len({tuple(output.outputs[0].token_ids) for output in run.ends.values()}) == 4


def test_warm_runs_give_the_tokens_of_the_cold_one(toy, alone, rng):
    """B15: 16 prompts three times, some of which share a block or go on differently."""
    engine = make_engine(toy)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    prompts = [draw_prompt(rng, 32) for _ in range(8)]
    prompts += [(*prompt[:4], *draw_prompt(rng, 28)) for prompt in prompts[:4]]
    prompts += [(*prompt[:30], *draw_prompt(rng, 5)) for prompt in prompts[:4]]
    asks = [Ask(name=str(i), prompt=prompt, params=params) for i, prompt in enumerate(prompts)]
    for _ in range(3):
        assert differences(asks, run_asks(engine, asks), alone) == []
    assert engine.stats()["prefix_hits_tokens"] > 0
    assert_empty(engine)


def test_a_pool_full_of_cached_blocks_admits_at_once(toy, alone, rng):
    """B17: what nobody uses is evicted, and counted apart from what is in use."""
    engine = make_engine(toy)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for i in range(8):
        run_asks(engine, [Ask(name=str(i), prompt=draw_prompt(rng, 30), params=params)])
    stats = engine.stats()
    assert stats["num_cached"] >= NUM_BLOCKS[4] - 1
    assert stats["num_used"] == 0
    fresh = Ask(name="fresh", prompt=draw_prompt(rng, 40), params=params)
    run = run_asks(engine, [fresh])
    assert run.num_steps <= 6
    assert differences([fresh], run, alone) == []


@pytest.mark.parametrize("swap_blocks", [3, 100])
def test_swapped_requests_with_a_common_prefix_equal_each_alone(toy, alone, rng, swap_blocks):
    """B20: twenty arrivals at random in a pool of six blocks, two of them of the prefix."""
    engine = make_engine(toy, block_size=16, num_blocks=NUM_BLOCKS[16], preemption_mode="swap")
    engine.config = dataclasses.replace(engine.config, swap_blocks=swap_blocks)
    kinds = set()
    engine.events = lambda event: kinds.add(event.kind)
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    prefix = draw_prompt(rng, 32)
    asks = [
        Ask(name=str(i), prompt=prefix + draw_prompt(rng, 2 + 4 * i), params=params)
        for i in range(4)
    ]

    def look(engine):
        assert engine.state.num_swapped_blocks <= swap_blocks

    for _ in range(20):
        came = [dataclasses.replace(ask, arrival=int(rng.integers(8))) for ask in asks]
        run = run_asks(engine, came, after_step=look)
        assert differences(came, run, alone) == []
        assert_empty(engine)
    assert {"preempt", "swap_out", "evict"} <= kinds


def test_aborted_requests_leave_no_image_on_the_host(toy, rng):
    """B22: swapped out and aborted, fifty times."""
    engine = make_engine(toy, preemption_mode="swap")
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for i in range(50):
        engine.add_request(str(i), draw_prompt(rng, 9), params)
        with preempted(lambda sequence: True):
            while not engine.stats()["num_swapped"]:
                engine.step()
        assert engine.abort(str(i)) is not None
        assert_empty(engine)


def test_a_preempted_prompt_of_many_chunks_is_not_preempted_again_and_again(toy, alone, rng):
    """B23: two others decode in a pool that all three together do not fit."""
    engine = make_engine(toy, block_size=16, num_blocks=NUM_BLOCKS[16], enable_prefix_caching=False)
    limit(engine, chunk=8, decode_steps=1)
    short = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    asks = [Ask(name=name, prompt=draw_prompt(rng, 14), params=short) for name in "ab"]
    asks.append(Ask(name="long", prompt=draw_prompt(rng, 44), params=short, arrival=1))
    once = {"long"}

    def is_due(sequence):
        name = sequence.request.request_id
        is_first = name in once
        once.discard(name)
        return is_first

    with preempted(is_due):
        run = run_asks(engine, asks)
    assert differences(asks, run, alone) == []
    assert 1 <= run.ends["long"].metrics.num_preemptions <= 3
    assert run.num_steps <= 3 * (20 + 44 // 6 + 20)


def test_the_urgent_are_next_and_equals_keep_their_order(toy, rng):
    """B26 and C7: a free row goes to the lowest number; nobody loses a row to a later arrival."""
    engine = make_engine(toy, scheduling_policy="priority")
    limit(engine, chunk=1, decode_steps=8)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    order = [("slow", 5, 0), ("late", 5, 1), ("equal", 5, 2), ("urgent", -10, 3)]
    asks = [
        Ask(name=name, prompt=draw_prompt(rng, 4), params=params, priority=priority, arrival=step)
        for name, priority, step in order
    ]
    assert list(run_asks(engine, asks).ends) == ["slow", "urgent", "late", "equal"]
    # One that is preempted goes on before those who came after it, even though it starts anew.
    once = {"slow"}

    def is_due(sequence):
        name = sequence.request.request_id
        is_first = name in once
        once.discard(name)
        return is_first

    with preempted(is_due):
        run = run_asks(engine, asks[:3])
    assert run.ends["slow"].metrics.num_preemptions == 1
    assert list(run.ends) == ["slow", "late", "equal"]
