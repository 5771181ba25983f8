"""The block state again, on the host, in plain Python.

It applies the same transitions as `paged_jax.core` in the same order and so reaches the same block
ids without reading anything back. It is the scheduler's accounting and the oracle of core's tests;
core is its oracle in turn. Where core sets a fault bit the ledger raises and changes nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
        _, growth, copied = self._demand(new_tokens)
        return {row: growth.get(row, 0) + (row in copied) for row in new_tokens}

    def allocate(self, new_tokens: Mapping[int, int]) -> LedgerAllocation:
        """Makes room for more tokens per row, for all rows or for none; see core's `allocate`.

        Raises: ValueError for a row out of range or a negative number of tokens.
        """
        if new_tokens:
            self._check_rows(min(new_tokens), max(new_tokens))
        if new_tokens and min(new_tokens.values()) < 0:
            negative = next(row for row, count in new_tokens.items() if count < 0)
            raise ValueError(f"new_tokens of row {negative} must be at least 0")
        ends, growth, copied = self._demand(new_tokens)
        if max(ends.values(), default=0) > self.max_blocks_per_seq * self.block_size:
            return LedgerAllocation(ok=False, reason=2)
        total = sum(growth.values()) + len(copied)
        if total > self.num_free:
            return LedgerAllocation(ok=False, reason=1)
        tables, lengths, refcounts = self.tables, self.lengths, self.refcounts
        last = {row: len(tables[row]) - 1 for row in copied}
        for row in sorted(growth):
            for _ in range(growth[row]):
                tables[row].append(block := self.free_blocks.pop())
                refcounts[block] = 1
        copies = {}
        for row in copied:
            source, target = tables[row][last[row]], self.free_blocks.pop()
            refcounts[source] -= 1
            refcounts[target] = 1
            tables[row][last[row]] = target
            copies[row] = (source, target)
        for row, end in ends.items():
            lengths[row] = end
        return LedgerAllocation(ok=True, copies=copies, num_new=total)

    def free(self, rows: Iterable[int]) -> None:
        """Drops rows; see core's `free`.

        Raises: ValueError for a row out of range.
        """
        rows = list(rows)
        self._check_rows(*rows)
        for row in sorted(set(rows)):
            self._shorten(row, 0)

    def truncate(self, lengths: Mapping[int, int]) -> None:
        """Shortens rows to `lengths` where that is less than now; see core's `truncate`.

        Raises: ValueError for a row out of range or a negative length.
        """
        self._check_rows(*lengths)
        negative = [row for row, length in lengths.items() if length < 0]
        if negative:
            raise ValueError(f"length of row {negative[0]} must be at least 0")
        for row in sorted(lengths):
            if lengths[row] < self.lengths[row]:
                self._shorten(row, lengths[row])

    def fork(self, parent: int, child: int) -> None:
        """Lets an empty row share all blocks of another; see core's `fork`.

        Raises: ValueError for a row out of range or a child that holds tokens.
        """
        self._check_rows(parent, child)
        self._adopt(child, self.tables[parent], self.lengths[parent])

    def share(self, row: int, block_ids: Sequence[int], num_tokens: int) -> None:
        """Lets an empty row adopt blocks that others own; see core's `share`.

        Raises: ValueError for a row out of range or with tokens, a block that nobody owns, or ids
          that repeat or are not as many as the tokens fill.
        """
        self._check_rows(row)
        if not 0 <= num_tokens <= self.max_blocks_per_seq * self.block_size:
            raise ValueError(f"num_tokens ({num_tokens}) must be what a row can hold")
        if len(block_ids) != ceil_div(num_tokens, self.block_size):
            raise ValueError(f"block_ids ({len(block_ids)}) must be as many as the tokens fill")
        if len(set(block_ids)) < len(block_ids):
            raise ValueError(f"block_ids {list(block_ids)} must not name a block twice")
        self._check_owned(block_ids)
        self._adopt(row, block_ids, num_tokens)

    def reindex(self, sources: Mapping[int, int]) -> None:
        """Gives each row the table that its source had before the call; see core's `reindex`.

        Raises: ValueError for a row out of range.
        """
        self._check_rows(*sources, *sources.values())
        moves = {row: source for row, source in sources.items() if row != source}
        tables = {row: list(self.tables[source]) for row, source in moves.items()}
        lengths = {row: self.lengths[source] for row, source in moves.items()}
        for table in tables.values():
            for block in table:
                self.refcounts[block] += 1
        self.free(moves)
        for row in moves:
            self.tables[row], self.lengths[row] = tables[row], lengths[row]

    def retain(self, block_ids: Sequence[int]) -> None:
        """Adds an owner that is not a row to each block; see core's `retain`.

        Raises: ValueError for a block that nobody owns.
        """
        self._check_owned(block_ids)
        for block in block_ids:
            self.refcounts[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes back what `retain` gave; see core's `release`.

        Raises: ValueError for a block named more often than it is owned.
        """
        self._check_owned(block_ids)
        for block, times in Counter(block_ids).items():
            if times > self.refcounts[block]:
                raise ValueError(
                    f"block {block} is released {times} times and owned {self.refcounts[block]}"
                )
        for block in block_ids:
            self._drop(block)

    def apply(self, plan: Plan) -> LedgerAllocation:
        """Applies a plan, in its order, as the device does.

        Raises: ValueError for a part that breaks a rule of its transition, or that reindexes or
          truncates a row twice.
        """
        for part in (plan.reindexed, plan.truncated):
            if len(dict(part)) < len(part):
                raise ValueError(f"a plan must not change a row twice: {part}")
        self.free(plan.free_rows)
        self.release(plan.release_ids)
        self.retain(plan.retain_ids)
        for row, block_ids, num_tokens in plan.shares:
            self.share(row, block_ids, num_tokens)
        for parent, child in plan.forks + plan.branches:
            self.fork(parent, child)
        self.reindex(dict(plan.reindexed))
        self.truncate(dict(plan.truncated))
        if plan.restored and not self.allocate(dict(plan.restored)).ok:
            return LedgerAllocation(ok=False, reason=1)
        return self.allocate(plan.new_tokens)

    def _demand(
        self, new_tokens: Mapping[int, int]
    ) -> tuple[dict[int, int], dict[int, int], list[int]]:
        """Lengths of the rows afterwards, blocks by which they grow, and those, ascending, that
        must copy the block they write into."""
        size, refcounts = self.block_size, self.refcounts
        tables, lengths = self.tables, self.lengths
        ends, growth, writers = {}, {}, {}
        # One pass over the rows: this runs for every dispatch, for hundreds of them.
        for row, count in new_tokens.items():
            length, table = lengths[row], tables[row]
            room = len(table) * size
            ends[row] = end = length + count
            if end > room:
                growth[row] = -(-(end - room) // size)
            # Most blocks have one owner, and nobody else to ask.
            if length < room and count and refcounts[table[-1]] > 1:
                writers.setdefault(table[-1], []).append(row)
        copied = []
        for block, rows in writers.items():
            # The lowest row keeps a block that nobody else owns.
            copied += rows if refcounts[block] > len(rows) else sorted(rows)[1:]
        return ends, growth, sorted(copied)

    def _check_rows(self, *rows: int) -> None:
        for row in rows:
            if not 0 <= row < len(self.tables):
                raise ValueError(f"row {row} is outside 0..{len(self.tables) - 1}")

    def _check_owned(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if not 1 <= block <= self.num_blocks:
                raise ValueError(f"block {block} is outside 1..{self.num_blocks}")
            if self.refcounts[block] < 1:
                raise ValueError(f"block {block} is free; only owned blocks can be shared")

    def _adopt(self, row: int, block_ids: Sequence[int], length: int) -> None:
        if self.lengths[row]:
            raise ValueError(f"row {row} holds {self.lengths[row]} tokens; free it first")
        self.tables[row] = list(block_ids)
        self.lengths[row] = length
        for block in block_ids:
            self.refcounts[block] += 1

    def _drop(self, block: int) -> None:
        if self.refcounts[block] < 1:
            raise ValueError(f"block {block} is freed more often than it was taken")
        self.refcounts[block] -= 1
        if self.refcounts[block] == 0:
            self.free_blocks.append(block)

    def _shorten(self, row: int, length: int) -> None:
        keep = ceil_div(length, self.block_size)
        dropped = self.tables[row][keep:]
        del self.tables[row][keep:]
        self.lengths[row] = length
        for block in dropped:
            self._drop(block)
