"""Plays plans made by hand through an engine, in place of its scheduler."""

import numpy as np
import pytest

from paged_jax import core
from paged_jax.engine import Engine
from paged_jax.engine.scheduler import schedule
from paged_jax.plan import Plan, Segment
from paged_jax.sampling_params import SamplingParams
from tests.core.transitions import assert_same, state_of
from tests.engine.harness import step

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Player:
    """An engine that runs the plans it is given.

    Its requests wait for ever, since only its scheduler would give them rows. `tokens` holds what
    each has sampled, the first choice of several.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.ledger = engine.state.ledger
        self.tokens: dict[str, list[int]] = {}
        self.choices: dict[str, list[list[int]]] = {}
        """Of all choices of a request."""
        self._writers: dict[int, str] = {}
        self._next = Plan()

        def play_next(state, now, config):
            return self._next if state is engine.state else schedule(state, now, config)

        monkeypatch.setattr("paged_jax.engine.loop.schedule", play_next)

    def add(self, name: str, prompt, params: SamplingParams = GREEDY) -> None:
        self.engine.add_request(name, [int(token) for token in prompt], params)
        self.tokens[name] = []
        for sequence in self.engine._requests[name].sequences:
            suffix = f".{sequence.index}" if params.n > 1 else ""
            self._writers[sequence.owner] = name + suffix

    def play(self, *segments: Segment, **moves) -> None:
        """Runs one plan; the block state must then be the ledger's in every field."""
        self._next = Plan(segments=segments, **moves)
        for output in step(self.engine):
            self.tokens[output.request_id] = output.outputs[0].token_ids
            self.choices[output.request_id] = [choice.token_ids for choice in output.outputs]
        assert_same(self.engine.runner.blocks, state_of(self.ledger))

    @property
    def tables(self) -> dict[int, list[int]]:
        """Of the rows that hold tokens."""
        return {row: table for row, table in enumerate(self.ledger.tables) if table}

    def read_by(self, row: int) -> str:
        """Who wrote what a row reads: "a 0-5, b 6" is six tokens of a and then one of b."""
        positions = np.arange(64, dtype=np.int32)
        written = {
            int(tag): (name, position)
            for owner, name in self._writers.items()
            for position, tag in enumerate(core.expected_tags(owner, positions))
        }
        tags = np.asarray(self.engine.runner.kv.tags)
        size = self.engine.config.block_size
        blocks = np.asarray(self.engine.runner.blocks.block_tables)[row]
        found = []
        for place in range(int(self.engine.runner.blocks.lengths[row])):
            name, position = written[int(tags[blocks[place // size], place % size])]
            assert position == place, "a token stands at another position than it was written for"
            if not found or found[-1][0] != name:
                found.append([name, place])
            found[-1][2:] = [place]
        return ", ".join(
            f"{name} {first}" if first == last else f"{name} {first}-{last}"
            for name, first, last in found
        )


def prefill(name: str, row: int, start: int, count: int, *, is_sampled: bool = True) -> Segment:
    """Tokens that the host knows; the first of a request sets the sampling fields of its row."""
    return Segment(
        request_id=name,
        row=row,
        start=start,
        num_tokens=count,
        is_decode=False,
        is_sampled=is_sampled,
        is_admission=True,
    )


def decode(name: str, row: int, start: int, count: int = 1, *, index: int = 0) -> Segment:
    """The token that the device sampled last for the row, and those that it samples then."""
    return Segment(
        request_id=name,
        index=index,
        row=row,
        start=start,
        num_tokens=count,
        is_decode=True,
        is_sampled=True,
        is_admission=False,
    )


def choice(name: str, index: int, row: int, start: int, source: int) -> Segment:
    """The first token of another choice, sampled where the prompt in row `source` ends."""
    return Segment(
        request_id=name,
        index=index,
        row=row,
        start=start,
        num_tokens=0,
        is_decode=False,
        is_sampled=True,
        is_admission=True,
        source=source,
    )
