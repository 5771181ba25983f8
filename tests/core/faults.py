"""Entries that break one rule each, for any state."""

from dataclasses import dataclass

import jax
import numpy as np

from paged_jax import core
from paged_jax.core import BlockState
from paged_jax.ledger import Ledger
from tests.core.transitions import COMPILED, IDS, M, N, P, S, columns, padded, per_row, share_arrays


@dataclass(frozen=True)
class Bad:
    """One entry of a transition: (parent, child), (row, source), (row, ids, tokens), (id,), ..."""

    transition: str
    entry: tuple
    bit: int


def bad_entries(state: BlockState, only: str | None = None) -> list[Bad]:
    """As many as the state allows: one without a free block has no entry that names one.

    Entries of every transition, or of one of them only.
    """
    lengths, counts = np.asarray(state.lengths), np.asarray(state.refcounts)
    occupied, empty = np.flatnonzero(lengths).tolist(), np.flatnonzero(lengths == 0).tolist()
    owned, unowned = np.flatnonzero(counts).tolist(), np.flatnonzero(counts[1:] == 0) + 1
    out, bad = core.FAULT_OUT_OF_RANGE, []

    def add(transition: str, bit: int, *entries: tuple) -> None:
        bad.extend(Bad(transition, entry, bit) for entry in entries)

    row, last = (occupied or [0])[0], S - 1
    add("allocate", out, (row, -1), (last, -(2**31)))
    add("truncate", out, (row, -1), (last, -(2**31)))
    add("reindex", out, (-1, row), (row, -1), (S + 1, row), (row, S + 1), (-S, row))
    add("retain", out, (-1,), (N + 1,), (-N,), (2**31 - 1,))
    add("release", out, (-1,), (N + 1,), (-N,), (2**31 - 1,))
    if empty:
        add("fork", out, (-1, empty[0]), (S + 1, empty[0]), (-S, empty[-1]))
    add("fork", out, (row, -1), (row, S + 1), (row, -S))
    if owned:
        ids = [owned[-1]]
        add("share", out, (-1, ids, P), (S + 1, ids, P))
    if empty and owned:
        child, others = empty[-1], [owned[0], N + 1]
        add("share", out, (child, [-1], P), (child, [N + 1], P), (child, [0], P))
        add("share", out, (child, others, P + 1), (child, ids, -1), (child, ids * M, M * P + 1))
    if occupied:
        add("fork", core.FAULT_OCCUPIED, (row, row), (occupied[-1], row), (last, row))
        add("share", core.FAULT_OCCUPIED, (row, ids, P), (row, ids, 1), (occupied[-1], [], 0))
    for block in unowned[:1].tolist():
        add("retain", core.FAULT_FREE_BLOCK, (block,))
        add("release", core.FAULT_FREE_BLOCK, (block,))
        if empty:
            add("share", core.FAULT_FREE_BLOCK, (empty[0], [block], 1))
        if empty and owned:
            add("share", core.FAULT_FREE_BLOCK, (empty[0], [owned[0], block], 2 * P))
    return [entry for entry in bad if only in (None, entry.transition)]


def arguments(transition: str, *entries: tuple) -> tuple[np.ndarray, ...]:
    """Entries as the transition takes them, padded to the size that is compiled."""
    if transition == "share":
        return share_arrays(*entries)
    if transition in ("fork", "reindex"):
        return columns(entries)
    if transition in ("retain", "release"):
        return (padded([block for (block,) in entries], IDS, 0),)
    values = per_row([], fill=0 if transition == "allocate" else 2**31 - 1)
    for row, value in entries:
        values[row] = value
    return (values,)


def apply_to_core(state: BlockState, transition: str, *entries: tuple) -> BlockState:
    after = COMPILED[transition](state, *arguments(transition, *entries))
    return jax.device_get(after[0] if transition == "allocate" else after)


def apply_to_ledger(ledger: Ledger, transition: str, entry: tuple) -> None:
    if transition in ("fork", "share"):
        getattr(ledger, transition)(*entry)
    elif transition in ("retain", "release"):
        getattr(ledger, transition)(list(entry))
    else:
        getattr(ledger, transition)(dict([entry]))
