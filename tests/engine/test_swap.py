"""Sequences whose blocks go to the host and come back."""

import dataclasses

import numpy as np
import pytest

from paged_jax import core
from paged_jax.core import CacheSpec
from paged_jax.engine.scheduler_state import Costs
from paged_jax.engine.swap import read_image, write_image
from paged_jax.sampling_params import SamplingParams
from tests.core.transitions import assert_same, state_of
from tests.engine.harness import PLAIN, assert_idle, make_engine, run_all
from tests.engine.plans import Player, decode, prefill
from tests.engine.simulation import Simulation, long_answers, with_options

SPEC = CacheSpec(num_layers=2, num_kv_heads=2, head_dim=8)


def test_swapped_sequences_compute_nothing_again():
    config = with_options(preemption_mode="swap", swap_blocks=100, max_num_batched_tokens=64)
    simulation = Simulation(config)
    for prompt in long_answers(3, 14, 15):
        simulation.add(prompt, 14)
    num_prefilled = num_swapped = 0
    while simulation.requests:
        plan = simulation.step()
        num_prefilled += sum(s.num_tokens for s in plan.segments if not s.is_decode)
        num_swapped += len(plan.swapped_in)
        for name, index, row, first in plan.swapped_in:
            segment = next(s for s in plan.segments if s.row == row)
            assert (segment.request_id, segment.index) == (name, index)
            assert (first, segment.num_tokens) == (0, 1), "the token that was sampled last"
    assert num_swapped == simulation.num_preemptions > 0
    assert num_prefilled == 3 * 15 + num_swapped
    simulation.assert_idle()


def test_swap_takes_cached_blocks_before_those_of_the_image():
    config = with_options(
        preemption_mode="swap", swap_blocks=100, enable_prefix_caching=True, num_blocks=11
    )
    simulation = Simulation(config)
    head = [1, 2, 3, 4, 5, 6, 1, 2]
    for tail in long_answers(3, 14, 7):
        simulation.add([*head, *tail], 14)
    firsts = []
    while simulation.requests:
        firsts += [first for *_, first in simulation.step().swapped_in]
    assert firsts
    assert min(firsts) >= 2, "the others have the head"
    simulation.assert_idle()


@pytest.mark.parametrize(
    ("mode", "space", "costs", "is_swapped"),
    [
        ("recompute", 100, Costs(), False),
        ("swap", 100, Costs(), True),
        ("swap", 3, Costs(), False),  # four blocks do not fit
        ("auto", 100, Costs(), True),  # nothing is known yet: it finds out
        ("auto", 100, Costs(recomputed_token=1.0, swapped_block=1.0), True),
        ("auto", 100, Costs(recomputed_token=0.1, swapped_block=1.0), False),
        ("auto", 3, Costs(recomputed_token=1.0, swapped_block=1.0), False),
    ],
)
def test_who_loses_a_row_is_swapped_if_there_is_room_and_it_is_cheaper(
    mode, space, costs, is_swapped
):
    config = with_options(preemption_mode=mode, swap_blocks=space, max_num_batched_tokens=64)
    simulation = Simulation(config)
    simulation.state.costs = costs
    for prompt in long_answers(3, 12, 15):
        simulation.add(prompt, 12)
    plan = simulation.step()
    while not plan.preempted:
        plan = simulation.step()
    assert bool(plan.swapped_out) == is_swapped
    assert simulation.state.num_swapped_blocks == (4 if is_swapped else 0)
    simulation.abort("2")
    assert simulation.state.num_swapped_blocks == 0


def random_pool(rng: np.random.Generator, *, dtype: str = "float32", has_tags: bool = True):
    """Twelve blocks, every slot of which holds something of its own."""
    kv = core.create_kv_cache(SPEC, 12, 4, dtype)
    kv = core.with_tags(kv) if has_tags else kv
    fields = {"kv": rng.integers(-100, 100, kv.kv.shape).astype(kv.kv.dtype)}
    if kv.is_quantized:
        fields["scales"] = rng.random(kv.scales.shape).astype(np.float32)
    if has_tags:
        fields["tags"] = rng.integers(1, 1000, kv.tags.shape).astype(np.int32)
    return dataclasses.replace(kv, **fields)


def arrays(kv, ids) -> list[np.ndarray]:
    """Blocks of all arrays of a pool or an image."""
    found = [np.asarray(kv.kv)[:, ids]]
    if kv.is_quantized:
        found.append(np.asarray(kv.scales)[:, ids])
    if kv.tags is not None:
        found.append(np.asarray(kv.tags)[ids])
    return found


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("ids", [[3], [5, 2, 9], [12, 1, 2, 3, 4]])
def test_an_image_holds_its_blocks_and_goes_into_others(rng, ids, dtype):
    """Scales and tags go with it, and what is padded to a power of two touches nothing."""
    kv = random_pool(rng, dtype=dtype)
    before = arrays(kv, slice(1, None))
    image = read_image(kv, ids)
    for found, expected in zip(arrays(image, slice(None)), arrays(kv, ids), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert isinstance(found, np.ndarray)
    for first in {0, len(ids) - 1}:
        pool = random_pool(np.random.default_rng(1), dtype=dtype)
        others = arrays(pool, slice(1, None))
        targets = [11, 6, 8, 7, 10][first : len(ids)]
        pool = write_image(pool, targets, image, first)
        kept = [block for block in range(1, 13) if block not in targets]
        for found, old, new in zip(
            arrays(pool, slice(None)), others, arrays(image, slice(None)), strict=True
        ):
            axis = 0 if found.ndim == 2 else 1
            np.testing.assert_array_equal(
                found.take(targets, axis), new.take(range(first, len(ids)), axis)
            )
            np.testing.assert_array_equal(
                found.take(kept, axis), old.take(np.array(kept) - 1, axis)
            )
    for found, expected in zip(arrays(kv, slice(1, None)), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_row_goes_on_from_its_image(toy, alone, rng, monkeypatch):
    engine = make_engine(toy, **PLAIN)
    engine.runner.programs = engine.runner.programs[-1:]
    player = Player(engine, monkeypatch)
    prompts = {name: rng.integers(0, 258, count).tolist() for name, count in (("a", 6), ("b", 9))}
    for name in "ab":
        player.add(name, prompts[name])
    player.play(prefill("a", 0, 0, 6))
    player.play(decode("a", 0, 6))
    assert player.tables == {0: [1, 2]}
    player.play(prefill("b", 0, 0, 9), free_rows=(0,), swapped_out=(("a", 0, 0),))
    assert player.tables == {0: [2, 1, 3]}, "its blocks are of somebody else meanwhile"
    player.play(
        decode("b", 0, 9), prefill("a", 4, 7, 1), restored=((4, 7),), swapped_in=(("a", 0, 4, 0),)
    )
    assert player.tables == {0: [2, 1, 3], 4: [4, 5]}
    assert (player.read_by(4), player.read_by(0)) == ("a 0-7", "b 0-9")
    player.play(decode("b", 0, 10), decode("a", 4, 8))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert player.tokens["a"] == alone(prompts["a"], params)[:4]
    assert player.tokens["b"] == alone(prompts["b"], params)[:3]
    assert_same(engine.runner.blocks, state_of(engine.state.ledger))
    assert not engine.dispatcher.images


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"overlap": False}, marks=pytest.mark.exhaustive),
        {"enable_prefix_caching": False},
        {},
    ],
    ids=str,
)
def test_swapped_requests_lose_nothing(toy, alone, rng, options):
    engine = make_engine(toy, num_blocks=6, preemption_mode="swap", **options)
    params = SamplingParams(temperature=0.8, max_tokens=12, seed=3)
    prompts = [rng.integers(0, 258, 8).tolist() for _ in range(3)]
    run = run_all(engine, [(str(i), prompt, params) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert run.tokens(str(i)) == alone(prompt, params)
    assert engine.stats()["num_preemptions"] > 0
    assert_idle(engine)


def test_choices_that_share_a_prompt_are_swapped_one_by_one(toy, alone, rng):
    engine = make_engine(toy, num_blocks=6, preemption_mode="swap")
    params = SamplingParams(temperature=1.0, max_tokens=10, seed=5, n=3)
    prompt = rng.integers(0, 258, 6).tolist()
    run = run_all(engine, [("a", prompt, params)])
    assert run.choices("a") == [alone(prompt, params, choice=i) for i in range(3)]
    assert engine.stats()["num_preemptions"] > 0
    assert_idle(engine)


def test_an_image_that_the_cache_has_too_is_dropped(toy, alone, rng):
    """Two requests of one prompt: the second comes back to blocks that the first has cached."""
    engine = make_engine(toy, num_blocks=6, preemption_mode="swap")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompt = rng.integers(0, 258, 8).tolist()
    images = []

    def look(engine):
        images.append(len(engine.dispatcher.images))
        waiting = [sequence.key for sequence in engine.state.waiting]
        assert {s.key for s in engine.dispatcher.images} <= set(waiting), "who runs has none"

    run = run_all(engine, [(name, prompt, params) for name in "abc"], after_step=look)
    assert max(images) > 0
    for name in "abc":
        assert run.tokens(name) == alone(prompt, params)
    assert_idle(engine)
