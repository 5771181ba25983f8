"""Blocks that a plan can give out while it is made."""

import heapq
from collections import Counter
from collections.abc import Iterable

from paged_jax.engine.request import Sequence
from paged_jax.engine.scheduler_state import SchedulerState


class BlockBudget:
    """Counts ahead of the ledger: rows are freed before anything is taken."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self._block_size = state.ledger.block_size
        self.freed: list[int] = []
        """Rows."""
        self.num_free = state.ledger.num_free
        """Blocks on the stack; below 0: as many cached ones are evicted."""
        self.forks = {fork.child: fork for fork in state.forks}
        """Rows that are forked by this plan."""
        self._dropped: Counter[int] = Counter()  # owners of blocks among the rows freed
        self._has_moves = bool(state.forks or state.reindexed)
        self._num_given_up = 0  # blocks, by reindexing
        self._moved: Counter[int] = Counter()  # owners that blocks gain by it
        self._keepers: set[int] = set()  # rows that write into a block which all owners write into
        if state.reindexed:
            self._settle_reindexed()
        self._free_released()

    @property
    def available(self) -> int:
        """Blocks that can still be given out, cached ones that nobody uses among them."""
        return self.num_free + self.state.num_cached

    def free(self, row: int) -> None:
        """Frees a row in the plan being made; it can be given away again in the same plan."""
        state, cache = self.state, self.state.cache
        state.released.pop(row, None)
        self.freed.append(row)
        heapq.heappush(state.free_rows, row)
        rowless = []
        for block in state.ledger.tables[row]:
            self._dropped[block] += 1
            owners = state.ledger.refcounts[block] - self._dropped[block]
            is_cached = cache is not None and block in cache
            if owners == 0:
                self.num_free += 1
            elif owners == 1 and is_cached:
                rowless.append(block)
        if cache is not None:
            cache.unreference(rowless)

    def keep_tables(self, sequences: Iterable[Sequence]) -> None:
        """Takes back that rows are reindexed: they lose their blocks instead."""
        reindexed = self.state.reindexed
        popped = [reindexed.pop(s.row, None) for s in sequences if s.row is not None]
        if any(source is not None for source in popped):
            self.num_free -= self._num_given_up
            self._moved.clear()
            self._keepers.clear()
            self._settle_reindexed()

    def cost(self, sequence: Sequence, count: int) -> int:
        """Blocks for more tokens of a running sequence, a copy of a shared block included."""
        ledger, row, size = self.state.ledger, sequence.row, self._block_size
        assert row is not None
        offset = sequence.num_computed % size
        if offset == 0:
            return -(-count // size)
        growth = (offset + count - 1) // size
        if self._has_moves:
            return growth + self._is_moved(sequence, row)
        # One writer of all may keep the block: that a copy can be counted too many is allowed.
        block = ledger.tables[row][-1]
        owners = ledger.refcounts[block]
        return growth + (owners > 1 and owners - self._dropped[block] > 1)

    def _is_moved(self, sequence: Sequence, row: int) -> bool:
        """Whether the last block of a row may have to be copied, when rows change hands."""
        if sequence in self.forks:
            return True
        ledger = self.state.ledger
        block = ledger.tables[self.state.reindexed.get(row, row)][-1]
        owners = ledger.refcounts[block] - self._dropped[block] + self._moved[block]
        return owners > 1 and row not in self._keepers

    def _settle_reindexed(self) -> None:
        """Counts the blocks that beams give up, and who may keep the one that all write into."""
        ledger, reindexed = self.state.ledger, self.state.reindexed
        for row, source in reindexed.items():
            self._moved.subtract(ledger.tables[row])
            self._moved.update(ledger.tables[source])
        self._num_given_up = sum(
            ledger.refcounts[block] + gained == 0 for block, gained in self._moved.items()
        )
        self.num_free += self._num_given_up
        writers: dict[int, list[int]] = {}
        for sequence in self.state.running:
            if sequence.request.is_beam and sequence.row is not None:
                table = ledger.tables[reindexed.get(sequence.row, sequence.row)]
                if table:
                    writers.setdefault(table[-1], []).append(sequence.row)
        # Beams of a request decode in one plan or not at all, so that every owner does write.
        for block, rows in writers.items():
            if ledger.refcounts[block] + self._moved[block] == len(rows):
                self._keepers.add(min(rows))

    def _free_released(self) -> None:
        """Frees rows of the past, but those that are forked now or have blocks to be retained."""
        state = self.state
        parents = {fork.parent for fork in state.forks} | set(state.reindexed.values())
        # In order of their end, which is the order of last use.
        for row in [row for row in state.released if row not in parents]:
            if state.cache is None or not state.cache.has_pending(state.ledger.tables[row]):
                self.free(row)
