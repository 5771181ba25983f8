"""Random histories: core, the ledger and a shadow of the pool's contents agree at every step.

Core and the ledger are each other's oracle for block ids. A third model knows nothing of blocks:
it keeps the tokens that each row should hold as plain lists, and a shadow pool of tags stands for
the KV. Tags are written through `slot_mapping` and copied by `copy_src` and `copy_dst` only, so a
row that reads a wrong tag shows an aliased, lost or uncopied block.
"""

import functools
import itertools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from paged_jax import core
from paged_jax.core import BlockState
from paged_jax.ledger import Ledger

# (N, P, S, M): each is compiled once. Small pools run out, the large one never does.
SHAPES = [(3, 16, 3, 2), (9, 1, 4, 6), (14, 2, 4, 6), (63, 4, 5, 8)]
MOST_TOKENS = 10
FORKS = 2


@functools.cache
def compiled_step(block_size: int):
    """One program for every rule: parts with nothing to do must change nothing."""

    @jax.jit
    def step(state: BlockState, freed, parents, children, kept, new_tokens, rows, positions):
        state = core.fork(core.free(state, freed), parents, children)
        state, allocation = core.allocate(core.truncate(state, kept), new_tokens)
        return state, allocation, core.slot_mapping(state, rows, positions)

    return step


class Histories(RuleBasedStateMachine):
    @initialize(shape=st.sampled_from(SHAPES))
    def create(self, shape):
        self.num_blocks, self.block_size, self.max_seqs, self.width = shape
        self.state = core.create_block_state(*shape)
        self.ledger = Ledger(*shape)
        self.expected = [[] for _ in range(self.max_seqs)]  # tags of each row, block by no block
        self.pool = np.zeros((self.num_blocks + 1, self.block_size), np.int64)
        self.next_tag = itertools.count(1)

    @rule(data=st.data())
    def allocate(self, data):
        count = st.integers(0, MOST_TOKENS)
        wanted = data.draw(st.lists(count, min_size=self.max_seqs, max_size=self.max_seqs))
        self.apply(new_tokens=dict(enumerate(wanted)))

    @rule(data=st.data(), count=st.integers(1, 3))
    def allocate_one(self, data, count):
        self.apply(new_tokens={data.draw(self.row()): count})

    @rule(data=st.data())
    def free(self, data):
        self.apply(freed=data.draw(st.sets(self.row(), max_size=2)))

    @rule(data=st.data())
    def fork(self, data):
        """Two pairs: the second may have the child of the first as its parent."""
        pairs, occupied = [], {row for row, tags in enumerate(self.expected) if tags}
        for _ in range(FORKS):
            empty = sorted(set(range(self.max_seqs)) - occupied)
            if occupied and empty:
                pairs.append(
                    (
                        data.draw(st.sampled_from(sorted(occupied))),
                        data.draw(st.sampled_from(empty)),
                    )
                )
                occupied.add(pairs[-1][1])
        self.apply(forks=pairs)

    @rule(data=st.data())
    def truncate(self, data):
        row = data.draw(self.row())
        self.apply(kept={row: data.draw(st.integers(0, len(self.expected[row]) + 1))})

    @rule(data=st.data(), count=st.integers(1, MOST_TOKENS))
    def everything_in_one_step(self, data, count):
        row = data.draw(self.row())
        parents = [other for other, tags in enumerate(self.expected) if tags and other != row]
        forks = [(parents[0], row)] if parents else []
        kept = {parents[0]: max(0, len(self.expected[parents[0]]) - 1)} if parents else {}
        new_tokens = {row: count} | ({parents[0]: 1} if parents else {})
        self.apply(freed={row}, forks=forks, kept=kept, new_tokens=new_tokens)

    def row(self):
        return st.integers(0, self.max_seqs - 1)

    def apply(self, *, freed=(), forks=(), kept=None, new_tokens=None):
        kept, new_tokens = kept or {}, new_tokens or {}
        self.apply_to_rows(freed, forks, kept)
        ledger_allocation = self.apply_to_ledger(freed, forks, kept, new_tokens)
        starts = [len(tags) for tags in self.expected]
        allocation, slots = self.apply_to_core(freed, forks, kept, new_tokens, starts)

        assert bool(allocation.ok) == ledger_allocation.ok
        assert int(allocation.reason) == ledger_allocation.reason
        assert int(allocation.num_new) == ledger_allocation.num_new
        copies = {
            row: (int(source), int(target))
            for row, (source, target) in enumerate(
                zip(allocation.copy_src.tolist(), allocation.copy_dst.tolist(), strict=True)
            )
            if target
        }
        assert copies == dict(ledger_allocation.copies)

        before = self.pool.copy()
        for source, target in copies.values():
            self.pool[target] = before[source]
        for (row, _), slot in zip(self.tokens(new_tokens, starts), slots, strict=False):
            if allocation.ok:
                tag = next(self.next_tag)
                self.expected[row].append(tag)
                assert slot >= self.block_size, "a real token went to the null block"
                self.pool.reshape(-1)[slot] = tag
        self.check()

    def apply_to_rows(self, freed, forks, kept):
        for row in freed:
            self.expected[row] = []
        for parent, child in forks:
            self.expected[child] = list(self.expected[parent])
        for row, length in kept.items():
            self.expected[row] = self.expected[row][:length]

    def apply_to_ledger(self, freed, forks, kept, new_tokens):
        self.ledger.free(freed)
        for parent, child in forks:
            self.ledger.fork(parent, child)
        self.ledger.truncate(kept)
        return self.ledger.allocate(new_tokens)

    def apply_to_core(self, freed, forks, kept, new_tokens, starts):
        pairs = np.full((FORKS, 2), self.max_seqs, np.int32)
        pairs[: len(forks)] = np.array(forks, np.int32).reshape(-1, 2)
        lengths = np.full(self.max_seqs, 2**30, np.int32)
        lengths[list(kept)] = list(kept.values())
        counts = np.zeros(self.max_seqs, np.int32)
        counts[list(new_tokens)] = list(new_tokens.values())
        tokens = self.tokens(new_tokens, starts)
        placed = np.full((MOST_TOKENS * self.max_seqs, 2), (self.max_seqs, 0), np.int32)
        placed[: len(tokens)] = np.array(tokens, np.int32).reshape(-1, 2)
        is_freed = np.isin(np.arange(self.max_seqs), list(freed))
        self.state, allocation, slots = compiled_step(self.block_size)(
            self.state, is_freed, *pairs.T, lengths, counts, *placed.T
        )
        assert not np.asarray(slots)[len(tokens) :].any()
        return jax.device_get(allocation), np.asarray(slots)

    @staticmethod
    def tokens(new_tokens, starts):
        return [
            (row, starts[row] + i)
            for row, count in sorted(new_tokens.items())
            for i in range(count)
        ]

    def check(self):
        core.audit(self.state)
        state, ledger = jax.device_get(self.state), self.ledger
        assert state.free_blocks[: state.num_free].tolist() == ledger.free_blocks
        assert int(state.num_free) == ledger.num_free
        assert state.refcounts.tolist() == ledger.refcounts
        assert state.lengths.tolist() == ledger.lengths
        for row, tags in enumerate(self.expected):
            table = ledger.tables[row]
            assert state.block_tables[row, : len(table)].tolist() == table
            assert not state.block_tables[row, len(table) :].any()
            assert ledger.lengths[row] == len(tags)
            read = [
                self.pool[table[t // self.block_size], t % self.block_size]
                for t in range(len(tags))
            ]
            assert read == tags


def test_core_ledger_and_contents_agree_on_random_histories():
    run_state_machine_as_test(
        Histories,
        settings=hypothesis.settings(
            max_examples=60,
            stateful_step_count=25,
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
