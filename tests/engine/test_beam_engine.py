"""Beam search through the engine: on rows and blocks, beside others, preempted, cut short."""

import dataclasses
import itertools

import numpy as np
import pytest

from paged_jax.beam_search_params import BeamSearchParams
from paged_jax.engine.beam import BeamSearch
from paged_jax.models.load import load_model, open_checkpoint
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.sampling_params import SamplingParams
from paged_jax.shapes import ceil_div
from tests.beam_rows import DATA, llama_rows, smollm2_rows
from tests.byte_tokenizer import byte_backend
from tests.engine.harness import (
    BLOCK,
    PLAIN,
    ROOMY,
    Alone,
    assert_idle,
    assert_tables_tight,
    make_engine,
    run_all,
    step,
)
from tests.engine.test_beam import dense_logprobs, jitted
from tests.engine.test_beam import run as run_search
from tests.engine.workloads import limit

ROWS = llama_rows()


@pytest.fixture(scope="module")
def llama():
    return load_model(open_checkpoint(DATA / "tiny" / "llama"))


@pytest.fixture(scope="module")
def llama_alone(llama):
    return Alone(llama)


@pytest.fixture(scope="module")
def roomy(llama):
    return make_engine(llama)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def check(row, output) -> None:
    """Compares the beams of an output with those of transformers."""
    penalty = row.params.length_penalty
    row.check(
        (beam.token_ids, beam.cumulative_logprob / len(beam.token_ids) ** penalty)
        for beam in output.outputs
    )
    assert output.finished
    assert [beam.index for beam in output.outputs] == list(range(len(output.outputs)))


def watch_copies(engine, monkeypatch) -> list[int]:
    """Numbers of blocks copied, of each dispatch from now on."""
    counts, apply = [], engine.state.apply

    def counting(*args):
        allocation = apply(*args)
        counts.append(len(allocation.copies))
        return allocation

    monkeypatch.setattr(engine.state, "apply", counting)
    return counts


@pytest.mark.parametrize(
    "row", ROWS, ids=[f"width {r.params.beam_width}, row {i}" for i, r in enumerate(ROWS)]
)
def test_beams_share_blocks_and_equal_transformers(roomy, row, monkeypatch):
    engine, width = roomy, row.params.beam_width
    engine.eos_token_ids = frozenset({row.eos_token_id})
    copies = watch_copies(engine, monkeypatch)
    held, prompt_len = [], len(row.prompt_token_ids)

    def look(engine):
        held.append(engine.stats()["num_used"])
        generated = max((s.num_known - prompt_len for s in engine.state.running), default=0)
        most = ceil_div(prompt_len, BLOCK) + width * (ceil_div(generated, BLOCK) + 1)
        assert held[-1] <= most
        if generated:
            assert_tables_tight(engine)

    requests = [("a", row.prompt_token_ids, row.params)]
    run = run_all(engine, requests, after_step=look)  # type: ignore[arg-type]
    check(row, run.finished["a"])
    # Of a step each beam copies the block that it shares with others and writes into, at most.
    assert 0 < max(copies) <= width
    copies_of_all = width * ceil_div(prompt_len + row.params.max_tokens, BLOCK)
    assert max(held) < copies_of_all
    assert_idle(engine)


@pytest.mark.parametrize(
    "block_size",
    [
        16,
        pytest.param(1, marks=pytest.mark.exhaustive),
        *(pytest.param(n, marks=[pytest.mark.exhaustive, pytest.mark.by_hand]) for n in (2, 4)),
    ],
)
def test_beams_beside_others_equal_transformers(llama, llama_alone, rng, block_size):
    engine = make_engine(llama, block_size=block_size, num_blocks=256 // block_size)
    others = {
        f"other {i}": (rng.integers(0, 320, 5 + 4 * i).tolist(), params)
        for i, params in enumerate([greedy(30), SamplingParams(seed=3, max_tokens=25, n=2)])
    }
    finished, waiting = {}, [*others.items(), *enumerate(ROWS)]
    while waiting or engine.has_unfinished():
        for key, asked in waiting[:2]:  # two join at each step
            if isinstance(asked, tuple):
                engine.add_request(key, *asked)
            else:
                engine.eos_token_ids = frozenset({asked.eos_token_id})
                engine.add_request(str(key), asked.prompt_token_ids, asked.params)
                engine.eos_token_ids = frozenset()
        del waiting[:2]
        finished |= {out.request_id: out for out in step(engine) if out.finished}
    for i, row in enumerate(ROWS):
        check(row, finished[str(i)])
    for name, (prompt, params) in others.items():
        for k, choice in enumerate(finished[name].outputs):
            assert choice.token_ids == llama_alone(prompt, params, choice=k)
    assert_idle(engine)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"preemption_mode": "swap"}, marks=[pytest.mark.exhaustive, pytest.mark.by_hand]
        ),
        pytest.param(PLAIN, marks=[pytest.mark.exhaustive, pytest.mark.by_hand]),
        pytest.param(
            {"overlap": False, "block_size": 2}, marks=[pytest.mark.exhaustive, pytest.mark.by_hand]
        ),
    ],
    ids=["usual", "swap", "plain", "blocks of 2"],
)
def test_beams_are_preempted_whole_and_lose_nothing(llama, llama_alone, rng, options):
    """An earlier request grows until the beams have to go, and they start again from their first.

    Swapping is for requests of one row: beams are computed again in any mode.
    """
    tokens = {2: 44, 4: 72}
    earlier = rng.integers(0, 320, 12).tolist()
    size = options.get("block_size", BLOCK)
    num_preemptions = 0
    engines = {
        width: make_engine(llama, **options, num_blocks=count // size)
        for width, count in tokens.items()
    }
    for row in ROWS:
        engine = engines[row.params.beam_width]
        engine.eos_token_ids = frozenset({row.eos_token_id})

        def all_or_none(engine):
            request = engine._requests.get("beams")
            if request is not None:
                assert len({sequence.row is None for sequence in request.sequences}) == 1

        engine.add_request("first", earlier, dataclasses.replace(greedy(30), ignore_eos=True))
        run = run_all(
            engine,
            [("beams", row.prompt_token_ids, row.params)],  # type: ignore[list-item]
            after_step=all_or_none,
        )
        check(row, run.finished["beams"])
        num_preemptions += run.finished["beams"].metrics.num_preemptions
        assert run.finished["first"].metrics.num_preemptions == 0
        assert run.tokens("first") == llama_alone(earlier, greedy(30))
        assert_idle(engine)
    assert num_preemptions > 0


# Against a search over the dense model, where beams end early.


@pytest.fixture(scope="module")
def toy_dense(toy):
    return jitted(toy)


def search(dense, prompt, params, eos, limit=64):
    """The search as the dense model computes it."""
    searched = BeamSearch(len(prompt), params, eos, limit)
    return run_search(searched, dense_logprobs(dense, prompt, rows=4, length=64)).results()


def tokens_and_reasons(beams):
    return [(list(beam.token_ids), beam.finish_reason) for beam in beams]


@pytest.fixture(scope="module")
def ending(toy_dense):
    """A prompt of 30 tokens, parameters, and tokens that end some beams early."""
    prompt = np.random.default_rng(4).integers(0, 258, 30).tolist()
    params = BeamSearchParams(beam_width=4, max_tokens=10)
    free = search(toy_dense, prompt, params, frozenset())
    eos = frozenset(free[0].token_ids[3:4] + free[1].token_ids[7:8] + free[3].token_ids[9:10])
    return prompt, params, eos


@pytest.fixture(scope="module")
def toy_engine(toy):
    return make_engine(toy)


@pytest.mark.parametrize("stopping", [True, False, "never"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_beams_that_end_early_free_their_blocks_once(
    toy_engine, toy_dense, ending, stopping, ignore_eos
):
    """A15: a long prompt and beams that end at different steps; audited after every one."""
    prompt, params, eos = ending
    params = dataclasses.replace(params, early_stopping=stopping, ignore_eos=ignore_eos)
    toy_engine.eos_token_ids = eos
    run = run_all(toy_engine, [("a", prompt, params)])
    found = tokens_and_reasons(run.finished["a"].outputs)
    assert found == tokens_and_reasons(search(toy_dense, prompt, params, eos))
    assert ("stop" in {reason for _, reason in found}) == (not ignore_eos)
    assert_idle(toy_engine)


@pytest.mark.parametrize("width", [1, 3, 4])
def test_any_width_equals_the_dense_search(toy_engine, toy_dense, rng, width):
    toy_engine.eos_token_ids = frozenset(range(0, 258, 40))
    asked = {
        str(i): (
            rng.integers(0, 258, length).tolist(),
            BeamSearchParams(beam_width=width, max_tokens=int(rng.integers(1, 20))),
        )
        for i, length in enumerate((1, 3, 4, 5, 8))
    }
    run = run_all(toy_engine, [(name, *ask) for name, ask in asked.items()])
    for name, (prompt, params) in asked.items():
        expected = search(toy_dense, prompt, params, toy_engine.eos_token_ids)
        assert tokens_and_reasons(run.finished[name].outputs) == tokens_and_reasons(expected)
    assert_idle(toy_engine)


@pytest.mark.parametrize(("chunk", "width"), [(3, 2), (5, 3)])
def test_beams_start_beside_a_prompt_that_takes_the_rest_of_a_dispatch(
    toy, toy_dense, alone, rng, chunk, width
):
    """Where they part, all of them write into one block, and no block is free but cached ones."""
    engine = make_engine(toy, scheduling_policy="priority")
    limit(engine, chunk=chunk, decode_steps=1)
    fill = [(f"fill {i}", rng.integers(0, 258, 56).tolist(), greedy(1)) for i in range(7)]
    run_all(engine, fill)
    assert engine.stats()["num_free"] == 0
    prompt, urgent = rng.integers(0, 258, 7).tolist(), rng.integers(0, 258, 50).tolist()
    params = BeamSearchParams(beam_width=width, max_tokens=6)
    engine.add_request("beams", prompt, params)
    for _ in range(ceil_div(len(prompt), chunk)):
        step(engine)
    engine.add_request("urgent", urgent, greedy(3), priority=-1)
    run = run_all(engine, [])
    found = tokens_and_reasons(run.finished["beams"].outputs)
    assert found == tokens_and_reasons(search(toy_dense, prompt, params, frozenset()))
    assert run.tokens("urgent") == alone(urgent, greedy(3))
    assert_idle(engine)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_beams_at_the_context_length_are_returned(toy, toy_dense, rng, width, ignore_eos):
    """C5: with the reason "length", whether ends of sequence count or not."""
    engine = make_engine(toy, max_model_len=15)
    engine.eos_token_ids = frozenset({5})
    for prompt_len in (14, 13, 9):
        prompt = rng.integers(0, 258, prompt_len).tolist()
        params = BeamSearchParams(beam_width=width, max_tokens=50, ignore_eos=ignore_eos)
        run = run_all(engine, [("a", prompt, params)])
        found = tokens_and_reasons(run.finished["a"].outputs)
        expected = search(toy_dense, prompt, params, frozenset({5}), limit=15)
        assert found == tokens_and_reasons(expected)
        assert {(len(ids), reason) for ids, reason in found} == {(15 - prompt_len, "length")}
    assert_idle(engine)


@pytest.mark.by_hand
@pytest.mark.exhaustive
def test_beams_that_the_whole_pool_cannot_hold_end_with_length(toy, toy_dense, alone, rng):
    engine = make_engine(toy, num_blocks=12)
    prompt, behind = rng.integers(0, 258, 20).tolist(), rng.integers(0, 258, 5).tolist()
    params = BeamSearchParams(beam_width=4, max_tokens=40)
    run = run_all(engine, [("a", prompt, params), ("b", behind, greedy(8))])
    found = run.finished["a"].outputs
    assert {beam.finish_reason for beam in found} == {"length"}
    lengths = {len(beam.token_ids) for beam in found}
    assert len(found) == 4
    assert lengths == {max(lengths)}
    limited = dataclasses.replace(params, max_tokens=max(lengths))
    expected = search(toy_dense, prompt, limited, frozenset())
    assert [beam.token_ids for beam in found] == [list(beam.token_ids) for beam in expected]
    assert run.tokens("b") == alone(behind, greedy(8))
    assert_idle(engine)


@pytest.mark.parametrize("end", ["abort", "timeout"])
@pytest.mark.parametrize("overlap", [True, False])
def test_beams_cut_short_at_any_step_leave_nothing_behind(toy, ending, alone, rng, end, overlap):
    engine = make_engine(toy, overlap=overlap)
    prompt, params, eos = ending
    other = rng.integers(0, 258, 6).tolist()
    before: list = []
    for num_steps in itertools.count():
        engine.eos_token_ids = eos
        engine.add_request("a", prompt, params, timeout=1000)
        engine.eos_token_ids = frozenset()
        engine.add_request("b", other, greedy(20))
        outputs = [out for _ in range(num_steps) for out in step(engine)]
        if any(out.finished for out in outputs if out.request_id == "a"):
            break
        if end == "abort":
            cut = engine.abort("a")
        else:
            (_, *rest) = engine.state.deadlines[0]
            engine.state.deadlines[0] = (0.0, *rest)
            outputs += step(engine)
            [cut] = [out for out in outputs if out.request_id == "a" and out.finished]
        assert cut is not None
        reasons = [beam.finish_reason for beam in cut.outputs]
        assert set(reasons) <= {end, "stop"}
        lengths = [len(b.token_ids) for b in cut.outputs if b.finish_reason == end]
        assert len(set(lengths)) <= 1
        before.append(max(lengths, default=0))
        while engine.has_unfinished():
            outputs += step(engine)
        [tokens] = [o.outputs[0].token_ids for o in outputs if o.request_id == "b" and o.finished]
        assert tokens == alone(other, greedy(20))
        assert_idle(engine)
    assert before[0] == 0
    assert max(before) >= 3
    run_all(engine, [])
    assert_idle(engine)


@pytest.mark.parametrize("point", ["dispatch", "copy", "read"])
def test_beams_survive_a_failure_at_any_step(toy, toy_dense, ending, point):
    engine = make_engine(toy)
    prompt, params, eos = ending
    engine.eos_token_ids = eos
    expected = tokens_and_reasons(search(toy_dense, prompt, params, eos))
    for number in itertools.count(1):
        calls = itertools.count(1)
        has_failed = []

        def fail(name, number=number, calls=calls, has_failed=has_failed):
            if name == point and next(calls) == number:
                has_failed.append(True)
                raise RuntimeError("device lost")

        engine.dispatcher.on_fault_point = fail
        engine.add_request("a", prompt, params)
        outputs = []
        while engine.has_unfinished():
            outputs = engine.step() or outputs
        engine.dispatcher.on_fault_point = None
        assert tokens_and_reasons(outputs[-1].outputs) == expected
        engine.error = None
        assert_idle(engine)
        if not has_failed:
            break
    assert number > 3


def test_special_tokens_are_in_the_text_of_beams_only_if_wanted(toy, rng):
    """C6: half of the vocabulary is special."""
    tokenizer = Tokenizer(byte_backend([f"<{i}>" for i in range(129)], 385), special_tokens={})
    engine = make_engine(toy)
    engine.tokenizer = tokenizer
    prompt = rng.integers(0, 258, 5).tolist()
    texts = {}
    for skip in (True, False):
        params = BeamSearchParams(beam_width=4, max_tokens=8, skip_special_tokens=skip)
        beams = run_all(engine, [("a", prompt, params)]).finished["a"].outputs
        texts[skip] = [beam.text for beam in beams]
        assert texts[skip] == [tokenizer.decode(beam.token_ids, skip) for beam in beams]
    assert texts[True] != texts[False]
    assert any("<" in text for text in texts[False])


def test_the_end_of_sequence_is_in_the_text_of_a_beam_only_if_wanted(toy, rng):
    """Half of the vocabulary is special; the tokens of a beam have the end either way."""
    tokenizer = Tokenizer(byte_backend([f"<{i}>" for i in range(129)], 385), special_tokens={})
    engine = make_engine(toy)
    engine.tokenizer = tokenizer
    prompt, found = rng.integers(0, 258, 5).tolist(), {}
    free = run_all(engine, [("a", prompt, BeamSearchParams(beam_width=4))]).finished["a"]
    engine.eos_token_ids = frozenset(beam.token_ids[2] for beam in free.outputs)
    for wanted, skip in itertools.product((True, False), (True, False)):
        params = BeamSearchParams(
            beam_width=4,
            max_tokens=30,
            include_stop_str_in_output=wanted,
            skip_special_tokens=skip,
        )
        beams = run_all(engine, [("a", prompt, params)]).finished["a"].outputs
        found[wanted, skip] = [beam.token_ids for beam in beams]
        assert any(beam.finish_reason == "stop" for beam in beams)
        for beam in beams:
            is_cut = beam.finish_reason == "stop" and not wanted
            ids = beam.token_ids[:-1] if is_cut else beam.token_ids
            assert beam.text == tokenizer.decode(ids, skip)
    assert len({str(ids) for ids in found.values()}) == 1


@pytest.mark.by_hand
@pytest.mark.exhaustive
def test_beams_of_the_real_model_equal_transformers(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    sizes = {**ROOMY, "block_size": 16, "num_blocks": 24, "max_num_batched_tokens": 64}
    engine = make_engine(load_model(checkpoint, "float32"), **sizes)
    rows = smollm2_rows()
    engine.eos_token_ids = frozenset({row.eos_token_id for row in rows})
    assert len(engine.eos_token_ids) == 1
    requests = [(str(i), row.prompt_token_ids, row.params) for i, row in enumerate(rows)]
    run = run_all(engine, requests)  # type: ignore[arg-type]
    for i, row in enumerate(rows):
        check(row, run.finished[str(i)])
    assert_idle(engine)
