"""Aborts at every moment of a request: nobody else notices, and it ends once."""

import numpy as np
import pytest

from paged_jax.sampling_params import SamplingParams
from tests.engine.harness import assert_idle, make_engine, step


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def prompt_of(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, 258, length).tolist()


def test_an_aborted_request_gives_its_blocks_back(toy, alone, rng):
    engine = make_engine(toy)
    prompts = {name: prompt_of(rng, 9) for name in ("stays", "running", "waiting")}
    for name in ("stays", "running"):
        engine.add_request(name, prompts[name], greedy(10))
    step(engine)
    engine.add_request("waiting", prompts["waiting"], greedy(10))
    for name in ("running", "waiting"):
        output = engine.abort(name)
        assert output is not None
        assert output.outputs[0].finish_reason == "abort"
        assert engine.abort(name) is None
    assert engine.abort("unknown") is None
    tokens = []
    while engine.has_unfinished():
        tokens = [output.outputs[0].token_ids for output in step(engine)]
    assert tokens[-1] == alone(prompts["stays"], greedy(10))
    assert_idle(engine)
    engine.add_request("running", prompts["running"], greedy(2))  # an id is free after the end
    engine.abort("running")
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "moment", ["waiting", "plan", "dispatch", "running", "read", "last step", "after its end"]
)
def test_an_abort_at_any_moment_hurts_nobody(toy, alone, rng, moment, overlap):
    """A17: one end or none, blocks back, and the others say what they say alone."""
    engine = make_engine(toy, overlap=overlap)
    prompts = {name: prompt_of(rng, 5) for name in ("goes", "stays")}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(30 if name == "stays" else 24))
    ends: list[tuple[str, str | None]] = []
    tokens = {name: [] for name in prompts}

    def note(output):
        if output is not None:
            tokens[output.request_id] = output.outputs[0].token_ids
            if output.finished:
                ends.append((output.request_id, output.outputs[0].finish_reason))

    def abort_at(point):
        if point == moment:
            # Inside a step it waits for a safe place; the step or the next returns the output.
            assert engine.abort("goes") is None

    def ended():
        return any(name == "goes" for name, _ in ends)

    num_steps = 0
    while engine.has_unfinished():
        if (moment == "waiting" and num_steps == 0) or (moment == "running" and num_steps == 2):
            note(engine.abort("goes"))
        if moment in ("plan", "dispatch", "read") and num_steps >= 1:
            engine.dispatcher.on_fault_point = abort_at
        if moment == "last step" and len(tokens["goes"]) == 17:
            # The next step reads its last seven tokens: it ends before the abort can.
            engine.dispatcher.on_fault_point = lambda point: engine.abort("goes") and None
        if moment == "after its end" and ended():
            assert engine.abort("goes") is None
        for output in step(engine):
            note(output)
        num_steps += 1
    engine.dispatcher.on_fault_point = None
    assert engine.abort("goes") is None
    assert engine.abort("unknown") is None
    assert sorted(name for name, _ in ends) == ["goes", "stays"]
    expected = alone(prompts["goes"], greedy(24))
    assert tokens["goes"] == expected[: len(tokens["goes"])]
    if moment == "waiting":
        assert tokens["goes"] == []
    is_late = moment in ("last step", "after its end")
    assert dict(ends)["goes"] == ("length" if is_late else "abort")
    assert tokens["stays"] == alone(prompts["stays"], greedy(30))
    assert_idle(engine)


def test_an_interrupt_while_aborting_loses_nobody(toy, alone, rng):
    """As Ctrl-C in the plan that gives the last blocks back."""
    engine = make_engine(toy)
    prompt = prompt_of(rng, 3)
    engine.add_request("a", prompt, greedy(8))
    step(engine)

    def interrupt(point):
        raise KeyboardInterrupt

    engine.dispatcher.on_fault_point = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.abort("a")
    engine.dispatcher.on_fault_point = None
    while engine.has_unfinished():
        step(engine)
    assert_idle(engine)
    engine.add_request("b", prompt, greedy(8))
    while engine.has_unfinished():
        outputs = step(engine)
    assert outputs[-1].outputs[0].token_ids == alone(prompt, greedy(8))
    assert_idle(engine)


def test_an_abort_of_one_that_was_just_planned_leaves_nothing_in_the_cache(toy, alone, rng):
    """A6 (a): blocks are known to others once the dispatch that writes them is issued."""
    engine = make_engine(toy)
    prompt = prompt_of(rng, 16)
    engine.add_request("a", prompt, greedy(4))
    planned = []

    def fail_before_issue(point):
        if point == "dispatch":
            planned.append(len(engine.state.cache))
            raise RuntimeError("not issued")

    engine.dispatcher.on_fault_point = fail_before_issue
    engine.step()
    engine.dispatcher.on_fault_point, engine.error = None, None
    assert planned == [0]
    engine.abort("a")
    engine.add_request("b", prompt, greedy(4))
    outputs = []
    while engine.has_unfinished():
        outputs += step(engine)
    assert outputs[-1].num_cached_tokens == 0
    assert outputs[-1].outputs[0].token_ids == alone(prompt, greedy(4))
    assert_idle(engine)
