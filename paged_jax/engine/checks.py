"""Debug mode: audits blocks, compares them with the ledger, and every tag with the shadow."""

import dataclasses
from collections.abc import Sequence as Listed
from typing import Any

import jax
import numpy as np

from paged_jax import core
from paged_jax.config import ResolvedConfig
from paged_jax.core import AuditError, KVCache
from paged_jax.engine.request import Sequence
from paged_jax.engine.runner import Runner
from paged_jax.engine.shadow import Shadow
from paged_jax.engine.step import StepOutputs
from paged_jax.ledger import Ledger, LedgerAllocation
from paged_jax.plan import Plan


class Checker:
    """Follows every dispatch, and waits for it."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.shadow = Shadow(config.num_blocks, config.max_num_seqs, config.block_size)

    def renewed(self, config: ResolvedConfig) -> "Checker":
        """One for a new pool, that knows what images on the host hold."""
        checker = Checker(config)
        checker.shadow.swapped = self.shadow.swapped
        return checker

    def adopt(
        self,
        runner: Runner,
        ledger: Ledger,
        images: dict[Sequence, tuple[KVCache, int]],
    ) -> None:
        """Tags blocks and images of unknown writers anew, so that they are followed from now on."""
        swapped = {sequence.key: sequence.swapped_tokens for sequence in images}
        tags = np.array(self.shadow.adopt(ledger, swapped), np.int32)
        assert runner.kv is not None
        assert runner.kv.tags is not None
        placed = jax.device_put(tags, runner.kv.tags.sharding)
        runner.kv = dataclasses.replace(runner.kv, tags=placed)
        for sequence, (image, num_blocks) in images.items():
            own: Any = self.shadow.image_tags(sequence.key, num_blocks)
            images[sequence] = dataclasses.replace(image, tags=own), num_blocks

    def follow(self, plan: Plan, owners: Listed[int], ledger: Ledger) -> None:
        """Takes note of a plan before it is applied to the ledger."""
        self.shadow.apply(plan, tuple(owners), ledger)

    def check(
        self,
        plan: Plan,
        allocation: LedgerAllocation,
        result: StepOutputs | None,
        runner: Runner,
        ledger: Ledger,
    ) -> StepOutputs | None:
        """Checks the device after a plan.

        Returns: The result as numpy arrays.
        Raises: AuditError or AssertionError for the first thing that is wrong.
        """
        assert allocation.ok, "the ledger refused a plan"
        if result is not None:
            result = jax.device_get(result)
            assert result is not None
            assert bool(result.ok), "the device ran out of blocks that the ledger had"
            _compare_ranks(np.asarray(result.checksums))
            assert int(result.num_free) == ledger.num_free
            for segment, count in zip(plan.segments, result.num_run, strict=False):
                if segment.is_decode and count < segment.num_tokens:
                    self.shadow.freeze(segment.row)
        blocks = runner.blocks
        core.audit(blocks, self.shadow.external)
        tables = np.zeros(blocks.block_tables.shape, np.int32)
        for row, table in enumerate(ledger.tables):
            tables[row, : len(table)] = table
        stack = np.zeros(blocks.free_blocks.shape, np.int32)
        stack[: ledger.num_free] = ledger.free_blocks
        np.testing.assert_array_equal(np.asarray(blocks.block_tables), tables)
        np.testing.assert_array_equal(np.asarray(blocks.free_blocks), stack)
        np.testing.assert_array_equal(np.asarray(blocks.refcounts), ledger.refcounts)
        np.testing.assert_array_equal(np.asarray(blocks.lengths), ledger.lengths)
        assert runner.kv is not None
        self.shadow.check(runner.kv, blocks)
        return result


def _compare_ranks(checksums: np.ndarray) -> None:
    """Raises AuditError naming the ranks whose blocks are not those of most."""
    values, counts = np.unique(checksums, return_counts=True)
    if len(values) > 1:
        usual = values[np.argmax(counts)]
        wrong = ", ".join(str(rank) for rank in np.flatnonzero(checksums != usual))
        raise AuditError(f"the BlockState of rank {wrong} differs from that of the others")
