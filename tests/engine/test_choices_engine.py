"""Choices of one request: they share the prompt's blocks, and each is as if it ran alone."""

import itertools

import pytest

from paged_jax.sampling_params import SamplingParams
from paged_jax.shapes import ceil_div
from tests.engine.harness import BLOCK, PLAIN, assert_idle, make_engine, run_all, step


@pytest.fixture(scope="module")
def roomy(toy):
    return make_engine(toy)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 23])
def test_choices_share_the_blocks_of_the_prompt(roomy, alone, rng, length):
    prompt = rng.integers(0, 258, length).tolist()
    params = SamplingParams(n=4, seed=2, max_tokens=7)
    held = []

    def look(engine):
        if len(engine.state.running) == 4:
            generated = max(s.num_computed for s in engine.state.running) - length
            held.append(engine.stats()["num_used"])
            whole, rest = divmod(length, BLOCK)
            assert held[-1] <= whole + 4 * ceil_div(rest + generated, BLOCK)

    run = run_all(roomy, [("a", prompt, params)], after_step=look)
    assert held
    assert run.choices("a") == [alone(prompt, params, choice=k) for k in range(4)]
    assert len(set(map(tuple, run.choices("a")))) == 4
    assert_idle(roomy)


def test_a_choice_has_the_tokens_that_it_has_among_more(roomy, rng):
    prompt = rng.integers(0, 258, 6).tolist()
    found = [
        run_all(roomy, [("a", prompt, SamplingParams(n=n, seed=3, max_tokens=6))]).choices("a")
        for n in (1, 2, 5)
    ]
    assert found[2][:2] == found[1]
    assert found[1][:1] == found[0]


@pytest.mark.parametrize(
    "options",
    [{"num_blocks": 12}, pytest.param(PLAIN, marks=[pytest.mark.exhaustive, pytest.mark.by_hand])],
    ids=str,
)
def test_choices_preempted_or_without_a_row_equal_each_alone(toy, alone, rng, options):
    """Ten choices for eight rows, and in the small pool blocks for three or four of them."""
    engine = make_engine(toy, **options)
    prompt, other = rng.integers(0, 258, 9).tolist(), rng.integers(0, 258, 5).tolist()
    params = SamplingParams(n=10, seed=4, max_tokens=12)
    last = SamplingParams(temperature=0.0, max_tokens=12)
    run = run_all(engine, [("a", prompt, params), ("b", other, last)])
    assert run.choices("a") == [alone(prompt, params, choice=k) for k in range(10)]
    assert run.tokens("b") == alone(other, last)
    assert (engine.stats()["num_preemptions"] > 0) == ("num_blocks" in options)
    assert_idle(engine)


def test_an_abort_ends_all_choices_at_any_step(roomy, alone, rng):
    prompt = rng.integers(0, 258, 9).tolist()
    params = SamplingParams(n=10, seed=4, max_tokens=12)
    expected = [alone(prompt, params, choice=k) for k in range(10)]
    for num_steps in itertools.count():
        roomy.add_request("a", prompt, params)
        if any(out.finished for _ in range(num_steps) for out in step(roomy)):
            break
        cut = roomy.abort("a")
        assert cut is not None
        for choice, tokens in zip(cut.outputs, expected, strict=True):
            assert choice.finish_reason in ("abort", "length")
            assert choice.token_ids == tokens[: len(choice.token_ids)]
        assert_idle(roomy)
    assert num_steps > 2
