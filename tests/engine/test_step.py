"""What XLA makes of the step: the pool is updated in place and never copied."""

import collections
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.engine.buckets import Program, choose, programs
from paged_jax.engine.pool import resolve
from paged_jax.sampling_params import SamplingParams
from tests.engine.harness import ROOMY, make_engine, run_all
from tests.engine.workloads import make_asks
from tests.hlo import pool_copies


@pytest.fixture(scope="module")
def compiled(toy):
    """Pools of N and 4N blocks, each with its compiled step of decode and prefill rows."""
    found = []
    for num_blocks in (96, 4 * 96):
        engine = make_engine(toy, num_blocks=num_blocks)
        found.append((engine.runner.kv.kv, engine.runner.lower(Program(64, 8)).compile()))
    return found


def test_the_step_aliases_the_whole_pool(compiled):
    for pool, step in compiled:
        assert step.memory_analysis().alias_size_in_bytes >= pool.nbytes


def test_temporaries_do_not_grow_with_the_pool(compiled):
    small, large = (step.memory_analysis().temp_size_in_bytes for _, step in compiled)
    # Stack and counts of the block state are [N] integers; the pool is 8 times as large a block.
    assert large - small <= 3 * 4 * (4 * 96 - 96)


def test_nothing_copies_the_pool_or_a_layer_of_it(compiled):
    for pool, step in compiled:
        assert pool_copies(step.as_text(), pool.shape) == []


def test_the_search_for_copies_finds_a_planted_one():
    pool = jnp.zeros((2, 97, 4, 4, 8))

    def layer_by_layer(pool, layer):
        return pool.at[layer].set(jnp.cumsum(pool[layer], axis=0)), pool

    text = jax.jit(layer_by_layer, donate_argnums=0).lower(pool, jnp.int32(1)).compile().as_text()
    assert pool_copies(text, pool.shape)


def test_values_compile_nothing_new(toy, rng):
    engine = make_engine(toy)
    prompts = [rng.integers(0, 258, length).tolist() for length in (9, 3, 30, 12, 7, 1)]

    def run(count: int, **params):
        params = SamplingParams(max_tokens=6, **params)
        run_all(engine, [(str(i), prompts[i], params) for i in range(count)])

    run(2, temperature=0.0)
    run(6, temperature=0.0)
    step = engine.runner._step
    size = step._cache_size()
    run(1, temperature=0.5, top_k=5, seed=3)
    run(6, temperature=1.0, top_p=0.5, logprobs=4)
    run(5, temperature=0.0, stop=None, ignore_eos=True)
    assert step._cache_size() == size


def test_warm_up_runs_every_program_and_changes_nothing(toy, alone, rng):
    engine = make_engine(toy, warmup="all", strict_compile=True)
    assert engine.runner.compiled == set(engine.runner.programs)
    assert np.count_nonzero(np.asarray(engine.runner.kv.kv)[:, 1:]) == 0
    prompt, params = rng.integers(0, 258, 5).tolist(), SamplingParams(temperature=0.0)
    assert run_all(engine, [("a", prompt, params)]).tokens("a") == alone(prompt, params)
    engine.runner.compiled.clear()
    with pytest.raises(RuntimeError, match="strict_compile"):
        run_all(engine, [("a", prompt, params)])


@contextmanager
def compiles() -> Iterator[list[str]]:
    """A list that grows by what XLA compiles or reads from the persistent cache."""
    found: list[str] = []

    def listen(event: str, _: float, **fields) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(fields))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_compiles_after_warm_up(toy):
    """Whatever plans hold: shares, evictions, forks, beams, images that come and go."""
    sizes = {"num_blocks": 26, "max_num_seqs": 7, "max_model_len": 56, "preemption_mode": "swap"}
    with compiles() as found:
        options = {**ROOMY, **sizes}
        engine = Engine(toy, EngineConfig(warmup="all", strict_compile=True, **options))
    assert found, "sizes that no other test has"
    seen = collections.Counter()
    issue = engine.runner.issue

    def count(plan, *rest):
        seen.update(name for name, value in vars(plan).items() if value)
        return issue(plan, *rest)

    engine.runner.issue = count
    blocks = jax.device_get(engine.runner.blocks)
    fresh = core.create_block_state(26, 4, 7, 14)
    jax.tree.map(np.testing.assert_array_equal, blocks, jax.device_get(fresh))
    with compiles() as found:
        for seed in range(3):
            run_all(engine, [(ask.name, ask.prompt, ask.params) for ask in make_asks(seed)])
    assert found == []
    parts = ("release_ids", "shares", "forks", "branches", "reindexed", "swapped_in", "retain_ids")
    assert all(seen[name] for name in (*parts, "free_rows")), seen


SIZES = [
    (max_num_seqs, budget)
    for max_num_seqs in (1, 2, 5, 8, 32, 33, 256)
    for budget in (None, 64, 300, 2048)
    if budget is None or budget >= max_num_seqs
]


@pytest.mark.parametrize(("max_num_seqs", "budget"), SIZES)
def test_every_step_has_a_program_and_there_are_few(toy, max_num_seqs, budget):
    options = EngineConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, num_blocks=8, max_model_len=64
    )
    config = resolve(options, toy.cache_spec(), np.float32, None)
    available = programs(config)
    assert len(available) <= 8
    assert min(program.num_rows for program in available) >= 2
    assert all(program.num_rows <= program.num_tokens for program in available)
    for rows in range(1, max_num_seqs + 1):
        for tokens in {rows, rows + 1, 2 * rows, config.max_num_batched_tokens}:
            if rows <= tokens <= config.max_num_batched_tokens:
                is_single = tokens == rows
                chosen = choose(available, tokens, rows, is_single=is_single)
                assert chosen.num_tokens >= tokens
                assert chosen.num_rows >= rows
                # Programs without prefill attention serve rows of one token each only.
                assert is_single or chosen.num_tokens > chosen.num_rows
