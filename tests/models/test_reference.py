"""Every architecture against logits and greedy tokens that transformers computed in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.models.registry import ARCHITECTURES
from paged_jax.sampling_params import SamplingParams
from tests.models.table import PAGE, table
from tests.models.tiny import (
    LENGTHS,
    NAMES,
    TOLERANCE,
    assert_logits,
    config,
    expected,
    model,
    short_set_first,
)


def test_every_architecture_has_a_reference():
    have = {architecture for name in NAMES for architecture in config(name)["architectures"]}
    assert have == set(ARCHITECTURES)


@pytest.mark.parametrize("name", short_set_first())
def test_paged_logits_equal_the_reference(name):
    """All prompts in one packed step, in blocks of 2 and out of order, in a pool full of NaN."""
    tiny, want = model(name), expected(name)
    blocks = core.create_block_state(40, 2, 5, 20)
    new = jnp.asarray([17, 0, 1, 40, 5], jnp.int32)
    order = [17, 1, 40, 5]  # prompt of each row that takes part, in the order of the rows
    blocks, _ = core.allocate(blocks, new)
    tokens = np.concatenate([want[f"prompt_{length}"] for length in order])
    batch = core.make_batch(
        blocks,
        tokens=np.pad(tokens, (0, 1)),
        row_ids=np.asarray([0, 2, 3, 4, 5]),
        query_lens=np.asarray([*order, 0]),
        num_decode=0,
    )
    kv = core.create_kv_cache(tiny.cache_spec(), 40, 2, jnp.float32)
    kv = dataclasses.replace(kv, kv=jnp.full_like(kv.kv, jnp.nan))
    run = jax.jit(lambda batch, cache: tiny.logits(tiny(batch, cache)[0]))
    logits = np.asarray(run(batch, core.PagedCache(blocks=blocks, kv=kv)))
    starts = np.asarray(batch.query_starts)
    for row, length in enumerate(order):
        assert_logits(logits[starts[row] : starts[row + 1]], name, length)


@pytest.mark.parametrize("name", short_set_first(pytest.mark.exhaustive, pytest.mark.by_hand))
def test_dense_logits_equal_the_reference(name):
    tiny = model(name)
    dense = jax.jit(lambda tokens: tiny(tokens))
    for length in (17, 40):
        prompt = jnp.asarray(expected(name)[f"prompt_{length}"])
        assert_logits(np.asarray(dense(prompt[None])[0]), name, length)


def _cases():
    for number, name in enumerate(NAMES):
        for way, (block_size, budget) in enumerate(((16, 64), (2, 3))):
            is_short = name in ("deepseek_v3", "gpt_oss") and block_size == 2
            # .ci/run takes each name in one of the two ways.
            is_turn = (number + way) % 2 == 0
            marks = [pytest.mark.exhaustive, *([] if is_turn else [pytest.mark.by_hand])]
            marks = () if is_short else marks
            yield pytest.param(name, block_size, budget, marks=marks, id=f"{name}-{block_size}")


@pytest.mark.parametrize(("name", "block_size", "budget"), list(_cases()))
def test_the_engine_gives_the_reference_tokens(name, block_size, budget):
    """Whole prompts in blocks of 16; 3 tokens at a time, one request after another, in blocks of 2.

    The log-probability of the first token ties the engine to the reference's logits.
    """
    want = expected(name)
    sizes = EngineConfig(
        block_size=block_size,
        num_blocks=160 // block_size + 8,
        max_num_seqs=min(4, budget - 1),
        max_model_len=64,
        max_num_batched_tokens=budget,
    )
    engine = Engine(model(name), sizes)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)
    for length in LENGTHS:
        engine.add_request(str(length), want[f"prompt_{length}"].tolist(), params)
    got = {}
    while engine.has_unfinished():
        got |= {out.request_id: out.outputs[0] for out in engine.step()}
    for length in LENGTHS:
        answer, last = got[str(length)], want[f"logits_{length}"][-1].astype(np.float64)
        assert answer.token_ids == want[f"greedy_{length}"].tolist()
        first = answer.token_ids[0]
        logprob = last[first] - np.log(np.sum(np.exp(last - last.max()))) - last.max()
        error = abs(answer.logprobs[0][first].logprob - logprob)
        assert error < TOLERANCE * np.max(np.abs(last))


def test_the_table_of_the_documentation_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert table() in page, "run python -m tests.models.table"
