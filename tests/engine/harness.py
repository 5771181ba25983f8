"""Runs requests through an engine and watches what each dispatch does to the pool."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np

from paged_jax.config import EngineConfig
from paged_jax.decode import seed_words
from paged_jax.engine import Engine
from paged_jax.outputs import RequestOutput
from paged_jax.sampling_params import SamplingParams
from paged_jax.shapes import ceil_div

BLOCK = 4
# One shape for every run that is not about a pool of its own size: compiled once per session.
ROOMY = {
    "block_size": BLOCK,
    "num_blocks": 96,
    "max_num_seqs": 8,
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
}
# One token of each row per dispatch, read before the next is planned, and nothing kept of others.
PLAIN = {"enable_prefix_caching": False, "overlap": False, "decode_steps": 1}


def make_engine(model, **options) -> Engine:
    """An engine that audits its blocks and compares them with the ledger after every dispatch."""
    return Engine(model, EngineConfig(debug=True, **{**ROOMY, **options}))


def step(engine: Engine) -> list[RequestOutput]:
    """One step; what the engine would survive, such as a failed audit, is raised."""
    outputs = engine.step()
    if engine.error is not None:
        raise engine.error
    return outputs


@dataclass
class Run:
    """What happened to a set of requests."""

    finished: dict[str, RequestOutput] = field(default_factory=dict)
    num_steps: int = 0

    def tokens(self, name: str) -> list[int]:
        return self.finished[name].outputs[0].token_ids

    def reason(self, name: str) -> str | None:
        return self.finished[name].outputs[0].finish_reason

    def choices(self, name: str) -> list[list[int]]:
        return [output.token_ids for output in self.finished[name].outputs]


def run_all(
    engine: Engine,
    requests: Sequence[tuple[str, Sequence[int], SamplingParams]],
    *,
    arrivals: Sequence[int] | None = None,
    after_step: Callable[[Engine], None] | None = None,
    max_steps: int = 2000,
) -> Run:
    """Runs until every request has ended; request i arrives before step `arrivals[i]`."""
    due = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), strict=True))
    run = Run()
    while due or engine.has_unfinished():
        assert run.num_steps < max_steps, "the engine makes no progress"
        while due and due[0][0] <= run.num_steps:
            engine.add_request(*requests[due.pop(0)[1]])
        outputs = step(engine)
        run.num_steps += 1
        for output in outputs:
            if output.finished:
                assert output.request_id not in run.finished, "a request ended twice"
                run.finished[output.request_id] = output
        if after_step is not None:
            after_step(engine)
    return run


def assert_idle(engine: Engine) -> None:
    """No request is left, and every block is free, or cached and then given back."""
    stats = engine.stats()
    assert stats["num_free"] + stats["num_cached"] == stats["num_blocks"]
    assert stats["num_running"] == stats["num_waiting"] == stats["num_swapped"] == 0
    assert engine.state.num_swapped_blocks == len(engine.dispatcher.images) == 0
    assert not engine.has_unfinished()
    engine.reset_prefix_cache()
    assert engine.stats()["num_free"] == stats["num_blocks"]
    assert int(engine.runner.blocks.num_free) == stats["num_blocks"]
    assert engine.error is None


def assert_tables_tight(engine: Engine) -> None:
    """Each running sequence holds exactly the blocks that its tokens with KV need."""
    for sequence in engine.state.running:
        held = engine.state.ledger.tables[sequence.row]
        assert len(held) == ceil_div(sequence.num_computed, engine.config.block_size)


class PoolWatch:
    """Checks that a dispatch changes nothing but the slots its plan writes, and the null block."""

    def __init__(self, engine: Engine) -> None:
        assert engine.state.cache is None, "copies and images are not watched"
        self._engine = engine
        self._issue = engine.runner.issue
        engine.runner.issue = self  # type: ignore[method-assign]
        self.num_checked = 0
        self.blocks_used: set[int] = set()

    def __call__(self, plan, sequences, images):
        before = np.array(self._engine.runner.kv.kv)
        result = self._issue(plan, sequences, images)
        after = np.array(self._engine.runner.kv.kv)
        size = self._engine.config.block_size
        tables = np.asarray(self._engine.runner.blocks.block_tables)
        self.blocks_used |= set(tables[tables > 0].tolist())
        for i, segment in enumerate(plan.segments):
            # A row that has ended writes nothing, though blocks for it are there.
            count = int(result.num_run[i]) if segment.is_decode else segment.num_tokens
            for position in range(segment.start, segment.start + count):
                block, offset = tables[segment.row, position // size], position % size
                assert block > 0, "a live token has no block"
                assert not np.array_equal(before[:, block, :, offset], after[:, block, :, offset])
                before[:, block, :, offset] = after[:, block, :, offset]
        np.testing.assert_array_equal(before[:, 1:], after[:, 1:])
        self.num_checked += 1
        return result


class Alone:
    """The same request run by itself in a roomy pool, a token at a time; results are kept."""

    def __init__(self, model) -> None:
        self._engine = make_engine(model, **PLAIN)
        self._known: dict[tuple, list[int]] = {}

    def __call__(
        self, prompt: Sequence[int], params: SamplingParams, *, choice: int = 0
    ) -> list[int]:
        """Tokens of one choice, which runs without the others."""
        single = dataclasses.replace(params, n=1)
        key = (tuple(prompt), repr(single), choice)
        if key not in self._known:

            def words(seed: int, index: int) -> tuple[int, int, int]:
                return seed_words(seed, index + choice)

            with mock.patch("paged_jax.engine.runner.seed_words", words):
                run = run_all(self._engine, [("alone", prompt, single)])
            self._known[key] = run.tokens("alone")
        return self._known[key]
