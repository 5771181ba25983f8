"""Random workloads, engines of few sizes that run them, and what each request answers alone."""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import ops
from paged_jax.beam_search_params import BeamSearchParams
from paged_jax.config import EngineConfig
from paged_jax.decode import seed_words
from paged_jax.engine import Engine
from paged_jax.engine.request import Sequence
from paged_jax.engine.scheduler import _group, _Round
from paged_jax.outputs import RequestOutput
from paged_jax.sampling_params import SamplingParams

NUM_BLOCKS = {1: 80, 2: 40, 4: 48, 16: 6}
"""One pool per block size, so that few programs are compiled: tiny but for blocks of 4, in which
each request alone has room for all its choices."""

SIZES = {
    "block_size": 4,
    "num_blocks": NUM_BLOCKS[4],
    "max_num_seqs": 8,
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "decode_steps": 8,
}

EOS_IDS = tuple(range(3, 258, 29))
"""More than a row has room for on the device, so that some end there and some on the host."""

TOLERANCE = 1e-4
"""Two logits so near may change places when the same KV is computed in another way."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request, when it comes, and when it is aborted."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    arrival: int = 0
    priority: int = 0
    aborted: int | None = None
    """Step after which it is aborted, if it has not ended."""

    @property
    def num_choices(self) -> int:
        """Sequences that it runs."""
        return self.params.n if isinstance(self.params, SamplingParams) else self.params.beam_width


def make_asks(
    seed: int, *, count: int = 14, is_short: bool = False, spread: int = 8, aborts: bool = False
) -> list[Ask]:
    """Draws requests: some share a prefix or all of a prompt, some have choices, some end early.

    Args:
      is_short: For chunks so small that a prompt takes many dispatches.
      spread: Steps over which they arrive.
      aborts: Whether some are aborted.
    """
    draw = random.Random(seed)
    longest, most = (12, 6) if is_short else (40, 20)
    bases = [[draw.randrange(258) for _ in range(longest)] for _ in range(2)]
    prompts: list[tuple[int, ...]] = []
    asks = []
    for i in range(count):
        shared = draw.choice(bases)[: draw.choice((0, 0, longest // 3, longest // 2, longest - 1))]
        own = [draw.randrange(258) for _ in range(draw.randint(1, longest - len(shared)))]
        prompt = tuple(shared + own)
        if prompts and draw.random() < 0.2:
            prompt = draw.choice(prompts)
        prompts.append(prompt)
        is_greedy = draw.random() < 0.5
        params = SamplingParams(
            n=draw.choice((1, 1, 1, 2, 3)),
            temperature=0.0 if is_greedy else draw.choice((0.7, 1.0)),
            top_k=draw.choice((0, 0, 20)),
            top_p=draw.choice((1.0, 1.0, 0.9)),
            seed=draw.randrange(2**40),
            max_tokens=draw.randint(1, most),
            ignore_eos=draw.random() < 0.5,
        )
        if not is_short and draw.random() < 0.1:
            # So small that the smallest pool holds both beams to their end.
            prompt = prompt[:31]
            params = BeamSearchParams(beam_width=2, max_tokens=draw.randint(1, 8))
        else:
            params = dataclasses.replace(params, **draw_options(random.Random(f"{seed} {i}"), most))
        asks.append(Ask(name=f"r{i}", prompt=prompt, params=params))
    # Drawn last: the same requests whatever comes when.
    for i, ask in enumerate(asks):
        arrival, priority = draw.randint(0, spread), draw.randint(-2, 2)
        end = arrival + draw.randint(0, 20) if draw.random() < 0.25 and aborts else None
        asks[i] = dataclasses.replace(ask, arrival=arrival, priority=priority, aborted=end)
    return asks


def draw_options(draw: random.Random, max_tokens: int) -> dict:
    """Fields that act on logits, for a third of the requests."""
    if draw.random() < 2 / 3:
        return {}
    every = {
        "min_p": draw.choice((0.02, 0.1)),
        "presence_penalty": draw.choice((-0.5, 0.8)),
        "frequency_penalty": draw.choice((-0.3, 0.6)),
        "repetition_penalty": draw.choice((0.8, 1.3)),
        "logit_bias": {draw.randrange(258): draw.uniform(-5, 5) for _ in range(6)},
        "allowed_token_ids": draw.sample(range(258), 60),
        "stop_token_ids": draw.sample(range(258), 12),
        "prompt_logprobs": draw.choice((0, 2)),
    }
    return {name: every[name] for name in draw.sample(list(every), draw.randint(1, 3))}


def make_engine(model, **options) -> Engine:
    """An engine of the shared sizes that checks its blocks after every dispatch."""
    config = EngineConfig(debug=True, **{**SIZES, **options})
    return Engine(model, config, eos_token_ids=EOS_IDS)


def limit(engine: Engine, *, chunk: int, decode_steps: int) -> None:
    """Lets an engine plan as one of fewer rows, tokens and steps would, with its own programs."""
    rows = min(chunk, engine.config.max_num_seqs)
    engine.config = dataclasses.replace(
        engine.config, max_num_batched_tokens=chunk, decode_steps=decode_steps
    )
    engine.state.free_rows = list(range(rows))


@contextmanager
def preempted(when: Callable[[Sequence], bool]) -> Iterator[None]:
    """Preempts sequences in the next plan whenever a token was read, if `when(sequence)`.

    It happens where a plan would let them continue, in the way of one that cannot grow. A row that
    others are forked from in the same plan is left until the next: it never is the last in rank.
    """
    plain = _Round.continue_running

    def continue_running(self, sequence) -> None:
        has_read = sequence.num_known > sequence.num_prefill
        is_parent = any(fork.parent == sequence.row for fork in self.state.forks)
        if has_read and not is_parent and when(sequence):
            self._preempt(_group(sequence))
        else:
            plain(self, sequence)

    _Round.continue_running = continue_running  # type: ignore[method-assign]
    try:
        yield
    finally:
        _Round.continue_running = plain  # type: ignore[method-assign]


@dataclass
class Run:
    """What became of a workload."""

    ends: dict[str, RequestOutput] = field(default_factory=dict)
    prefills: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Segments with prefill of each sequence."""
    num_steps: int = 0

    def see(
        self, outputs: Listed[RequestOutput], seen: dict[tuple[str, int], tuple[list[int], str]]
    ) -> None:
        """Takes outputs: what is said only ever grows, and a request ends once."""
        for output in outputs:
            name = output.request_id
            assert name not in self.ends, f"{name} goes on after its end"
            for choice in output.outputs:
                if choice.cumulative_logprob is not None:
                    continue  # beams change places
                before, text = seen.get((name, choice.index), ([], ""))
                assert choice.token_ids[: len(before)] == before, f"{name} took a token back"
                assert choice.text.startswith(text), f"{name} took text back"
                seen[name, choice.index] = list(choice.token_ids), choice.text
            if output.finished:
                self.ends[name] = output

    def is_recomputed(self, ask: Ask) -> bool:
        """Whether KV of a request was computed in other pieces than alone."""
        output = self.ends[ask.name]
        pieces = max(self.prefills[ask.name, i] for i in range(ask.num_choices))
        return bool(output.metrics.num_preemptions or output.num_cached_tokens or pieces > 1)


def run_asks(
    engine: Engine,
    asks: Listed[Ask],
    *,
    after_step: Callable[[Engine], None] | None = None,
    is_faulty: bool = False,
    max_steps: int = 6000,
) -> Run:
    """Runs a workload to its end.

    Args:
      is_faulty: Whether dispatches may fail.
    """
    run, seen = Run(), {}
    issue = engine.dispatcher.issue

    def watched(plan, state, requests):
        for segment in plan.segments:
            if not segment.is_decode and segment.source is None:
                run.prefills[segment.request_id, segment.index] += 1
        return issue(plan, state, requests)

    engine.dispatcher.issue = watched  # type: ignore[method-assign]
    due = sorted(asks, key=lambda ask: ask.arrival)
    try:
        while due or engine.has_unfinished():
            assert run.num_steps < max_steps, "the engine makes no progress"
            while due and due[0].arrival <= run.num_steps:
                ask = due.pop(0)
                engine.add_request(ask.name, ask.prompt, ask.params, priority=ask.priority)
            run.see(engine.step(), seen)
            assert is_faulty or engine.error is None, engine.error
            run.num_steps += 1
            for ask in asks:
                if ask.aborted is not None and ask.aborted < run.num_steps:
                    output = engine.abort(ask.name)
                    run.see([output] if output is not None else [], seen)
            if after_step is not None:
                after_step(engine)
    finally:
        engine.dispatcher.issue = issue  # type: ignore[method-assign]
    assert run.ends.keys() == {ask.name for ask in asks}, "a request was lost"
    return run


def assert_empty(engine: Engine) -> None:
    """No request, image or block is left but what the prefix cache holds."""
    stats = engine.stats()
    assert not engine.has_unfinished()
    assert stats["num_running"] == stats["num_waiting"] == stats["num_swapped"] == 0
    assert stats["num_free"] + stats["num_cached"] == stats["num_blocks"], stats
    assert int(engine.runner.blocks.num_free) == stats["num_free"]
    state = engine.state
    assert [*state.running, *state.released, *state.forks, *state.reindexed] == []
    assert not engine.dispatcher.images
    assert state.num_swapped_blocks == 0
    assert len(state.free_rows) == len(set(state.free_rows))
    assert all(request.is_finished for *_, request in state.deadlines)


class Alone:
    """Each request by itself: one token a dispatch, nothing cached, preempted or ahead of time."""

    def __init__(self, model, **options) -> None:
        self._model = model
        self._engine = make_engine(model, **options, enable_prefix_caching=False, overlap=False)
        limit(self._engine, chunk=64, decode_steps=1)
        self._known: dict[tuple, list[tuple[list[int], str | None]]] = {}

    def __call__(self, ask: Ask) -> list[tuple[list[int], str | None]]:
        """Tokens and the reason of the end of each choice."""
        key = (ask.prompt, repr(ask.params))
        if key not in self._known:
            run = run_asks(self._engine, [Ask(name="a", prompt=ask.prompt, params=ask.params)])
            assert not run.is_recomputed(Ask(name="a", prompt=ask.prompt, params=ask.params))
            outputs = run.ends["a"].outputs
            self._known[key] = [(list(x.token_ids), x.finish_reason) for x in outputs]
        return self._known[key]

    def is_near(self, ask: Ask, index: int, tokens: Listed[int]) -> bool:
        """Whether the first token that differs is one that logits within `TOLERANCE` could give."""
        own, params = self(ask)[index][0], ask.params
        pairs = zip(own, tokens, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None or isinstance(params, BeamSearchParams):
            return False
        known = [*ask.prompt, *own[:place]]
        logits = np.asarray(self._model(np.asarray([known]))[0, -1], np.float32)
        noise = np.random.default_rng(0).uniform(-1, 1, (256, len(logits)))
        # The first two move only the two tokens, as far as they may.
        noise[:2] = 0
        noise[:2, tokens[place]], noise[:2, own[place]] = [1, -1], [-1, 1]
        moved = (logits + TOLERANCE / 2 * noise).astype(np.float32)
        rows = len(moved)
        drawn = ops.sample(
            jnp.asarray(moved),
            temperature=jnp.full(rows, params.temperature, jnp.float32),
            top_k=jnp.full(rows, params.top_k, jnp.int32),
            top_p=jnp.full(rows, params.top_p, jnp.float32),
            seeds=jnp.asarray([seed_words(params.seed or 0, index)] * rows, jnp.uint32),
            positions=jnp.full(rows, len(known), jnp.int32),
        )
        return tokens[place] in jax.device_get(drawn)


def differences(
    asks: Listed[Ask], run: Run, alone: Alone
) -> list[tuple[Ask, int, list[int], list[int]]]:
    """Choices (request, index, alone, here) whose tokens or end are not those of the request alone.

    What was aborted has a first part of the tokens.
    """
    found = []
    for ask in asks:
        output = run.ends[ask.name]
        assert len(output.outputs) == len(alone(ask)) or output.outputs[0].finish_reason == "abort"
        for choice, (tokens, reason) in zip(output.outputs, alone(ask), strict=False):
            got = list(choice.token_ids)
            if choice.finish_reason == "abort":
                assert ask.aborted is not None
                is_beam = isinstance(ask.params, BeamSearchParams)
                is_equal = is_beam or got == tokens[: len(got)]
            else:
                is_equal = (got, choice.finish_reason) == (tokens, reason)
            if not is_equal:
                found.append((ask, choice.index, tokens, got))
    return found
