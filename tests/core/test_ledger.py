"""Random histories: core, the ledger, a naive model and a shadow of the pool agree at every step.

A history is a series of plans. Core runs each as one compiled step, the ledger through
`Ledger.apply`, and the naive model part by part while the plan is drawn; all must reach the same
block ids. A shadow pool of tags stands for the KV. Tags are written through `slot_mapping` and
copied by `copy_src` and `copy_dst` only, so a row or a retained block that reads a wrong tag shows
an aliased, lost or uncopied block.
"""

import dataclasses
import functools
import itertools
import random
from collections import Counter
from typing import ClassVar

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from paged_jax import core
from paged_jax.core import BlockState
from paged_jax.ledger import Ledger, LedgerAllocation
from paged_jax.plan import Plan
from tests.core.histories import FORKS, IDS, MOST_TOKENS, PARTS, SHARES, History, plan_of
from tests.core.transitions import padded, state_of

# (N, P, S, M) and the most new blocks of a call: each is compiled once. Small pools run out, the
# large one only when much is retained.
SHAPES = [
    ((3, 16, 3, 2), None),
    ((9, 1, 4, 6), 4),
    ((14, 2, 4, 6), None),
    ((64, 4, 5, 16), 6),
]

# The parts of a step. Hypothesis draws them, so that a failing history is cut down to few steps;
# what each step does is drawn evenly from a seed.
KINDS = [
    ("allocate",),
    ("free", "allocate"),
    ("free", "fork", "allocate"),
    ("reindex", "allocate"),
    ("free", "share", "allocate"),
    ("retain", "allocate"),
    ("release", "allocate"),
    ("truncate", "allocate"),
    PARTS,
]
RANDOM = st.randoms(use_true_random=True)


@functools.cache
def compiled_step(most: int | None):
    """One program for every plan: parts with nothing to do must change nothing."""

    @jax.jit
    def step(state: BlockState, moves, new_tokens, tokens):
        state = core.free(state, moves["free"])
        state = core.release(state, moves["release"])
        state = core.retain(state, moves["retain"])
        state = core.share(state, *moves["share"])
        state = core.fork(state, *moves["fork"])
        state = core.reindex(state, *moves["reindex"])
        state = core.truncate(state, moves["truncate"])
        after, allocation = core.allocate(state, new_tokens, max_new_blocks=most)
        return state, after, allocation, core.slot_mapping(after, *tokens)

    return step


def moves_of(drawn: dict, max_seqs: int, width: int) -> dict:
    """A drawn plan as padded arrays, all of its parts but the tokens."""
    shares = [*drawn.get("share", ())]
    # Tokens below 0 and ids out of range are legal in padding, and so are ids past the tokens.
    shares += [(max_seqs, (), -1)] * (SHARES - len(shares))
    rows, ids, num_tokens = zip(*shares, strict=True)
    lengths = np.full(max_seqs, 2**30, np.int32)
    for row, length in drawn.get("truncate", ()):
        lengths[row] = length
    return {
        "free": np.isin(np.arange(max_seqs), drawn.get("free", ())),
        "release": padded(drawn.get("release", ()), IDS, 0),
        "retain": padded(drawn.get("retain", ()), IDS, 0),
        "share": (
            np.array(rows, np.int32),
            np.array([padded(blocks, width, -7) for blocks in ids]),
            np.array(num_tokens, np.int32),
        ),
        "fork": columns(drawn.get("fork", ()), FORKS, max_seqs),
        "reindex": columns(drawn.get("reindex", ()), max_seqs, max_seqs),
        "truncate": lengths,
    }


def columns(pairs, size: int, fill: int) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.array([*pairs, *[(fill, fill)] * (size - len(pairs))], np.int32).T
    return first, second


def as_lists(state: BlockState) -> dict:
    fields = (field.name for field in dataclasses.fields(BlockState))
    return {name: np.asarray(getattr(state, name)).tolist() for name in fields}


class Histories(RuleBasedStateMachine):
    reached: ClassVar = Counter()

    def __init__(self, shape, most):
        super().__init__()
        self.num_blocks, self.block_size, self.max_seqs, self.width = shape
        self.most = most
        self.state = jax.device_get(core.create_block_state(*shape))
        self.ledger = Ledger(*shape)
        self.history = History(*shape)
        self.naive = self.history.naive
        self.pool = np.zeros((self.num_blocks + 1, self.block_size), np.int64)
        self.next_tag = itertools.count(1)

    @rule(parts=st.sampled_from(KINDS), rng=RANDOM)
    def step(self, parts, rng):
        self.run(parts, rng)

    def run(self, parts, rng):
        drawn = self.history.draw(rng, parts)
        new_tokens, tags = drawn.get("allocate", {}), self.history.tags
        starts = {row: len(tags[row]) for row in new_tokens}
        answer = self.naive.allocate(new_tokens, self.most)
        self.apply_to_ledger(drawn, answer)
        tokens = [
            (row, starts[row] + i)
            for row in sorted(new_tokens)
            for i in range(min(new_tokens[row], MOST_TOKENS))
        ]
        slots = self.apply_to_core(drawn, tokens, answer)

        before = self.pool.copy()
        for source, target in answer.copies.values():
            self.pool[target] = before[source]
        if not answer.reason:
            for (row, _), slot in zip(tokens, slots, strict=False):
                assert slot >= self.block_size, "a real token went to the null block"
                tags[row].append(next(self.next_tag))
                self.pool.reshape(-1)[slot] = tags[row][-1]
        self.check()
        self.reached.update(part for part, entries in drawn.items() if entries)
        self.reached[f"reason {answer.reason}"] += bool(new_tokens)
        self.reached["copy"] += len(answer.copies)

    def apply_to_ledger(self, drawn, answer):
        new_tokens = drawn.get("allocate", {})
        is_out = answer.reason == core.REASON_OUT_OF_BLOCKS
        if is_out and answer.needed <= len(self.naive.stack):
            # The ledger knows no bound on new blocks: it gets the plan without its tokens.
            self.ledger.apply(plan_of({**drawn, "allocate": {}}))
            assert sum(self.ledger.needed(new_tokens).values()) == answer.needed > self.most
            return
        assert self.ledger.apply(plan_of(drawn)) == LedgerAllocation(
            ok=not answer.reason,
            reason=answer.reason,
            copies=answer.copies,
            num_new=0 if answer.reason else answer.needed,
        )

    def apply_to_core(self, drawn, tokens, answer):
        new_tokens = np.zeros(self.max_seqs, np.int32)
        for row, count in drawn.get("allocate", {}).items():
            new_tokens[row] = count
        moved, self.state, allocation, slots = jax.device_get(
            compiled_step(self.most)(
                self.state,
                moves_of(drawn, self.max_seqs, self.width),
                new_tokens,
                columns(tokens, MOST_TOKENS * self.max_seqs, self.max_seqs),
            )
        )
        assert allocation.ok == (not answer.reason)
        assert allocation.reason == answer.reason
        assert allocation.num_new == (0 if answer.reason else answer.needed)
        copies = zip(allocation.copy_src.tolist(), allocation.copy_dst.tolist(), strict=True)
        assert {row: pair for row, pair in enumerate(copies) if any(pair)} == answer.copies
        assert not slots[len(tokens) :].any()
        if answer.reason:
            assert as_lists(self.state) == as_lists(moved)
        return slots.tolist()

    def check(self):
        retained = np.array(self.naive.retained, int)
        core.audit(self.state, np.bincount(retained, minlength=self.num_blocks + 1))
        assert as_lists(self.state) == as_lists(state_of(self.ledger))
        assert self.ledger.free_blocks == self.naive.stack
        assert dict(enumerate(self.ledger.tables)) == self.naive.tables
        assert dict(enumerate(self.ledger.lengths)) == self.naive.lengths
        for row, tags in enumerate(self.history.tags):
            assert self.naive.lengths[row] == len(tags)
            read = self.pool[self.naive.tables[row]].reshape(-1)
            assert read[: len(tags)].tolist() == tags
        for block, tags in self.history.frozen.items():
            assert self.pool[block, : len(tags)].tolist() == tags

    def teardown(self):
        # Whatever the history was, dropping every owner gives every block back.
        self.ledger.free(range(self.max_seqs))
        self.ledger.release(self.naive.retained)
        assert sorted(self.ledger.free_blocks) == list(range(1, self.num_blocks + 1))


@pytest.mark.parametrize(("shape", "most"), SHAPES, ids=str)
def test_core_ledger_naive_model_and_contents_agree_on_random_histories(shape, most):
    # An even walk first, which reaches everything: what hypothesis draws differs between its
    # versions and between places of a clone.
    walk, rng = Histories(shape, most), random.Random(0)
    Histories.reached.clear()
    for _ in range(300):
        walk.run(rng.choice(KINDS), rng)
    walk.teardown()
    # A block of one token is full and never copied.
    wanted = {*PARTS, "reason 0", "reason 1", "reason 2", *(["copy"] if shape[1] > 1 else [])}
    assert {what for what, times in Histories.reached.items() if times > 5} >= wanted
    run_state_machine_as_test(
        functools.partial(Histories, shape, most),
        settings=hypothesis.settings(
            max_examples=4,
            stateful_step_count=200,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )


def test_releasable_counts_blocks_that_no_other_row_owns():
    ledger = Ledger(8, 4, 3, 4)
    ledger.allocate({0: 6})
    ledger.fork(0, 1)
    ledger.allocate({1: 3})  # copies block 2 and grows: row 1 is [1, 4, 3]
    assert ledger.tables == [[1, 2], [1, 4, 3], []]
    assert ledger.releasable([0]) == 1
    assert ledger.releasable([1]) == 2
    assert ledger.releasable([0, 1]) == 4
    assert ledger.releasable([2]) == 0


def test_block_released_more_often_than_it_is_owned_raises():
    ledger = Ledger(8, 4, 3, 4)
    ledger.allocate({0: 6})
    ledger.retain([1, 2])
    ledger.free([0])
    with pytest.raises(ValueError, match="block 1 is released 2 times and owned 1"):
        ledger.release([2, 1, 1])
    assert ledger.refcounts[:3] == [0, 1, 1], "nothing was released"
    ledger.release([2, 1])
    assert ledger.free_blocks == [8, 7, 6, 5, 4, 3, 2, 1]
    with pytest.raises(ValueError, match="block 1 is free"):
        ledger.release([1])


def test_plan_releases_before_it_retains():
    ledger = Ledger(8, 4, 3, 4)
    ledger.allocate({0: 4})
    ledger.retain([1])
    ledger.free([0])
    # Block 1 went back to the stack with its last owner: there is nothing left to retain.
    with pytest.raises(ValueError, match="block 1 is free"):
        ledger.apply(Plan(release_ids=(1,), retain_ids=(1,)))


def test_share_takes_as_many_blocks_as_the_tokens_fill():
    ledger = Ledger(8, 4, 3, 4)
    ledger.allocate({0: 6})
    for block_ids, num_tokens in [([1], 5), ([1, 2], 4), ([], 1), ([1], 0)]:
        with pytest.raises(
            ValueError, match=r"block_ids \(\d\) must be as many as the tokens fill"
        ):
            ledger.share(1, block_ids, num_tokens)
    assert ledger.tables == [[1, 2], [], []]


def test_fork_onto_an_occupied_row_raises():
    ledger = Ledger(8, 4, 3, 4)
    ledger.allocate({0: 6, 1: 1})
    with pytest.raises(ValueError, match="row 1 holds 1 tokens; free it first"):
        ledger.fork(0, 1)


def test_count_below_0_raises():
    ledger = Ledger(8, 4, 3, 4)
    ledger.allocate({0: 6})
    ledger.refcounts[2] = 0
    with pytest.raises(ValueError, match="block 2 is freed more often"):
        ledger.free([0])


def test_failed_allocation_changes_nothing():
    ledger = Ledger(3, 4, 3, 4)
    ledger.allocate({0: 6})
    ledger.fork(0, 1)
    before = (list(ledger.free_blocks), list(ledger.refcounts), list(ledger.lengths))
    assert ledger.allocate({0: 5, 1: 1}).reason == 1  # growth 1 and 1 copy, 1 free
    assert ledger.allocate({0: 11}).reason == 2
    assert (ledger.free_blocks, ledger.refcounts, ledger.lengths) == before
    assert ledger.tables == [[1, 2], [1, 2], []]
