"""Other weights under a running engine, and an engine that sleeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from paged_jax.beam_search_params import BeamSearchParams
from paged_jax.engine import Engine
from paged_jax.engine.weights import fit, leaf_specs
from paged_jax.sampling_params import SamplingParams
from tests.conftest import make_toy
from tests.engine.harness import make_engine, step

PROMPT = list(range(40, 53))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS = {"max_num_batched_tokens": 24, "num_blocks": 40, "decode_steps": 2}


@pytest.fixture(scope="module")
def other():
    """The toy model with other weights."""
    return make_toy(8)


@pytest.fixture(scope="module")
def engine(toy):
    """An engine that tests leave idle and awake, with whatever weights."""
    return make_engine(toy, **OPTIONS)


@pytest.fixture(scope="module")
def fresh(other):
    """An engine built with the other weights."""
    return make_engine(other, **OPTIONS)


def finish(engine: Engine) -> dict[str, list[list[int]]]:
    ended = {}
    while engine.has_unfinished():
        for output in step(engine):
            if output.finished:
                ended[output.request_id] = [part.token_ids for part in output.outputs]
    return ended


def answer(engine: Engine, prompt=PROMPT, params=GREEDY) -> list[list[int]]:
    engine.add_request("answer", prompt, params)
    return finish(engine)["answer"]


def begin(engine: Engine, num_steps: int = 3) -> None:
    """Two requests that have some tokens, and a beam search."""
    engine.add_request("a", PROMPT, GREEDY)
    engine.add_request("b", PROMPT[3:], SamplingParams(n=2, seed=4, max_tokens=12, ignore_eos=True))
    engine.add_request("c", PROMPT[::-1], BeamSearchParams(beam_width=2, max_tokens=8))
    for _ in range(num_steps):
        step(engine)


def flat(model) -> dict[str, np.ndarray]:
    """Parameters as a trainer may hold them: by name, in numpy."""
    specs = leaf_specs(nnx.state(model))
    return {name: np.array(x) for name, x in zip(specs, fit(model, specs), strict=True)}


def forms(model) -> dict[str, object]:
    state = nnx.state(model)
    return {
        "module": model,
        "state": state,
        "nested": nnx.to_pure_dict(state),
        "flat": flat(model),
        "paths": {path: variable[...] for path, variable in nnx.to_flat_state(state)},
        "placed": jax.device_put(state, jax.devices()[0]),
    }


@pytest.mark.parametrize("form", ["module", "state", "nested", "flat", "paths", "placed"])
def test_new_weights_give_the_tokens_of_an_engine_built_with_them(toy, other, engine, fresh, form):
    engine.update_weights(toy)
    old, new = answer(engine), answer(fresh)
    assert answer(engine) == old  # from the cache
    assert old != new
    stats, num_programs = engine.stats(), engine.runner._step._cache_size()
    engine.update_weights(forms(other)[form])
    assert answer(engine) == new
    assert engine.stats()["prefix_hits_tokens"] == stats["prefix_hits_tokens"]  # nothing stale
    assert answer(engine) == new
    assert engine.stats()["prefix_hits_tokens"] > stats["prefix_hits_tokens"]
    assert engine.stats()["compiles"] == stats["compiles"]
    assert engine.runner._step._cache_size() == num_programs


def test_nothing_cached_is_shared_across_weights_or_salts(toy, other, engine, fresh):
    """B13 and D4: not by other weights, by the same ones loaded again, or by another tenant."""
    found = {}
    for i, weights in enumerate((toy, other, toy)):
        engine.update_weights(weights)
        for salt in (None, "a", "b"):
            prompt = {"prompt_token_ids": PROMPT, "cache_salt": salt}
            for is_warm in (False, True):
                engine.add_request("answer", prompt, GREEDY)
                outputs = []
                while engine.has_unfinished():
                    outputs = step(engine) or outputs
                assert outputs[-1].num_cached_tokens == (len(PROMPT) - 1 if is_warm else 0)
                found[i, salt, is_warm] = outputs[-1].outputs[0].token_ids
    new = answer(fresh)[0]
    assert all((tokens == new) == (i == 1) for (i, *_), tokens in found.items())


def test_numpy_weights_are_copied(other, engine, fresh):
    given = flat(other)
    engine.update_weights(given)
    for array in given.values():
        array[...] = 0
    assert answer(engine) == answer(fresh)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p | {"head.weight": p["head.weight"][:-1]},
            r"head.weight has shape \(257, 32\)",
        ),
        (
            lambda p: p | {"head.weight": p["head.weight"].astype(np.float16)},
            "head.weight has dtype float16 and must have float32",
        ),
        (lambda p: {n: x for n, x in p.items() if n != "head.weight"}, "have the leaf head.weight"),
        (lambda p: p | {"tail": p["head.weight"]}, "has the leaf tail, which the model"),
        (lambda p: p | {"head.weight": 1.0}, "head.weight must be an array, not float"),
        (
            lambda p: (
                p
                | {
                    "head.weight": jax.device_put(
                        p["head.weight"],
                        NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x")),
                    )
                }
            ),
            "head.weight has sharding NamedSharding.* and must have SingleDevice",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_changes(
    toy, other, engine, change, message
):
    engine.update_weights(toy)
    old = answer(engine)
    version, params = engine.state.cache.version, engine.runner._params
    with pytest.raises(ValueError, match=message):
        engine.update_weights(change(flat(other)))
    assert engine.state.cache.version == version
    assert engine.runner._params is params
    assert answer(engine) == old


def test_requests_that_have_begun_are_refused_by_default(toy, other, engine):
    engine.update_weights(toy)
    begin(engine)
    with pytest.raises(RuntimeError, match="3 requests have begun"):
        engine.update_weights(other)
    with pytest.raises(ValueError, match="running \\('wait'\\) must be one of error, recompute"):
        engine.update_weights(other, running="wait")
    assert finish(engine)["a"] == answer(engine)
    engine.add_request("waits", PROMPT, GREEDY)  # has not begun
    engine.update_weights(toy)
    finish(engine)


def test_running_requests_go_on_with_new_weights(toy, other, engine, fresh):
    engine.update_weights(toy)
    begin(engine)
    engine.update_weights(other, running="recompute")
    assert engine.stats()["num_running"] == 0
    kept = {n: [list(s.output_ids) for s in r.sequences] for n, r in engine._requests.items()}
    ended = finish(engine)
    [first], [tokens] = kept["a"], ended["a"]
    assert 0 < len(first) < 12
    assert tokens[: len(first)] == first
    rest = SamplingParams(temperature=0.0, max_tokens=12 - len(first), ignore_eos=True)
    assert tokens[len(first) :] == answer(fresh, PROMPT + first, rest)[0]
    for before, after in zip(kept["b"], ended["b"], strict=True):
        assert after[: len(before)] == before
    assert len(ended["c"]) == 2
    assert engine.stats()["num_used"] == 0


def test_running_requests_can_be_ended(toy, other, engine, fresh):
    engine.update_weights(toy)
    begin(engine)
    engine.update_weights(other, running="abort")
    reasons = {o.request_id: o.outputs[0].finish_reason for o in step(engine) if o.finished}
    assert reasons == dict.fromkeys("abc", "abort")
    assert not engine.has_unfinished()
    assert engine.stats()["num_used"] == 0
    assert answer(engine) == answer(fresh)


def test_swapped_images_of_old_weights_are_not_used(toy, other, fresh):
    """D4: an image belongs to its sequence and is not found by content."""
    engine = make_engine(toy, **OPTIONS, preemption_mode="swap")
    engine.runner._step = fresh.runner._step
    for i in range(8):
        engine.add_request(str(i), PROMPT[i:] + PROMPT[:i], SamplingParams(max_tokens=40, seed=i))
    while not engine.stats()["num_swapped"]:
        step(engine)
    engine.update_weights(other, running="recompute")
    assert engine.stats()["num_swapped"] == engine.state.num_swapped_blocks == 0
    kept = {n: list(r.sequences[0].tokens) for n, r in engine._requests.items()}
    ended = finish(engine)
    for name, known in kept.items():
        tokens = [*PROMPT[int(name) :], *PROMPT[: int(name)], *ended[name][0]]
        assert tokens[: len(known)] == known
        params = SamplingParams(max_tokens=len(tokens) - len(known), seed=int(name))
        assert tokens[len(known) :] == answer(fresh, known, params)[0]


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_has_no_pool_and_goes_on_after(toy, engine, level):
    engine.update_weights(toy)
    begin(engine, 0)
    whole = finish(engine)
    begin(engine)
    engine.sleep(level)
    assert engine.runner.kv is None
    assert engine.runner.has_params == (level == 1)
    assert engine.stats()["num_used"] == engine.stats()["num_cached"] == 0
    assert engine.stats()["num_waiting"] >= 3
    with pytest.raises(RuntimeError, match=r"asleep: call wake_up\(\) before step"):
        engine.step()
    with pytest.raises(RuntimeError, match="asleep"):
        engine.snapshot("never")
    engine.add_request("d", PROMPT, GREEDY)
    engine.abort("d")
    if level == 2:
        with pytest.raises(RuntimeError, match=r"give them back with wake_up\(params\)"):
            engine.wake_up()
    assert engine.runner.is_asleep
    compiles = engine.stats()["compiles"]
    engine.wake_up(nnx.state(toy) if level == 2 else None)
    assert finish(engine) == whole
    assert engine.stats()["compiles"] == compiles


def test_a_failure_keeps_the_version_of_the_weights(toy, engine):
    engine.update_weights(toy)
    version = engine.state.cache.version
    engine.reset()
    assert engine.state.cache.version == version
    old = answer(engine)
    assert answer(engine) == old


def test_level_must_be_1_or_2(engine):
    with pytest.raises(ValueError, match=r"level \(3\) must be 1"):
        engine.sleep(3)
    engine.wake_up()  # awake already
    assert jnp.isfinite(engine.runner.kv.kv).all()
