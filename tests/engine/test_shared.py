"""Blocks that several read, by the cache or by forks, change no token."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx

from paged_jax.engine import prefix_cache
from paged_jax.models.decoder import Decoder
from paged_jax.sampling_params import SamplingParams
from tests.engine.harness import assert_idle, assert_tables_tight, make_engine, run_all, step


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def prompt_of(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, 258, length).tolist()


def segments_of(engine) -> list:
    """All segments that the engine will issue, in a list that grows."""
    found, issue = [], engine.runner.issue

    def noted(plan, sequences, images):
        found.extend(zip(plan.segments, [s.num_known for s in sequences], strict=True))
        return issue(plan, sequences, images)

    engine.runner.issue = noted
    return found


@pytest.mark.parametrize(("length", "most"), [(8, 7), (9, 8), (12, 11), (7, 6)])
def test_a_cached_prompt_computes_one_token(toy, alone, rng, length, most):
    """A3: also where the prompt is an exact multiple of the block."""
    engine = make_engine(toy)
    prompt, params = prompt_of(rng, length), greedy(3)
    for name, hits in (("cold", 0), ("warm", most), ("again", most)):
        run = run_all(engine, [(name, prompt, params)], after_step=assert_tables_tight)
        assert run.tokens(name) == alone(prompt, params)
        assert run.finished[name].num_cached_tokens == hits
    assert_idle(engine)


def test_a_cached_prompt_computes_one_token_with_blocks_of_one(toy, alone, rng):
    """A3 for block size 1: no block is ever used in part."""
    engine = make_engine(toy, block_size=1, num_blocks=80)
    prompt, params = prompt_of(rng, 8), greedy(3)
    for name, hits in (("cold", 0), ("warm", 7)):
        run = run_all(engine, [(name, prompt, params)])
        assert run.tokens(name) == alone(prompt, params)
        assert run.finished[name].num_cached_tokens == hits
    assert_idle(engine)


def test_prompts_that_only_look_alike_share_nothing(toy, alone):
    """B11: one text in decimal digits, and a block that others know at another depth."""
    engine = make_engine(toy)
    for i, prompt in enumerate(
        ([1, 23, 4, 4, 9], [12, 3, 4, 4, 9], [8] * 9, [2] * 4 + [8] * 9, [2] * 3 + [8] * 9)
    ):
        run = run_all(engine, [(str(i), prompt, greedy(3))])
        assert run.tokens(str(i)) == alone(prompt, greedy(3))
        assert run.finished[str(i)].num_cached_tokens == (3 if i == 4 else 0), prompt
    assert_idle(engine)


def test_prompts_of_one_hash_share_nothing(toy, alone, rng, monkeypatch):
    """B11: every block has the same hash."""
    constant = SimpleNamespace(sha256=lambda data: SimpleNamespace(digest=lambda: bytes(32)))
    monkeypatch.setattr(prefix_cache, "hashlib", constant)
    engine = make_engine(toy)
    first, second = prompt_of(rng, 9), prompt_of(rng, 9)
    for name, prompt, hits in (
        ("a", first, 0),
        ("b", second, 0),
        ("c", first, 4),
        ("d", second, 0),
    ):
        run = run_all(engine, [(name, prompt, greedy(5))])
        assert run.tokens(name) == alone(prompt, greedy(5))
        assert run.finished[name].num_cached_tokens == hits
    assert_idle(engine)


@pytest.fixture
def small(toy):
    """A pool of 6 blocks, 24 slots."""
    return make_engine(toy, num_blocks=6)


def test_a_prompt_that_fills_the_pool_runs_twice(small, alone, rng):
    """A3 where no block is left for a copy."""
    prompt = prompt_of(rng, 24)
    for name in ("cold", "warm"):
        run = run_all(small, [(name, prompt, greedy(1))], max_steps=50)
        assert run.tokens(name) == alone(prompt, greedy(1))
    assert_idle(small)


def test_a_block_reused_for_other_tokens_serves_them_only(small, alone, rng):
    """A2: the second prompt takes every block of the pool."""
    first, second = prompt_of(rng, 8), prompt_of(rng, 24)
    for name, prompt in (("a", first), ("b", second), ("again", first)):
        run = run_all(small, [(name, prompt, greedy(1))])
        assert run.tokens(name) == alone(prompt, greedy(1))
        assert run.finished[name].num_cached_tokens == 0
        assert len(small.state.cache) <= 6
    assert_idle(small)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_who_comes_back_to_its_own_blocks_computes_the_rest(toy, alone, rng, mode):
    """A5: cached and scheduled tokens are all that are known, at every admission."""
    engine = make_engine(toy, num_blocks=6, preemption_mode=mode)
    segments = segments_of(engine)
    requests = [(str(i), prompt_of(rng, 8), greedy(10)) for i in range(2)]
    run = run_all(engine, requests, after_step=assert_tables_tight)
    for name, prompt, params in requests:
        assert run.tokens(name) == alone(prompt, params)
    admissions = [(s, known) for s, known in segments if s.is_admission]
    assert all(s.start + s.num_tokens == known for s, known in admissions)
    assert len(admissions) > 2
    assert any(s.start > 0 for s, _ in admissions), "some of them come back to their blocks"
    assert_idle(engine)


def test_blocks_are_shared_chunk_by_chunk_as_they_are_written(toy, alone, rng):
    """A6 (b): one that arrives after the first chunk has what that has filled, and no more."""
    engine = make_engine(toy, max_num_batched_tokens=8, max_num_seqs=8)
    prompt = prompt_of(rng, 22)
    engine.add_request("a", prompt, greedy(4))
    step(engine)
    engine.add_request("b", prompt, greedy(4))
    tokens = {}
    while engine.has_unfinished():
        for output in step(engine):
            tokens[output.request_id] = output.outputs[0].token_ids
            if output.request_id == "b":
                # "b" is admitted beside the last chunk of "a", which writes token 16 and on.
                assert output.num_cached_tokens % 4 == 0
                assert 8 <= output.num_cached_tokens <= 16
    assert tokens == dict.fromkeys("ab", alone(prompt, greedy(4)))
    assert_idle(engine)


def test_twins_in_one_step_leave_one_entry_each(toy, alone, rng):
    """A6 (c): the second is known by its row alone, and its end drops no entry of the first."""
    engine = make_engine(toy)
    prompt = prompt_of(rng, 17)
    requests = [("a", prompt, greedy(3)), ("b", prompt, greedy(9))]
    run = run_all(engine, requests)
    for name, _, params in requests:
        assert run.tokens(name) == alone(prompt, params)
    assert len(engine.state.cache) == (17 + 9 - 1) // 4
    assert engine.stats()["num_cached"] == len(engine.state.cache)
    run = run_all(engine, [("c", prompt, greedy(3))])
    assert run.finished["c"].num_cached_tokens == 16
    assert_idle(engine)


def test_choices_survive_a_preemption_each_for_itself(small, alone, rng):
    """A12: choices of different ends, while another request forces some of them out."""
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=12)
    prompt, other = prompt_of(rng, 6), prompt_of(rng, 5)
    expected = [alone(prompt, params, choice=index) for index in range(3)]
    # The first choice ends early, by a token that nobody else says before.
    ends = {expected[0][2]}
    small.eos_token_ids = frozenset(ends)
    cut = [
        tokens[: next((i + 1 for i, t in enumerate(tokens) if t in ends), 12)]
        for tokens in expected
    ]
    assert len(cut[0]) == 3
    assert max(map(len, cut)) > 3
    ignoring = dataclasses.replace(greedy(12), ignore_eos=True)
    seen = []

    def look(engine):
        if (request := engine._requests.get("a")) is not None:
            ended = [sequence.index for sequence in request.sequences if sequence.finish_reason]
            seen.append((ended, request.num_preemptions))

    requests = [("other", other, ignoring), ("a", prompt, params)]
    run = run_all(small, requests, arrivals=[0, 1], after_step=look)
    assert all(ended for ended, count in seen if count), "nobody goes before the first has ended"
    assert run.choices("a") == cut
    assert run.tokens("other") == alone(other, greedy(12))
    assert run.finished["a"].metrics.num_preemptions > 0
    assert_idle(small)


def test_choices_copy_the_block_that_they_write(toy, alone, rng):
    """A13: a prompt that ends inside a block, each choice with its own tokens."""
    engine = make_engine(toy)
    params = SamplingParams(temperature=1.0, seed=4, n=4, max_tokens=8)
    prompt = prompt_of(rng, 6)
    kinds = []
    engine.events = lambda event: kinds.append(event.kind)
    run = run_all(engine, [("a", prompt, params)], after_step=assert_tables_tight)
    assert kinds.count("copy") == 3, "the last to write keeps the block"
    assert run.choices("a") == [alone(prompt, params, choice=index) for index in range(4)]
    assert len({tuple(tokens) for tokens in run.choices("a")}) == 4
    # A full block of all, and of each what it has said: 6 + 8 - 1 tokens are four blocks.
    assert run.finished["a"].num_blocks <= 1 + 4 * 3
    assert_idle(engine)


def test_a_prompt_that_goes_on_from_an_answer_copies_its_tail(toy, alone, rng):
    """A13: as the next turn of a conversation, while the first is still running."""
    engine = make_engine(toy)
    prompt = prompt_of(rng, 6)
    said = alone(prompt, greedy(12))
    longer = [*prompt, *said[:5]]
    requests = [("a", prompt, greedy(12)), ("b", longer, greedy(5)), ("c", longer, greedy(5))]
    run = run_all(engine, requests, arrivals=[0, 3, 4])
    assert run.tokens("a") == said
    for name in "bc":
        assert run.tokens(name) == alone(longer, greedy(5)) == said[5:10]
        assert run.finished[name].num_cached_tokens >= 8
    assert_idle(engine)


def test_logprobs_after_a_cached_prefix_are_those_of_the_prompt(toy, rng):
    """B14: of the token at the end of it, whoever ran in between."""
    engine = make_engine(toy)
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    prompt, other = prompt_of(rng, 9), prompt_of(rng, 9)
    found = []
    for name, ids, hits in (("a", prompt, 0), ("b", prompt, 8), ("c", other, 0), ("d", prompt, 8)):
        output = run_all(engine, [(name, ids, params)]).finished[name]
        assert output.num_cached_tokens == hits
        listed = output.outputs[0].logprobs
        assert listed is not None
        found.append([{i: entry.logprob for i, entry in entries.items()} for entries in listed])
    for warm in (found[1], found[3]):
        for expected, entries in zip(found[0], warm, strict=True):
            assert entries == pytest.approx(expected, abs=1e-5)
    assert found[2][0].keys() != found[0][0].keys()


@pytest.mark.exhaustive
def test_warm_logprobs_of_bfloat16_are_near_the_cold_ones(toy, rng):
    """B15: the same rest of a prompt is computed on its cached beginning."""
    engine = make_engine(Decoder(toy.spec, dtype="bfloat16", rngs=nnx.Rngs(7)))
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    for _ in range(10):
        prompt, found = prompt_of(rng, 32), []
        for _ in range(3):
            output = run_all(engine, [("a", prompt, params)]).finished["a"]
            [entries] = output.outputs[0].logprobs
            found.append({token: entry.logprob for token, entry in entries.items()})
        assert output.num_cached_tokens == 31
        assert found[1] == found[2]
        common = found[0].keys() & found[1].keys()
        assert len(common) >= 18
        for token in common:
            assert found[0][token] == pytest.approx(found[1][token], abs=0.05)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_order_of_eviction_is_that_of_last_use(toy, rng, overlap):
    """D6: also where blocks are freed dispatches after their requests have ended."""
    engine = make_engine(toy, overlap=overlap, decode_steps=1)
    prompts = [prompt_of(rng, length) for length in (9, 5, 8, 6)]
    # Their rows are in another order than their ends, of which two are in dispatches that follow.
    lengths = (9, 5, 2, 1)
    requests = [(str(i), prompts[i], greedy(lengths[i])) for i in range(4)]
    run = run_all(engine, requests)
    expected = []
    for i in (3, 2, 1, 0):
        known = [*prompts[i], *run.tokens(str(i))[:-1]]
        blocks = [tuple(known[k : k + 4]) for k in range(0, len(known) - 3, 4)]
        expected += reversed(blocks)
    cache = engine.state.cache
    assert [cache._entries[block].tokens for block in cache._reclaimable] == expected
    # One that is used again is evicted last, and its head after its tail.
    run_all(engine, [("again", prompts[3], greedy(1))])
    assert cache._entries[list(cache._reclaimable)[-1]].tokens == tuple(prompts[3][:4])
    assert_idle(engine)
