"""The block state again, on the host, in plain Python.

It applies the same transitions as `paged_jax.core` in the same order and so reaches the same block
ids without reading anything back. It is the scheduler's accounting and the oracle of core's tests;
core is its oracle in turn.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paged_jax.plan import Plan
from paged_jax.shapes import ceil_div


@dataclass(frozen=True, kw_only=True)
class LedgerAllocation:
    """What `Ledger.allocate` did; the fields of core's `Allocation`."""

    ok: bool
    reason: int = 0
    copies: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Row to (source block, destination block)."""
    num_new: int = 0


class Ledger:
    """Free stack, reference counts, tables and lengths as lists."""

    def __init__(
        self, num_blocks: int, block_size: int, max_seqs: int, max_blocks_per_seq: int
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_blocks_per_seq = max_blocks_per_seq
        self.free_blocks = list(range(num_blocks, 0, -1))
        self.refcounts = [0] * (num_blocks + 1)
        self.tables: list[list[int]] = [[] for _ in range(max_seqs)]
        self.lengths = [0] * max_seqs

    @property
    def num_free(self) -> int:
        """Blocks on the stack."""
        return len(self.free_blocks)

    def growth(self, row: int, new_tokens: int) -> int:
        """Blocks that the row takes for more tokens, copies not counted."""
        return ceil_div(self.lengths[row] + new_tokens, self.block_size) - len(self.tables[row])

    def releasable(self, rows: Iterable[int]) -> int:
        """Blocks that go back to the stack when all of these rows are freed together."""
        owners = Counter(block for row in rows for block in self.tables[row])
        return sum(self.refcounts[block] == count for block, count in owners.items())

    def needed(self, new_tokens: Mapping[int, int]) -> dict[int, int]:
        """Blocks that each row would take if all rows got their tokens in one call."""
        copied = self._copies(new_tokens)
        return {row: self.growth(row, count) + (row in copied) for row, count in new_tokens.items()}

    def allocate(self, new_tokens: Mapping[int, int]) -> LedgerAllocation:
        """Makes room for more tokens per row, for all rows or for none; see core's `allocate`."""
        most = self.max_blocks_per_seq * self.block_size
        if any(self.lengths[row] + count > most for row, count in new_tokens.items()):
            return LedgerAllocation(ok=False, reason=2)
        total = sum(self.needed(new_tokens).values())
        if total > self.num_free:
            return LedgerAllocation(ok=False, reason=1)
        copied = self._copies(new_tokens)
        rows = sorted(new_tokens)
        last = {row: len(self.tables[row]) - 1 for row in copied}
        for row in rows:
            for _ in range(self.growth(row, new_tokens[row])):
                self.tables[row].append(self._take())
        copies = {}
        for row in copied:
            source, target = self.tables[row][last[row]], self._take()
            self.refcounts[source] -= 1
            self.tables[row][last[row]] = target
            copies[row] = (source, target)
        for row in rows:
            self.lengths[row] += new_tokens[row]
        return LedgerAllocation(ok=True, copies=copies, num_new=total)

    def free(self, rows: Iterable[int]) -> None:
        """Drops rows; see core's `free`."""
        for row in sorted(set(rows)):
            self._shorten(row, 0)

    def truncate(self, lengths: Mapping[int, int]) -> None:
        """Shortens rows to `lengths` where that is less than now; see core's `truncate`."""
        for row in sorted(lengths):
            if lengths[row] < self.lengths[row]:
                self._shorten(row, lengths[row])

    def fork(self, parent: int, child: int) -> None:
        """Lets an empty row share all blocks of another.

        Raises: ValueError when the child holds tokens.
        """
        if self.lengths[child]:
            raise ValueError(f"row {child} holds {self.lengths[child]} tokens; free it first")
        self.tables[child] = list(self.tables[parent])
        self.lengths[child] = self.lengths[parent]
        for block in self.tables[child]:
            self.refcounts[block] += 1

    def apply(self, plan: Plan) -> LedgerAllocation:
        """Applies a plan as the step does on the device."""
        self.free(plan.free_rows)
        return self.allocate(plan.new_tokens)

    def _copies(self, new_tokens: Mapping[int, int]) -> list[int]:
        """Rows, ascending, that must copy the block they write into."""
        writers: dict[int, list[int]] = {}
        for row in sorted(new_tokens):
            if new_tokens[row] > 0 and self.lengths[row] % self.block_size:
                writers.setdefault(self.tables[row][-1], []).append(row)
        copied = []
        for block, rows in writers.items():
            if self.refcounts[block] > 1:
                # The lowest row keeps a block that nobody else owns.
                copied += rows if self.refcounts[block] > len(rows) else rows[1:]
        return sorted(copied)

    def _take(self) -> int:
        block = self.free_blocks.pop()
        self.refcounts[block] = 1
        return block

    def _shorten(self, row: int, length: int) -> None:
        keep = ceil_div(length, self.block_size)
        dropped = self.tables[row][keep:]
        del self.tables[row][keep:]
        self.lengths[row] = length
        for block in dropped:
            if self.refcounts[block] < 1:
                raise ValueError(f"block {block} is freed more often than it was taken")
            self.refcounts[block] -= 1
            if self.refcounts[block] == 0:
                self.free_blocks.append(block)
