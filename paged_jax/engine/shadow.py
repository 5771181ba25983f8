"""What the slots of a pool should hold: the host side of the shadow tags of debug mode.

It follows plans as the ledger does, but knows tokens and not blocks: the tags that each row reads
are a list. `core.check_tags` compares it with the pool, which was written through slots and copies.
"""

from collections.abc import Mapping

import numpy as np

from paged_jax import core
from paged_jax.core import BlockState, KVCache
from paged_jax.ledger import Ledger
from paged_jax.plan import Plan

_ADOPTED = 2**31
"""Owners from here on are no sequences."""


class Shadow:
    """Tags per row, and per block that was shared or retained."""

    def __init__(self, num_blocks: int, max_seqs: int, block_size: int) -> None:
        self.external = np.zeros(num_blocks + 1, np.int32)
        """References held by owners other than rows."""
        self._block_size = block_size
        self._rows: list[list[int]] = [[] for _ in range(max_seqs)]
        self._retained: dict[int, list[int]] = {}
        self.swapped: dict[object, list[int]] = {}
        """Tags of images on the host by (request, choice)."""
        self._frozen: set[int] = set()

    def apply(self, plan: Plan, owners: tuple[int, ...], ledger: Ledger) -> None:
        """Follows a plan.

        Args:
          owners: Number of the writer of each segment, as the step was given it.
          ledger: Before the plan is applied to it.
        """
        np.subtract.at(self.external, list(plan.release_ids), 1)
        for block in plan.release_ids:
            if not self.external[block]:
                self._retained.pop(block, None)
        for block in plan.retain_ids:
            self.external[block] += 1
            self._retained[block] = self._contents(block, ledger)
        shared = [
            [tag for block in block_ids for tag in self._contents(block, ledger)][:num_tokens]
            for _, block_ids, num_tokens in plan.shares
        ]
        for name, index, row in plan.swapped_out:
            self.swapped[name, index] = self._rows[row]
        for row in plan.free_rows:
            self._rows[row] = []
        self._frozen -= set(plan.free_rows)
        for (row, *_), tags in zip(plan.shares, shared, strict=True):
            self._rows[row] = tags
        for parent, child in plan.forks + plan.branches:
            self._rows[child] = list(self._rows[parent])
        before = list(self._rows)
        for row, source in plan.reindexed:
            self._rows[row] = list(before[source])
        for row, length in plan.truncated:
            del self._rows[row][length:]
        counts = dict(plan.restored)
        for name, index, row, first in plan.swapped_in:
            tags, start = self.swapped.pop((name, index)), first * self._block_size
            self._rows[row] += tags[start : start + counts[row]]
        for segment, owner in zip(plan.segments, owners, strict=True):
            tags = self._rows[segment.row]
            positions = np.arange(len(tags), len(tags) + segment.num_tokens)
            tags += core.expected_tags(owner, positions)

    def adopt(self, ledger: Ledger, swapped: Mapping[tuple[str, int], int]) -> list[list[int]]:
        """Starts with blocks of unknown writers: each slot is tagged as written by its block.

        Args:
          swapped: Tokens in the image of each (request, choice).
        Returns: Tags of each block, the null block first, that the pool must then hold.
        """
        offsets = np.arange(self._block_size)
        blocks = range(len(ledger.refcounts))
        tags = [core.expected_tags(_ADOPTED + block, offsets) for block in blocks]
        self.external = np.array(ledger.refcounts, np.int32)
        for row, table in enumerate(ledger.tables):
            self.external[table] -= 1
            held = [tag for block in table for tag in tags[block]]
            self._rows[row] = held[: ledger.lengths[row]]
        self._retained = {block: tags[block] for block in blocks if self.external[block]}
        for number, (key, num_tokens) in enumerate(swapped.items()):
            owner = _ADOPTED + len(blocks) + number
            self.swapped[key] = core.expected_tags(owner, np.arange(num_tokens))
        return tags

    def image_tags(self, key: tuple[str, int], num_blocks: int) -> np.ndarray:
        """i32[B, P], the tags that an image must hold."""
        tags = np.zeros(num_blocks * self._block_size, np.int32)
        held = self.swapped[key][: tags.size]
        tags[: len(held)] = held
        return tags.reshape(num_blocks, self._block_size)

    def freeze(self, row: int) -> None:
        """A row that had ended did not write what was planned; nobody will read it."""
        self._frozen.add(row)

    def check(self, kv: KVCache, blocks: BlockState) -> None:
        """Raises AuditError when a row reads a slot that it did not write."""
        rows = [None if i in self._frozen else tags for i, tags in enumerate(self._rows)]
        core.check_tags(kv, blocks, rows)

    def _contents(self, block: int, ledger: Ledger) -> list[int]:
        """The tags of a block: of whoever reads most of it, or as it was when it was retained."""
        known = [self._retained.get(block, [])]
        for row, table in enumerate(ledger.tables):
            if block in table:
                start = table.index(block) * self._block_size
                known.append(self._rows[row][start : start + self._block_size])
        return max(known, key=len)
