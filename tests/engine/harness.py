"""Runs requests through an engine and watches what each dispatch does to the pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paged_jax.config import EngineConfig
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


def make_engine(model, **options) -> Engine:
    """An engine that audits its blocks and compares them with the ledger after every dispatch."""
    return Engine(model, EngineConfig(debug=True, **{**ROOMY, **options}))


@dataclass
class Run:
    """What happened to a set of requests."""

    finished: dict[str, RequestOutput] = field(default_factory=dict)
    num_steps: int = 0

    def tokens(self, name: str) -> list[int]:
        return self.finished[name].outputs[0].token_ids

    def reason(self, name: str) -> str | None:
        return self.finished[name].outputs[0].finish_reason


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
        outputs = engine.step()
        run.num_steps += 1
        for output in outputs:
            if output.finished:
                assert output.request_id not in run.finished, "a request ended twice"
                run.finished[output.request_id] = output
        if after_step is not None:
            after_step(engine)
    return run


def assert_idle(engine: Engine) -> None:
    """Every block is free and no request is left."""
    stats = engine.stats()
    assert stats["num_free"] == stats["num_blocks"]
    assert int(engine.runner.blocks.num_free) == stats["num_blocks"]
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert not engine.has_unfinished()


def assert_tables_tight(engine: Engine) -> None:
    """Each running request holds exactly the blocks that its tokens with KV need."""
    for request in engine.state.running:
        held = engine.state.ledger.tables[request.row]
        assert len(held) == ceil_div(request.num_computed, engine.config.block_size)


class PoolWatch:
    """Checks that a dispatch changes nothing but the slots its plan writes, and the null block."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._run = engine.runner.run
        engine.runner.run = self  # type: ignore[method-assign]
        self.num_checked = 0
        self.blocks_used: set[int] = set()

    def __call__(self, plan, requests):
        before = np.array(self._engine.runner.kv.kv)
        result = self._run(plan, requests)
        after = np.array(self._engine.runner.kv.kv)
        size = self._engine.config.block_size
        tables = np.asarray(self._engine.runner.blocks.block_tables)
        self.blocks_used |= set(tables[tables > 0].tolist())
        for segment in plan.segments:
            for position in range(segment.start, segment.start + segment.num_tokens):
                block, offset = tables[segment.row, position // size], position % size
                assert block > 0, "a live token has no block"
                assert not np.array_equal(before[:, block, :, offset], after[:, block, :, offset])
                before[:, block, :, offset] = after[:, block, :, offset]
        np.testing.assert_array_equal(before[:, 1:], after[:, 1:])
        self.num_checked += 1
        return result


class Alone:
    """The same request run by itself in a roomy pool; results are kept."""

    def __init__(self, model) -> None:
        self._engine = make_engine(model)
        self._known: dict[tuple, list[int]] = {}

    def __call__(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        key = (tuple(prompt), repr(params))
        if key not in self._known:
            run = run_all(self._engine, [("alone", prompt, params)])
            self._known[key] = run.tokens("alone")
        return self._known[key]
