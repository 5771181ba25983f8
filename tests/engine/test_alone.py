"""Whatever happens around a request, its tokens are those of the same request run alone."""

import dataclasses
import itertools

import numpy as np
import pytest

from paged_jax.sampling_params import SamplingParams
from tests.engine.harness import (
    BLOCK,
    PoolWatch,
    assert_idle,
    assert_tables_tight,
    make_engine,
    run_all,
)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def prompt_of(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, 258, length).tolist()


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", [(13, 9, 9), (5, 5, 5, 5, 5)])
def test_padding_rows_never_write_into_a_live_block(toy, alone, rng, lengths):
    """Rows padded to a bucket, all 10 blocks live, the lowest and the highest included."""
    engine = make_engine(toy, num_blocks=10, enable_prefix_caching=False, decode_steps=1)
    watch = PoolWatch(engine)
    requests = [(str(i), prompt_of(rng, length), greedy(4)) for i, length in enumerate(lengths)]
    run = run_all(engine, requests)
    assert watch.blocks_used == set(range(1, 11))
    assert watch.num_checked > 3
    for name, prompt, params in requests:
        assert run.tokens(name) == alone(prompt, params)
    assert_idle(engine)


def test_block_boundaries_take_exactly_the_blocks_needed(toy, alone, rng):
    engine = make_engine(toy)
    cases = list(itertools.product((3, 4, 5, 7, 8, 9), (1, 2, 4, 5)))
    for length, max_tokens in cases:
        prompt = prompt_of(rng, length)
        run = run_all(engine, [("a", prompt, greedy(max_tokens))], after_step=assert_tables_tight)
        assert run.tokens("a") == alone(prompt, greedy(max_tokens))
        # The last token is never run, so it takes no slot.
        assert run.finished["a"].num_blocks == -(-(length + max_tokens - 1) // BLOCK)
        assert_idle(engine)


@pytest.fixture(scope="module")
def short(toy):
    """A context of 10 tokens, which is no multiple of the block size 4."""
    return make_engine(toy, max_model_len=10)


@pytest.mark.exhaustive
def test_context_need_not_be_a_multiple_of_the_block(short, rng):
    run = run_all(short, [("a", prompt_of(rng, 7), greedy(50))], after_step=assert_tables_tight)
    assert len(run.tokens("a")) == 3
    assert run.reason("a") == "length"


@pytest.mark.parametrize("max_tokens", [1, None])
def test_prompts_around_the_context_length_end_or_are_refused(short, alone, rng, max_tokens):
    params = greedy(max_tokens)
    run = run_all(short, [("fits", prompt_of(rng, 9), params)])
    assert len(run.tokens("fits")) == 1
    assert run.reason("fits") == "length"
    for length in (10, 11):
        with pytest.raises(ValueError, match=r"must be shorter than max_model_len \(10\)"):
            short.add_request("long", prompt_of(rng, length), params)
        behind = prompt_of(rng, 4)
        run = run_all(short, [("behind", behind, greedy(3))])
        assert run.tokens("behind") == alone(behind, greedy(3))
    assert_idle(short)


@pytest.fixture(scope="module")
def small(toy):
    """A pool of 6 blocks, 24 slots."""
    return make_engine(toy, num_blocks=6)


def test_a_prompt_that_can_never_fit_the_pool_is_refused(small, alone, rng):
    with pytest.raises(ValueError, match="needs 7 KV blocks of 4 and the pool has 6"):
        small.add_request("never", prompt_of(rng, 28), greedy(4))
    short = prompt_of(rng, 4)
    run = run_all(small, [("short", short, greedy(4))])
    assert run.tokens("short") == alone(short, greedy(4))
    assert_idle(small)


def test_a_request_alone_in_the_pool_that_cannot_grow_ends_with_length(small, alone, rng):
    """C26: and the engine serves the next."""
    prompt, short = prompt_of(rng, 20), prompt_of(rng, 4)
    run = run_all(small, [("grows", prompt, greedy(20)), ("short", short, greedy(3))])
    # 24 slots hold the KV of 20 prompt and 4 output tokens; one more was sampled from them.
    assert run.reason("grows") == "length"
    assert run.tokens("grows") == alone(prompt, greedy(20))[:5]
    assert run.tokens("short") == alone(short, greedy(3))
    assert_idle(small)


def test_a_request_that_cannot_grow_tells_the_blocks_it_held(small, rng):
    run = run_all(small, [("grows", prompt_of(rng, 20), greedy(20))])
    assert run.finished["grows"].num_blocks == 6


def test_a_preempted_request_that_filled_the_pool_ends_with_length(small, alone, rng):
    # Both grow until the later one is preempted; each then fills the pool by itself.
    first, second = prompt_of(rng, 3), prompt_of(rng, 3)
    run = run_all(small, [("first", first, greedy(40)), ("second", second, greedy(40))])
    for name, prompt in (("first", first), ("second", second)):
        assert run.reason(name) == "length"
        assert run.tokens(name) == alone(prompt, greedy(40))[:22]
    assert run.finished["second"].metrics.num_preemptions > 0
    assert_idle(small)


def test_preempted_requests_are_computed_again_and_lose_nothing(small, alone, rng):
    """Counters never go back, and count each token once (C16)."""
    engine, before = small, small.stats()
    prompts = [prompt_of(rng, 8) for _ in range(3)]
    requests = [(str(i), prompt, greedy(12)) for i, prompt in enumerate(prompts)]
    counters = [key for key in before if key.startswith(("prompt_", "generation_", "prefix_"))]
    seen = [before]

    def look(engine):
        assert_tables_tight(engine)
        stats = engine.stats()
        for key in (*counters, "num_preemptions"):
            assert stats[key] >= seen[-1][key], key
        assert stats["prefix_hits_tokens"] <= stats["prefix_queries_tokens"]
        assert stats["num_free"] + stats["num_cached"] + stats["num_used"] == stats["num_blocks"]
        seen.append(stats)

    run = run_all(engine, requests, after_step=look)
    for name, prompt, params in requests:
        assert run.tokens(name) == alone(prompt, params)
        assert len(run.tokens(name)) == 12
        assert 0 <= run.finished[name].num_cached_tokens <= 7
    # The first to arrive is never the victim.
    assert run.finished["0"].metrics.num_preemptions == 0
    after = engine.stats()
    assert after["num_preemptions"] > before["num_preemptions"]
    assert after["prompt_tokens"] - before["prompt_tokens"] == 24
    assert after["prefix_queries_tokens"] - before["prefix_queries_tokens"] == 24
    assert after["generation_tokens"] - before["generation_tokens"] == 36
    assert_idle(engine)


@pytest.mark.parametrize("kind", ["add", "dispatch", "first_token", "finish"])
def test_whoever_listens_and_fails_ends_no_request(toy, alone, rng, caplog, kind):
    """C16: the failure is told once, and requests go on without events."""
    engine, prompt, kinds = make_engine(toy), prompt_of(rng, 6), []

    def listen(event):
        kinds.append(event.kind)
        if event.kind == kind:
            raise ValueError("no disk is left")

    engine.events = listen
    run = run_all(engine, [("a", prompt, greedy(5)), ("b", prompt, greedy(9))])
    assert run.tokens("a") == alone(prompt, greedy(5))
    assert run.tokens("b") == alone(prompt, greedy(9))
    assert kinds.count(kind) == len(caplog.records) == 1
    assert engine.events is None
    assert_idle(engine)


def mixed_requests(rng: np.random.Generator, count: int):
    for i in range(count):
        is_greedy = i % 3 > 0
        params = SamplingParams(
            temperature=0.0 if is_greedy else 0.9,
            top_k=0 if i % 2 else 20,
            top_p=1.0 if i % 4 else 0.8,
            seed=i,
            max_tokens=int(rng.integers(1, 24)),
        )
        yield str(i), prompt_of(rng, int(rng.integers(1, 32))), params


@pytest.mark.slow
def test_64_mixed_requests_through_40_blocks_equal_each_alone(toy, alone, rng):
    """Greedy and seeded, joining at random, chunked, preempted; audited after every dispatch."""
    engine = make_engine(toy, num_blocks=40, max_num_batched_tokens=24)
    requests = list(mixed_requests(rng, 64))
    arrivals = rng.integers(0, 60, 64).tolist()
    run = run_all(engine, requests, arrivals=arrivals, after_step=assert_tables_tight)
    assert len(run.finished) == 64
    for name, prompt, params in requests:
        assert run.tokens(name) == alone(prompt, params), name
    assert engine.stats()["num_preemptions"] > 0
    assert_idle(engine)


@pytest.mark.parametrize("block_size", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_tiny_blocks_change_no_token(toy, alone, rng, block_size):
    engine = make_engine(toy, block_size=block_size, num_blocks=80 // block_size)
    requests = list(mixed_requests(rng, 10))
    run = run_all(engine, requests)
    for name, prompt, params in requests:
        assert run.tokens(name) == alone(prompt, params), name
    assert_idle(engine)


def test_the_order_of_requests_changes_no_token(toy, alone, rng):
    engine = make_engine(toy)
    prompts = [prompt_of(rng, length) for length in (3, 4, 5, 9, 1)]
    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)):
        run = run_all(engine, [(str(i), prompts[i], greedy(6)) for i in order])
        for i in order:
            assert run.tokens(str(i)) == alone(prompts[i], greedy(6))


def test_freed_blocks_full_of_nan_poison_nobody(toy, alone, rng):
    engine = make_engine(toy)
    kv = engine.runner.kv
    engine.runner.kv = dataclasses.replace(kv, kv=np.nan * kv.kv)
    prompts = [prompt_of(rng, length) for length in (1, 3, 4, 5, 13)]
    run = run_all(engine, [(str(i), prompt, greedy(6)) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert run.tokens(str(i)) == alone(prompt, greedy(6))


def test_a_seed_belongs_to_its_request(toy, rng):
    engine = make_engine(toy)
    prompt = prompt_of(rng, 6)
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=9)
    unseeded = SamplingParams(temperature=1.0, max_tokens=8)
    first = run_all(engine, [("a", prompt, params), ("b", prompt, unseeded)])
    second = run_all(
        engine, [("b", prompt, unseeded), ("c", prompt, unseeded), ("a", prompt, params)]
    )
    assert first.tokens("a") == second.tokens("a")
    assert first.tokens("b") != second.tokens("b")
    high = SamplingParams(temperature=1.0, max_tokens=8, seed=9 + 2**32)
    assert run_all(engine, [("a", prompt, high)]).tokens("a") != first.tokens("a")


def test_extreme_but_legal_fields_hurt_nobody(toy, alone, rng):
    engine = make_engine(toy)
    prompts = [prompt_of(rng, 4) for _ in range(3)]
    hot = SamplingParams(temperature=1e6, top_k=2**40, top_p=1e-9, seed=2**64 - 1, max_tokens=4)
    cold = SamplingParams(temperature=1e-30, top_k=np.int64(1), seed=-(2**63), max_tokens=4)
    run = run_all(
        engine,
        [("hot", prompts[0], hot), ("cold", prompts[1], cold), ("plain", prompts[2], greedy(4))],
    )
    assert run.tokens("cold") == alone(prompts[1], greedy(4))
    assert run.tokens("plain") == alone(prompts[2], greedy(4))
    assert run.tokens("hot") == alone(prompts[0], hot)


def test_what_a_caller_does_to_an_output_changes_nothing(toy, alone, rng):
    engine = make_engine(toy)
    prompt = prompt_of(rng, 3)
    engine.add_request("a", prompt, greedy(6))
    while engine.has_unfinished():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            output.prompt_token_ids.append(1)
            output.outputs[0].token_ids.clear()
    assert tokens == alone(prompt, greedy(6))


def test_a_module_may_keep_lists_and_the_weights_stay_as_they_were(toy, alone, rng):
    from flax import nnx

    class Wrapped(nnx.Module):
        def __init__(self, inner):
            self.inner = inner
            self.sizes = nnx.static([1, 2])  # makes the module's definition unhashable

        def __call__(self, batch, cache):
            return self.inner(batch, cache)

        def logits(self, hidden):
            return self.inner.logits(hidden)

        def cache_spec(self):
            return self.inner.cache_spec()

    tokens = np.asarray([[3, 1, 4, 1, 5]])
    before = toy(tokens)
    prompt = prompt_of(rng, 3)
    run = run_all(make_engine(Wrapped(toy)), [("a", prompt, greedy(4))])
    assert run.tokens("a") == alone(prompt, greedy(4))
    np.testing.assert_array_equal(toy(tokens), before)
