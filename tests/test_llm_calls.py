"""Calls of an LLM beside each other: streams, aborts, ids, deadlines, failures."""

import gc
import itertools
import logging
import threading
import weakref

import pytest

from paged_jax import LLM, BeamSearchParams, SamplingParams
from tests.llm_harness import (
    GREEDY,
    OPTIONS,
    PROMPTS,
    assert_idle,
    open_texting,
    reasons,
    run,
    tokens,
)

LONG = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module")
def shared(toy):
    with LLM(toy, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    """Idle before and after."""
    yield shared
    shared.engine.dispatcher.on_fault_point = None
    assert_idle(shared)


@pytest.fixture(scope="module")
def alone(shared):
    """Greedy tokens of each prompt run by itself."""
    return [tokens(run(shared, [prompt]))[0] for prompt in PROMPTS]


# Streams.


def test_a_stream_yields_growing_prefixes(toy):
    # "é" and the end may be held back for a while; what was shown stays.
    with open_texting(toy) as llm:
        outputs = list(llm.stream("ab", LONG))
        texts = [output.outputs[0].text for output in outputs]
        assert all(later.startswith(sooner) for sooner, later in itertools.pairwise(texts))
        # The prefill brings one, each dispatch that only decodes up to eight.
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 9, 17, 20]
        assert [output.finished for output in outputs] == [False] * 3 + [True]
        assert outputs[-1].outputs == run(llm, "ab", LONG)[0].outputs


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stream_yields_as_soon_as_tokens_are_read(toy, monkeypatch, overlap):
    with LLM(toy, **OPTIONS, decode_steps=1, overlap=overlap) as llm:
        step, count = llm.engine.step, itertools.count(1)
        steps = []
        monkeypatch.setattr(llm.engine, "step", lambda: (steps.append(next(count)), step())[1])
        stream = llm.stream(PROMPTS[0], GREEDY)
        seen = [(len(output.outputs[0].token_ids), len(steps)) for output in stream]
        # With overlap, tokens of a dispatch are read when the next one has been issued.
        assert seen == [(n, n + overlap) for n in range(1, 7)]


@pytest.mark.parametrize("num_read", [0, 1, 2])
def test_closing_a_stream_early_frees_its_blocks(llm, num_read):
    stream = llm.stream(PROMPTS[0], LONG)
    for _ in range(num_read):
        next(stream)
    stream.close()
    assert_idle(llm)


def test_a_stream_goes_on_beside_other_calls(llm, alone):
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert tokens(run(llm, PROMPTS[1:])) == alone[1:]
    last = list(stream)[-1]
    assert last.finished
    assert tokens([last]) == alone[:1]


def test_two_streams_may_be_read_in_turn(llm, alone):
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    last = {}
    for outputs in itertools.zip_longest(*streams):
        last |= {output.request_id: output for output in outputs if output is not None}
    assert tokens(last.values()) == alone[:2]


def test_a_stream_of_choices_has_them_in_order(llm):
    params = SamplingParams(n=3, seed=5, max_tokens=12)
    *_, last = llm.stream(PROMPTS[1], params)
    assert last.finished
    assert last.outputs == run(llm, PROMPTS[1], params)[0].outputs


# Aborts.


def test_an_aborted_stream_ends_and_says_so(llm):
    outputs = []
    for output in llm.stream(PROMPTS[0], LONG):
        outputs.append(output)
        llm.abort(output.request_id)
    assert reasons(outputs) == [None, "abort"]


def test_aborting_an_unknown_request_does_nothing(llm):
    llm.abort("nobody")


def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("where", ["between steps", "in a dispatch"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_another_thread_may_abort_a_call(llm, alone, monkeypatch, where, number):
    owner = llm.engine if where == "between steps" else llm.engine.runner
    name = "step" if where == "between steps" else "issue"
    original, count = getattr(owner, name), itertools.count(1)

    def aborting(*args):
        if next(count) == number:
            for request_id in ("a", "b"):
                in_thread(llm.abort, request_id)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, aborting)
        outputs = run(llm, PROMPTS[:2], LONG, request_ids=["a", "b"])
    assert reasons(outputs) == ["abort", "abort"]
    for output, expected in zip(outputs, alone, strict=False):
        found = output.outputs[0].token_ids
        assert found[:6] == expected[: len(found)]
    assert_idle(llm)
    assert tokens(run(llm, PROMPTS)) == alone


def test_aborts_at_any_moment_leave_no_call_hanging(llm, alone):
    is_over = threading.Event()
    names = [str(i) for i in range(100, 106)]

    def abort_all():
        pause = 0.0005
        while not is_over.wait(pause):
            pause = pause * 3 if pause < 0.02 else 0.0005
            for name in names[1:]:
                llm.abort(name)

    thread = threading.Thread(target=abort_all)
    thread.start()
    try:
        for _ in range(20):
            outputs = run(llm, PROMPTS, request_ids=names)
            assert tokens(outputs)[0] == alone[0]
            assert set(reasons(outputs)) <= {"abort", "length"}
    finally:
        is_over.set()
        thread.join()


# Ids.


def test_outputs_carry_the_ids_that_were_given(llm, alone):
    outputs = run(llm, PROMPTS, request_ids=list("abcdef"))
    assert [output.request_id for output in outputs] == list("abcdef")
    assert tokens(outputs) == alone
    assert next(llm.stream(PROMPTS[0], GREEDY, request_id="s")).request_id == "s"


def test_an_id_is_refused_while_its_request_has_not_ended(llm, alone):
    stream = llm.stream(PROMPTS[0], GREEDY, request_id="a")
    for call in (
        lambda: run(llm, PROMPTS[:2], request_ids=["b", "a"]),
        lambda: llm.stream(PROMPTS[1], GREEDY, request_id="a"),
        lambda: run(llm, PROMPTS[:2], request_ids=["c", "c"]),
    ):
        with pytest.raises(ValueError, match=r"request_id '[ac]' is in use"):
            call()
    assert tokens([list(stream)[-1]]) == alone[:1]
    assert tokens(run(llm, PROMPTS[:2], request_ids=["b", "a"])) == alone[:2]


def test_an_id_of_a_request_that_ended_unread_is_free(llm, alone):
    stream = llm.stream(PROMPTS[0], GREEDY, request_id="a")
    run(llm, PROMPTS[1], LONG)  # brings the stream to its end
    again = llm.stream(PROMPTS[1], GREEDY, request_id="a")
    assert tokens([list(stream)[-1]]) == alone[:1]
    assert tokens([list(again)[-1]]) == alone[1:2]
    stream = llm.stream(PROMPTS[0], GREEDY, request_id="a")
    llm.abort("a")
    assert tokens(run(llm, PROMPTS[1], request_ids=["a"])) == alone[1:2]
    assert reasons(stream) == ["abort"]


def test_a_late_abort_does_not_end_the_next_request_of_that_id(llm, alone):
    stream = llm.stream(PROMPTS[0], GREEDY, request_id="a")
    with llm.engine._lock:  # as if a dispatch ran
        in_thread(llm.abort, "a")
    llm.abort("a")
    assert reasons(stream) == ["abort"]
    assert tokens(run(llm, PROMPTS[0], request_ids=["a"])) == alone[:1]


def test_numbers_given_to_requests_avoid_ids_in_use(llm, alone):
    number = int(run(llm, PROMPTS[0])[0].request_id)
    taken = [str(number + 1), str(number + 3)]
    streams = [llm.stream(PROMPTS[0], GREEDY, request_id=name) for name in taken]
    outputs = run(llm, PROMPTS[:3])
    assert [int(output.request_id) - number for output in outputs] == [2, 4, 5]
    assert tokens(list(stream)[-1] for stream in streams) == alone[:1] * 2


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a"], r"request_ids \(1\) must be as many as prompts \(2\)"),
        ("ab", r"request_ids \('ab'\) must be a list"),
        (["a", 1], r"request_id \(1\) must be text"),
    ],
)
def test_ids_must_be_texts_as_many_as_prompts(llm, ids, message):
    with pytest.raises(ValueError, match=message):
        run(llm, PROMPTS[:2], request_ids=ids)


# Priorities and deadlines.


@pytest.mark.by_hand
@pytest.mark.exhaustive
def test_urgent_requests_go_first_with_the_policy_for_it(toy, alone):
    options = {**OPTIONS, "max_num_seqs": 1, "scheduling_policy": "priority"}
    with LLM(toy, **options) as llm:
        outputs = run(llm, PROMPTS[:4], priority=[2, 0, 1, -1])
        assert tokens(outputs) == alone[:4]
        times = [output.metrics.finished_time for output in outputs]
        assert sorted(range(4), key=times.__getitem__) == [3, 1, 2, 0]
        with pytest.raises(ValueError, match=r"priority \(1\) must be as many as requests \(2\)"):
            run(llm, PROMPTS[:2], priority=[1])
        with pytest.raises(ValueError, match=r"priority \(0.5\) must be an integer"):
            run(llm, PROMPTS[:2], priority=0.5)


def test_a_priority_needs_the_policy_for_it(llm):
    for priority in (1, [0, -1]):
        with pytest.raises(ValueError, match=r'needs scheduling_policy="priority"'):
            run(llm, PROMPTS[:2], priority=priority)
    with pytest.raises(ValueError, match=r'needs scheduling_policy="priority"'):
        llm.stream(PROMPTS[0], GREEDY, priority=1)


def test_requests_end_at_their_deadline(llm, alone):
    outputs = run(llm, PROMPTS[:2], timeout=1e-9)
    assert reasons(outputs) == ["timeout"] * 2
    assert reasons(llm.stream(PROMPTS[0], GREEDY, timeout=1e-9)) == ["timeout"]
    beam = BeamSearchParams(beam_width=2)
    [output] = llm.beam_search(PROMPTS[0], beam, timeout=1e-9, use_tqdm=False)
    assert output.outputs[0].finish_reason == "timeout"
    assert tokens(run(llm, PROMPTS, timeout=1000)) == alone
    with pytest.raises(ValueError, match=r"timeout \(0\) must be a number of seconds above 0"):
        run(llm, PROMPTS[0], timeout=0)


# Failures.


def fail(llm, error, *, times, at="dispatch"):
    """Lets the next dispatches fail at a point."""
    left = itertools.repeat(True, times)

    def raise_at(point):
        if point == at and next(left, False):
            # A real failure has taken the donated pool with it.
            llm.engine.runner.kv.kv.delete()
            raise error

    llm.engine.dispatcher.on_fault_point = raise_at


@pytest.mark.parametrize("at", ["dispatch", "read"])
def test_a_failure_that_passes_changes_nothing(llm, alone, at):
    stream = llm.stream(PROMPTS[0], GREEDY)
    fail(llm, RuntimeError("device lost"), times=2, at=at)
    assert tokens(run(llm, PROMPTS)) == alone
    assert tokens([list(stream)[-1]]) == alone[:1]


@pytest.mark.parametrize("at", ["plan", "dispatch", "read"])
def test_a_failure_that_stays_is_raised_by_the_calls_it_ended(llm, alone, at):
    error = RuntimeError("device lost")
    stream = llm.stream(PROMPTS[0], GREEDY)
    fail(llm, error, times=3, at=at)
    with pytest.raises(RuntimeError, match="device lost") as caught:
        run(llm, PROMPTS[1:])
    assert caught.value is error
    with pytest.raises(RuntimeError, match="device lost") as caught:
        list(stream)
    assert caught.value is error
    assert_idle(llm)
    assert tokens(run(llm, PROMPTS)) == alone


def test_a_failure_spares_those_that_were_not_in_the_dispatch(llm, alone, monkeypatch):
    # The first prompt takes the whole budget of a dispatch.
    bad, good = llm.stream([1] * 16, GREEDY, request_id="bad"), llm.stream(PROMPTS[0], GREEDY)
    issue = llm.engine.runner.issue

    def failing(plan, *args):
        if any(segment.request_id == "bad" for segment in plan.segments):
            raise RuntimeError("bad prompt")
        return issue(plan, *args)

    monkeypatch.setattr(llm.engine.runner, "issue", failing)
    assert tokens([list(good)[-1]]) == alone[:1]
    with pytest.raises(RuntimeError, match="bad prompt"):
        next(bad)
    with pytest.raises(StopIteration):
        next(bad)


@pytest.mark.parametrize("at", ["dispatch", "read"])
def test_an_interrupt_ends_its_call_and_no_other(llm, alone, at):
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    fail(llm, KeyboardInterrupt(), times=1, at=at)
    with pytest.raises(KeyboardInterrupt):
        run(llm, PROMPTS[1:])
    last = list(stream)[-1]
    assert (last.finished, last.outputs[0].token_ids[:6]) == (True, alone[0])
    assert_idle(llm)
    assert tokens(run(llm, PROMPTS)) == alone


def test_an_interrupt_between_dispatches_frees_the_blocks(llm, alone, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("paged_jax.progress.RequestProgress.update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(llm, PROMPTS)
    assert_idle(llm)
    assert tokens(run(llm, PROMPTS)) == alone


def test_a_call_whose_request_somebody_took_says_so(llm):
    stream = llm.stream(PROMPTS[0], GREEDY)
    llm.engine.reset()
    with pytest.raises(RuntimeError, match="the request is gone"):
        next(stream)


# Closing.


@pytest.mark.parametrize("has_failed", [False, True])
def test_closing_frees_the_engine_at_once(toy, monkeypatch, has_failed):
    # Records of the log, which pytest keeps, would hold a traceback.
    monkeypatch.setattr(logging.getLogger("paged_jax"), "disabled", True)
    llm = LLM(toy, **OPTIONS)
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    if has_failed:
        llm.engine.runner.kv.kv.delete()
        next(stream)
        assert llm.engine.error is not None
    engine = weakref.ref(llm.engine)
    gc.collect()
    gc.disable()
    try:
        llm.close()
        assert engine() is None
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)
    with pytest.raises(RuntimeError, match="closed"):
        llm.abort("0")
