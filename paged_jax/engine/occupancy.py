"""What the blocks of a pool are used for: by whom, and how many slots of them hold nothing."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from paged_jax.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class BlockUse:
    """One block; free when it has no owner and is not cached."""

    owners: tuple[str, ...] = ()
    """Names of the rows that read it, in the order of their rows."""
    is_cached: bool = False
    """Whether somebody who is not a row, such as the prefix cache, keeps it."""


def block_uses(ledger: Ledger, names: Mapping[int, str]) -> list[BlockUse]:
    """What each block is used for, block 1 first.

    Args:
      ledger: The blocks.
      names: What to call a row; a row without a name is called "row 3".
    """
    owners: list[list[str]] = [[] for _ in range(ledger.num_blocks + 1)]
    for row, table in enumerate(ledger.tables):
        for block in table:
            owners[block].append(names.get(row, f"row {row}"))
    return [
        BlockUse(owners=tuple(rows), is_cached=count > len(rows))
        for rows, count in zip(owners[1:], ledger.refcounts[1:], strict=True)
    ]


@dataclass(kw_only=True)
class KVWaste:
    """Slots that rows hold and that hold no token, summed over the moments it was shown.

    Blocks that only the prefix cache keeps count neither way: whoever needs them takes them.
    """

    max_model_len: int
    num_slots: int = 0
    num_empty: int = 0
    num_reserved: int = 0
    """Slots that rows would hold if each reserved `max_model_len` tokens, and shared nothing."""
    num_tokens: int = 0
    """Tokens in them."""
    num_rows: int = 0
    """Rows that held blocks."""
    most_rows: int = 0
    num_moments: int = 0

    def add(self, ledger: Ledger) -> int:
        """Counts the slots of this moment. Returns: The blocks that rows hold."""
        size = ledger.block_size
        empty: Counter[int] = Counter()
        num_rows = 0
        for table, length in zip(ledger.tables, ledger.lengths, strict=True):
            if table:
                # Only a last block can be partly empty. Of rows that share it, one may be further.
                left, last = len(table) * size - length, table[-1]
                empty[last] = min(empty[last], left) if last in empty else left
                num_rows += 1
                self.num_tokens += length
        self.num_rows += num_rows
        self.most_rows = max(self.most_rows, num_rows)
        self.num_moments += 1
        num_held = len(set().union(*ledger.tables))
        self.num_slots += size * num_held
        self.num_empty += empty.total()
        self.num_reserved += num_rows * self.max_model_len
        return num_held

    def means(self) -> dict[str, float]:
        """Rows, their tokens and their slots at a moment, and the most rows."""
        moments = max(1, self.num_moments)
        return {
            "mean_resident_rows": self.num_rows / moments,
            "mean_resident_tokens": self.num_tokens / moments,
            "mean_allocated_slots": self.num_slots / moments,
            "most_resident_rows": self.most_rows,
        }

    @property
    def fraction(self) -> float:
        """Empty slots of those that rows hold."""
        return self.num_empty / self.num_slots if self.num_slots else 0.0

    @property
    def contiguous_fraction(self) -> float:
        """The same with a contiguous reservation of `max_model_len` tokens per row."""
        return 1 - self.num_tokens / self.num_reserved if self.num_reserved else 0.0
