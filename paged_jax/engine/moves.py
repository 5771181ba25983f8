"""The part of a plan that moves blocks between rows before any token is allocated.

Rows end in almost every dispatch, so the step frees them itself. Sharing, forks, reindexing and
truncation are rarer: they run as small programs of their own, each only when a plan asks for it, so
that a step that needs none of them has none of their kernels.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from paged_jax import core
from paged_jax.core import BlockState
from paged_jax.decode import RowState, fork_rows
from paged_jax.plan import Plan

MAX_IDS = 64
"""Blocks that one call retains or releases."""

_free = jax.jit(core.free)
_release = jax.jit(core.release)
_retain = jax.jit(core.retain)
_share = jax.jit(core.share)
_fork = jax.jit(core.fork)
_fork_rows = jax.jit(fork_rows)
_reindex = jax.jit(core.reindex)
_truncate = jax.jit(core.truncate)
# New rows of whole blocks: nothing is copied.
_allocate = jax.jit(lambda blocks, new_tokens: core.allocate(blocks, new_tokens)[0])


def apply_moves(blocks: BlockState, rows: RowState, plan: Plan) -> tuple[BlockState, RowState]:
    """Applies all fields of a plan that come before its segments, in their order."""
    max_seqs = blocks.max_seqs
    if plan.free_rows:
        blocks = _free(blocks, row_mask(plan.free_rows, max_seqs))
    for ids in _chunks(plan.release_ids):
        blocks = _release(blocks, ids)
    for ids in _chunks(plan.retain_ids):
        blocks = _retain(blocks, ids)
    if plan.shares:
        blocks = _share(blocks, *_shared(plan, max_seqs, blocks.max_blocks_per_seq))
    if plan.forks:
        pairs = _padded_pairs(plan.forks, max_seqs)
        blocks, rows = _fork(blocks, *pairs), _fork_rows(rows, *pairs)
    if plan.branches:
        blocks = _fork(blocks, *_padded_pairs(plan.branches, max_seqs))
    if plan.reindexed:
        blocks = _reindex(blocks, *_padded_pairs(plan.reindexed, max_seqs))
    if plan.truncated:
        lengths = np.full(max_seqs, 2**31 - 1, np.int32)
        for row, length in plan.truncated:
            lengths[row] = length
        blocks = _truncate(blocks, lengths)
    if plan.restored:
        new_tokens = np.zeros(max_seqs, np.int32)
        for row, count in plan.restored:
            new_tokens[row] = count
        blocks = _allocate(blocks, new_tokens)
    return blocks, rows


def padding_plan(max_seqs: int) -> Plan:
    """One that runs each of these programs and changes nothing, while row 0 is empty."""
    nowhere = ((max_seqs, max_seqs),)
    return Plan(
        free_rows=(0,),
        release_ids=(0,),
        retain_ids=(0,),
        shares=((max_seqs, (), 0),),
        forks=nowhere,
        branches=nowhere,
        reindexed=nowhere,
        truncated=((0, 0),),
        restored=((0, 0),),
    )


def row_mask(rows: Sequence[int], max_seqs: int) -> np.ndarray:
    """bool[S], True for the rows named."""
    mask = np.zeros(max_seqs, bool)
    mask[list(rows)] = True
    return mask


def _chunks(ids: Sequence[int]) -> Iterator[np.ndarray]:
    """In their order, zero-padded to one size for which programs are compiled."""
    for start in range(0, len(ids), MAX_IDS):
        chunk = ids[start : start + MAX_IDS]
        padded = np.zeros(MAX_IDS, np.int32)
        padded[: len(chunk)] = chunk
        yield padded


def _padded_pairs(pairs: Sequence[tuple[int, int]], max_seqs: int) -> np.ndarray:
    """i32[2, S], padded with S. At most S pairs: each changes another row."""
    padded = np.full((2, max_seqs), max_seqs, np.int32)
    padded[:, : len(pairs)] = np.array(pairs, np.int32).T
    return padded


def _shared(plan: Plan, max_seqs: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = np.full(max_seqs, max_seqs, np.int32)
    block_ids = np.zeros((max_seqs, width), np.int32)
    num_tokens = np.zeros(max_seqs, np.int32)
    for i, (row, ids, count) in enumerate(plan.shares):
        rows[i], num_tokens[i] = row, count
        block_ids[i, : len(ids)] = ids
    return rows, block_ids, num_tokens
