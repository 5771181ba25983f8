"""A restored engine gives the tokens, text and log-probabilities that the saved one would."""

import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from paged_jax import core
from paged_jax.beam_search_params import BeamSearchParams
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.sampling_params import SamplingParams
from tests.byte_tokenizer import byte_backend
from tests.conftest import make_toy
from tests.engine.harness import step

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "block_size": 4,
    "num_blocks": 40,
    "max_num_seqs": 8,
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
    "decode_steps": 2,
    "scheduling_policy": "priority",
    "preemption_mode": "swap",
    "debug": True,
}
CUTS = (3, 7, 16)
"""Steps after which a run is saved: prompts under way, choices under way, somebody swapped out."""


def make_engine(model, **options) -> Engine:
    backend = byte_backend(["<s>", "</s>"], 258)
    tokenizer = Tokenizer(backend, special_tokens={}, eos_token_ids=(1,), chat_template=None)
    config = EngineConfig(**{**OPTIONS, **options})
    return Engine(model, config, tokenizer=tokenizer, eos_token_ids=range(1, 258, 40))


def workload() -> list[tuple]:
    """(id, prompt, params, priority): every kind of request, more than there is room for."""
    rng = np.random.default_rng(3)

    def prompt(length: int) -> list[int]:
        return rng.integers(2, 258, length).tolist()

    shared = prompt(13)
    long = {"max_tokens": 24, "ignore_eos": True}
    penalised = {**long, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "prompt_logprobs": 1}
    biased = {"logit_bias": {41: 60.0, 7: 2.0}, "min_tokens": 9, "bad_words": ["a", "bc"]}
    return [
        ("greedy", shared, SamplingParams(temperature=0.0, logprobs=3, **long), 1),
        ("choices", prompt(9), SamplingParams(n=3, seed=5, top_p=0.9, max_tokens=20), 1),
        ("beams", prompt(10), BeamSearchParams(beam_width=3, max_tokens=12), 0),
        ("shares", shared[:10] + prompt(6), SamplingParams(temperature=0.0, **long), 2),
        ("seeds", prompt(30), SamplingParams(top_k=20, logprobs=0, **long), 2),
        ("stops", prompt(5), SamplingParams(seed=1, stop=["e", "qz"], max_tokens=30), 2),
        ("salted", {"prompt_token_ids": shared, "cache_salt": "a"}, SamplingParams(seed=2), 3),
        ("penalised", prompt(6), SamplingParams(temperature=0.0, **penalised), 0),
        ("biased", prompt(4), SamplingParams(seed=3, **biased), 0),
        ("last", shared, SamplingParams(seed=-7, n=2, max_tokens=12), 4),
        ("waits", prompt(20), SamplingParams(seed=4, max_tokens=20), 5),
    ]


def start(engine: Engine) -> None:
    for name, prompt, params, priority in workload():
        engine.add_request(name, prompt, params, priority=priority, timeout=1000)


def finish(engine: Engine) -> dict[str, list]:
    """Choices of every request that ends from now on."""
    ended = {}
    while engine.has_unfinished():
        ended |= {out.request_id: out.outputs for out in step(engine) if out.finished}
    return ended


def plain(outputs: dict[str, list]) -> dict[str, list]:
    """Outputs as they come through JSON."""
    return {
        name: [[part.token_ids, part.text, part.finish_reason] for part in parts]
        for name, parts in outputs.items()
    }


def run_to(engine: Engine, cut: int) -> dict[str, list]:
    start(engine)
    ended = {}
    for _ in range(cut):
        ended |= {out.request_id: out.outputs for out in step(engine) if out.finished}
    return ended


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """`child`, which compiles its programs while the tests compile theirs."""
    code = "import sys; from tests.engine.test_snapshot import child; child(*sys.argv[1:])"
    path = tmp_path_factory.mktemp("killed") / "snapshot"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def whole(toy, process):
    """The same requests without interruption."""
    engine = make_engine(toy)
    start(engine)
    return finish(engine)


@pytest.mark.parametrize("cut", CUTS)
def test_a_restored_engine_gives_the_same_outputs(toy, whole, tmp_path, cut):
    engine = make_engine(toy)
    before = run_to(engine, cut)
    engine.snapshot(tmp_path / "a")
    other = make_engine(toy)
    other.restore(tmp_path / "a")
    stats, same = engine.stats(), other.stats()
    assert {name: stats[name] for name in stats if name != "compiles"} == {
        name: same[name] for name in same if name != "compiles"
    }
    if cut == CUTS[-1]:
        assert stats["num_swapped"]
        assert stats["num_running"]
        assert stats["num_waiting"]
    num_computed = sum(s.num_computed for s in engine.state.running)
    assert sum(s.num_computed for s in other.state.running) == num_computed
    used = np.flatnonzero(engine.state.ledger.refcounts)
    np.testing.assert_array_equal(
        np.asarray(other.runner.kv.kv)[:, used], np.asarray(engine.runner.kv.kv)[:, used]
    )
    core.audit(other.runner.blocks, other.dispatcher._checker.shadow.external)
    for each in (engine, other):
        assert before | finish(each) == whole
        assert each.stats()["num_used"] == 0


def test_a_killed_engine_goes_on_in_another_process(toy, whole, process):
    path = process.args[-1]
    before = json.loads(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    engine = make_engine(toy)
    engine.restore(path)
    assert engine.stats()["num_running"] > 1
    assert before | plain(finish(engine)) == plain(whole)


def child(path: str) -> None:
    """Saves a run half way, tells what has ended, and goes on until it is killed."""
    engine = make_engine(make_toy(), debug=False)  # the reader checks what it adopts all the same
    before = run_to(engine, CUTS[1])
    engine.snapshot(path)
    print(json.dumps(plain(before)), flush=True)
    while True:
        time.sleep(60 if not engine.has_unfinished() else 0)
        engine.step()


@pytest.fixture(scope="module")
def saved(toy, tmp_path_factory):
    """A snapshot with one request, and the engine that wrote it."""
    engine = make_engine(toy)
    engine.add_request("a", [5, 6, 7, 8, 9], SamplingParams(seed=3, max_tokens=4, ignore_eos=True))
    engine.step()
    engine.step()  # the last tokens are unread
    path = tmp_path_factory.mktemp("saved") / "new" / "snapshot"
    engine.snapshot(path)
    return path, engine


def test_outputs_between_steps_are_in_the_snapshot(toy, saved):
    path, _ = saved
    engine = make_engine(toy)
    engine.restore(path)
    [end] = finish(engine).values()
    assert len(end[0].token_ids) == 4


def test_fields_may_be_of_any_kind_of_number_sequence_and_mapping(toy, tmp_path):
    params = SamplingParams(
        temperature=np.float32(0.5),
        seed=np.int64(3),
        max_tokens=np.int32(9),
        logit_bias=MappingProxyType({np.int64(41): np.float32(3.0), 50: Fraction(1, 2)}),
        stop_token_ids=(np.int32(7),),
        allowed_token_ids=range(2, 250),
    )
    engine = make_engine(toy)
    engine.add_request("a", np.arange(5, 12), params)
    engine.step()
    engine.snapshot(tmp_path / "a")
    other = make_engine(toy)
    other.restore(tmp_path / "a")
    assert plain(finish(other)) == plain(finish(engine))


def test_later_requests_get_the_same_seeds_hits_and_time(toy, tmp_path):
    engine = make_engine(toy)
    prompt = list(range(20, 33))
    engine.add_request("a", prompt, SamplingParams(max_tokens=20), timeout=500)
    for _ in range(2):
        engine.step()
    engine.snapshot(tmp_path / "a")
    other = make_engine(toy)
    other.restore(tmp_path / "a")
    left = [e._requests["a"].deadline - time.monotonic() for e in (engine, other)]
    assert abs(left[0] - left[1]) < 60
    assert 0 < left[1] < 500
    found = []
    for each in (engine, other):
        each.add_request("b", prompt, SamplingParams(max_tokens=6, ignore_eos=True))
        request = each._requests["b"]
        found.append((finish(each), request.num_cached_tokens, request.seed, request.order))
    assert found[0] == found[1]
    assert found[0][1] == 12


def test_what_differs_is_named_and_nothing_changes(toy, saved):
    path, writer = saved
    with pytest.raises(ValueError, match=r"num_blocks of this engine \(41\) must be .* \(40\)"):
        make_engine(toy, num_blocks=41).restore(path)
    engine = make_engine(toy)
    engine.runner.leaf_specs = {
        name: spec for name, spec in engine.runner.leaf_specs.items() if name != "head.weight"
    }
    with pytest.raises(ValueError, match=r"head\.weight of this engine \(None\) must be .*float32"):
        engine.restore(path)
    with pytest.raises(ValueError, match=r"must be a directory that Engine\.snapshot wrote"):
        engine.restore(path / "cache")
    with pytest.raises(ValueError, match="must not exist yet"):
        writer.snapshot(path)
    engine.add_request("b", [3, 4], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.runner.leaf_specs = writer.runner.leaf_specs
    with pytest.raises(RuntimeError, match="unfinished requests"):
        engine.restore(path)
    assert finish(engine).keys() == {"b"}


def test_a_snapshot_that_fails_leaves_nothing(toy, tmp_path, monkeypatch):
    engine = make_engine(toy)
    engine.add_request("a", [3, 4, 5], SamplingParams(max_tokens=2, ignore_eos=True))

    def fail(path, cache):
        path.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(core, "save_cache", fail)
    with pytest.raises(OSError, match="disk full"):
        engine.snapshot(tmp_path / "a")
    assert not list(tmp_path.iterdir())
    assert finish(engine).keys() == {"a"}


def test_a_restore_that_fails_leaves_an_empty_engine(toy, saved, monkeypatch):
    engine = make_engine(toy)

    def fail(path):
        raise OSError("disk gone")

    with monkeypatch.context() as patch:
        patch.setattr(core, "restore_cache", fail)
        with pytest.raises(OSError, match="disk gone"):
            engine.restore(saved[0])
    engine.add_request("a", [3, 4, 5], SamplingParams(max_tokens=2, ignore_eos=True))
    assert finish(engine).keys() == {"a"}
