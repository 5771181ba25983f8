"""Requests that end, fail and are dropped at every point of a step."""

import random
import threading
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.beam_search_params import BeamSearchParams
from paged_jax.sampling_params import SamplingParams
from tests.engine.workloads import (
    Alone,
    Ask,
    Run,
    assert_empty,
    differences,
    make_asks,
    make_engine,
    preempted,
    run_asks,
)

WITHOUT_OVERLAP = pytest.param(False, marks=[pytest.mark.exhaustive, pytest.mark.by_hand])
POINTS = ("plan", "dispatch", "read", "swap_out", "swap_in", "copy", "device")


@pytest.fixture(scope="module")
def alone(toy):
    return Alone(toy)


class Faults:
    """Raises at points of a step; `device` takes the donated pool with it, as a real failure does.

    Args:
      is_due: Asked with the name of every point that is passed.
      error: What is raised.
    """

    def __init__(self, engine, is_due, error=RuntimeError) -> None:
        self.counts: Counter[str] = Counter()
        self.num_raised = 0
        self._is_due, self._error = is_due, error
        self._runner, self._step = engine.runner, engine.runner._step
        engine.dispatcher.on_fault_point = self.at
        engine.runner._step = self.step

    def at(self, point: str) -> None:
        self.counts[point] += 1
        if self._is_due(point):
            self.num_raised += 1
            raise self._error(f"injected at {point}")

    def step(self, params, kv, *rest):
        self.counts["device"] += 1
        if self._is_due("device"):
            self.num_raised += 1
            for array in jax.tree.leaves(kv):
                array.delete()
            raise self._error("injected at device")
        return self._step(params, kv, *rest)

    def remove(self, engine) -> None:
        engine.dispatcher.on_fault_point = None
        engine.runner._step = self._step


def every(point, period, times=1):
    """Due `times` times in a row after every `period` passes of a point."""
    passed = 0

    def is_due(name):
        nonlocal passed
        passed += name == point
        return name == point and passed % (period + times) >= period

    return is_due


def run_with(engine, asks, is_due, error=RuntimeError):
    """Runs with faults and a third of the requests preempted after every token."""
    victims = {ask.name for ask in asks[::3]}
    faults = Faults(engine, is_due, error)
    with preempted(lambda sequence: sequence.request.request_id in victims):
        run = run_asks(engine, asks, is_faulty=True)
    faults.remove(engine)
    return run, faults


@pytest.mark.parametrize("overlap", [True, WITHOUT_OVERLAP])
@pytest.mark.parametrize("point", POINTS)
def test_one_failure_or_two_change_no_token(toy, alone, point, overlap):
    engine = make_engine(toy, overlap=overlap, preemption_mode="swap")
    for seed, times in ((0, 1), (1, 2)):
        asks = make_asks(seed)
        run, faults = run_with(engine, asks, every(point, 5, times))
        assert faults.num_raised > 0
        assert f"injected at {point}" in str(engine.error)
        assert differences(asks, run, alone) == []
        assert_empty(engine)


@pytest.mark.parametrize("point", ["dispatch", "read", "device"])
def test_requests_that_fail_again_and_again_end_with_an_error(toy, alone, point):
    """The tenth to arrive poisons every dispatch that it is in."""
    engine = make_engine(toy)
    asks = make_asks(2, count=16)
    poison = asks[9].name
    issue, is_in = engine.dispatcher.issue, [False]

    def watched(plan, state, requests):
        is_in[0] = any(segment.request_id == poison for segment in plan.segments)
        return issue(plan, state, requests)

    engine.dispatcher.issue = watched
    faults = Faults(engine, lambda name: name == point and is_in[0])
    run = run_asks(engine, asks, is_faulty=True)
    faults.remove(engine)
    assert faults.num_raised >= 3
    # A choice may have ended well before the others failed.
    ends = {name: {x.finish_reason for x in out.outputs} for name, out in run.ends.items()}
    failed = [name for name, reasons in ends.items() if "error" in reasons]
    assert poison in failed
    assert 0 < len(failed) <= 8, "no more than had a row"
    for ask in asks:
        output = run.ends[ask.name]
        if ask.name in failed:
            assert output.error == f"RuntimeError: injected at {point}"
            for choice, (tokens, _) in zip(output.outputs, alone(ask), strict=False):
                if isinstance(ask.params, SamplingParams):
                    assert choice.token_ids == tokens[: len(choice.token_ids)]
        else:
            assert output.error is None
    rest = [ask for ask in asks if ask.name not in failed]
    assert differences(rest, run, alone) == []
    assert_empty(engine)
    engine.dispatcher.issue = issue
    assert differences(asks, run_asks(engine, asks, is_faulty=True), alone) == []
    assert_empty(engine)


def test_a_failure_at_every_step_ends_all_requests(toy, alone):
    engine = make_engine(toy)
    asks = make_asks(3)
    faults = Faults(engine, lambda name: name == "plan")
    run = run_asks(engine, asks, is_faulty=True)
    faults.remove(engine)
    assert {out.outputs[0].finish_reason for out in run.ends.values()} == {"error"}
    assert_empty(engine)
    asks = make_asks(4)
    run = run_asks(engine, asks, is_faulty=True)
    assert differences(asks, run, alone) == []
    assert_empty(engine)


@pytest.mark.parametrize("overlap", [True, WITHOUT_OVERLAP])
@pytest.mark.parametrize("point", [*POINTS, "commit"])
def test_ctrl_c_leaves_a_usable_engine(toy, alone, monkeypatch, point, overlap):
    engine = make_engine(toy, overlap=overlap, preemption_mode="swap")
    asks = make_asks(5)
    plain, num_interrupts = engine.step, 0

    def step():
        nonlocal num_interrupts
        try:
            return plain()
        except KeyboardInterrupt:
            num_interrupts += 1
            return []

    monkeypatch.setattr(engine, "step", step)
    # A dispatch publishes for every row.
    is_due = every(point, 40 if point == "commit" else 6)
    if point == "commit":
        publish = type(engine.state).publish

        def interrupted(state, sequence):
            # Called for a sequence when its tokens have been taken, and when a plan is issued.
            if is_due("commit"):
                raise KeyboardInterrupt
            publish(state, sequence)

        monkeypatch.setattr(type(engine.state), "publish", interrupted)
    run, _ = run_with(engine, asks, is_due, KeyboardInterrupt)
    assert num_interrupts > 0
    assert differences(asks, run, alone) == []
    monkeypatch.undo()
    assert_empty(engine)
    asks = make_asks(6)
    assert differences(asks, run_asks(engine, asks), alone) == []


class _Failing(nnx.Module):
    """A model whose forward pass raises when it is told to."""

    def __init__(self, inner, switch):
        self.inner = inner
        self.switch = nnx.static([switch])

    def __call__(self, batch, cache):
        hidden, cache = self.inner(batch, cache)

        def check(x):
            if self.switch[0]["is_on"]:
                self.switch[0]["is_on"] = False
                raise RuntimeError("the device failed")
            return np.zeros((), np.float32) * x

        zero = jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), hidden[0, 0])
        return hidden + jnp.where(jnp.isnan(zero), 0.0, zero), cache

    def logits(self, hidden):
        return self.inner.logits(hidden)

    def cache_spec(self):
        return self.inner.cache_spec()


@pytest.mark.exhaustive
def test_a_model_that_fails_on_the_device_changes_no_token(toy, alone):
    switch = {"is_on": False}
    engine = make_engine(_Failing(toy, switch))
    asks = make_asks(7)

    def after_step(engine):
        num_steps[0] += 1
        switch["is_on"] = num_steps[0] % 4 == 0

    num_steps = [0]
    run = run_asks(engine, asks, is_faulty=True, after_step=after_step)
    assert engine.error is not None
    assert differences(asks, run, alone) == []
    assert_empty(engine)


class Driver:
    """Does anything at any time to an engine, and knows what must come of it."""

    def __init__(self, model, alone, seed, monkeypatch, **options) -> None:
        self.engine = make_engine(model, **options)
        self.alone = alone
        self.draw = random.Random(seed)
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in ("loop", "submission"):
            monkeypatch.setattr(f"paged_jax.engine.{module}.time", clock)
        self.pool = make_asks(seed, count=20)
        self.asks: dict[str, Ask] = {}
        self.live: set[str] = set()
        self.timed: set[str] = set()
        self.aborted: set[str] = set()
        self.run, self.seen = Run(), {}
        self.num_steps = 0

    def add(self) -> None:
        ask, name = self.draw.choice(self.pool), f"q{len(self.asks)}"
        self.asks[name] = ask
        self.live.add(name)
        timeout = self.draw.choice((None, None, None, 1.0, 5.0, 20.0))
        if timeout is not None:
            self.timed.add(name)
        self.engine.add_request(
            name, ask.prompt, ask.params, priority=ask.priority, timeout=timeout
        )

    def take(self, outputs) -> None:
        outputs = [output for output in outputs if output is not None]
        self.run.see(outputs, self.seen)
        self.live -= {output.request_id for output in outputs if output.finished}

    def abort(self) -> None:
        name = self.draw.choice([*sorted(self.live), "unknown", "q0"])
        self.aborted.add(name)
        kind = self.draw.randrange(3)
        if kind == 0:
            self.take([self.engine.abort(name)])
            assert self.engine.abort(name) is None
        elif kind == 1:
            got = []
            thread = threading.Thread(target=lambda: got.append(self.engine.abort(name)))
            thread.start()
            thread.join()
            self.take(got)
        else:
            self.step(abort=name)

    def step(self, *, fault=None, abort=None) -> None:
        """One step, in which something fails or a request is aborted, from any thread."""

        def is_due(point):
            if abort is not None and point == due:
                if is_other_thread:
                    thread = threading.Thread(target=self.engine.abort, args=(abort,))
                    thread.start()
                    thread.join()
                else:
                    assert self.engine.abort(abort) is None
            return fault == point

        due = self.draw.choice(("plan", "dispatch", "read"))
        is_other_thread = self.draw.random() < 0.5
        error = self.draw.choice((RuntimeError, RuntimeError, KeyboardInterrupt))
        faults = Faults(self.engine, is_due, error)
        try:
            self.take(self.engine.step())
        except KeyboardInterrupt:
            assert faults.num_raised
        faults.remove(self.engine)
        self.num_steps += 1
        self.now += self.draw.random()

    def act(self) -> None:
        kind = self.draw.random()
        if kind < 0.25 and len(self.live) < 24:
            self.add()
        elif kind < 0.33:
            self.abort()
        elif kind < 0.40:
            self.step(fault=self.draw.choice(POINTS))
        elif kind < 0.42:
            self.engine.reset_prefix_cache()
        else:
            self.step()

    def finish(self) -> Counter:
        """Runs to the end and checks every request; returns how they ended."""
        for _ in range(2000):
            if not self.engine.has_unfinished():
                break
            self.step()
        assert not self.live, "requests were lost or do not end"
        assert_empty(self.engine)
        self.engine.reset_prefix_cache()
        assert self.engine.stats()["num_free"] == self.engine.stats()["num_blocks"]
        reasons: Counter[str | None] = Counter()
        for name, ask in self.asks.items():
            output = self.run.ends[name]
            for choice, (tokens, reason) in zip(output.outputs, self.alone(ask), strict=False):
                got = choice.token_ids
                reasons[choice.finish_reason] += 1
                if choice.finish_reason in ("stop", "length"):
                    is_cut = output.outputs[-1].finish_reason not in ("stop", "length")
                    if isinstance(ask.params, BeamSearchParams) and is_cut:
                        continue
                    assert (got, choice.finish_reason) == (tokens, reason), name
                    continue
                assert choice.finish_reason != "abort" or name in self.aborted
                assert choice.finish_reason != "timeout" or name in self.timed
                assert choice.finish_reason != "error" or output.error
                if isinstance(ask.params, SamplingParams):
                    assert got == tokens[: len(got)]
        return reasons


@pytest.mark.parametrize(
    "seed",
    [
        0,
        1,
        *(
            pytest.param(seed, marks=[pytest.mark.exhaustive, pytest.mark.by_hand])
            for seed in range(2, 6)
        ),
    ],
)
def test_whatever_happens_each_request_ends_once_and_rightly(toy, alone, monkeypatch, seed):
    """C23: each slot carries a tag of who wrote it; every row's are checked at every dispatch."""
    options = {
        "overlap": seed % 2 == 0,
        "enable_prefix_caching": seed % 3 > 0,
        "preemption_mode": ("recompute", "swap", "auto")[seed % 3],
        "scheduling_policy": ("fcfs", "priority")[seed // 2 % 2],
    }
    driver = Driver(toy, alone, seed, monkeypatch, **options)
    num = driver.draw
    with preempted(lambda sequence: num.random() < 0.1):
        for _ in range(150):
            driver.act()
    reasons = driver.finish()
    assert {"length", "abort"} < reasons.keys()


def test_nothing_is_kept_of_requests_that_have_ended(toy):
    """B28 and C24: after hundreds of them, half aborted with all their choices."""
    engine = make_engine(toy)
    params = SamplingParams(n=3, temperature=1.0, seed=0, max_tokens=2)
    for i in range(300):
        engine.add_request(str(i), [i % 258, 1, 2], params, timeout=1e6)
        if i % 2:
            if i % 4 == 1:
                engine.step()
            output = engine.abort(str(i))
            assert {choice.finish_reason for choice in output.outputs} == {"abort"}
        else:
            while engine.has_unfinished():
                engine.step()
        assert_empty(engine)
    state = engine.state
    assert not engine._requests
    assert len(state.waiting._heap) <= 64
    assert len(state.deadlines) <= 65
