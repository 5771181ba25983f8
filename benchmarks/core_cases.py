"""Block states to time transitions on, and the same work for core and for the ledger."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import core
from paged_jax.core import BlockState
from paged_jax.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a block state, in the order of `create_block_state`."""

    num_blocks: int = 65536
    block_size: int = 16
    max_seqs: int = 256
    max_blocks_per_seq: int = 512


@dataclass(frozen=True)
class Case:
    """One piece of work, for core and for the ledger."""

    title: str
    start: tuple[BlockState, Ledger]
    transition: Callable  # (state, *args) -> state, or (state, Allocation)
    args: tuple
    on_ledger: Callable[[Ledger], object]


def all_cases() -> list[Case]:
    sizes = Sizes()
    rows = sizes.max_seqs
    full = make_start(sizes, [2005] * rows)  # 126 blocks a row, the last partly filled
    at_edge = make_start(sizes, [2000] * rows)
    pairs = make_start(sizes, [2005] * 128 + [0] * 128, [(row, row + 128) for row in range(128)])
    room = make_start(sizes, [2005] * 248 + [0] * 8)
    beams = make_start(sizes, [2005] + [0] * 255, [(0, 1), (0, 2), (0, 3)], append=4)
    ids = full[1].tables[0][:64]
    kept = make_start(sizes, [2005] * rows, retained=ids)

    one_each = dict.fromkeys(range(rows), 1)
    ones, named, every = (jnp.ones(rows, jnp.int32),), (jnp.array(ids),), jnp.arange(rows)
    sources = [1, 1, 0, 3]
    bounded = functools.partial(core.allocate, max_new_blocks=512)

    def grow(ledger: Ledger) -> None:
        ledger.allocate(one_each)

    def fork(children: range) -> tuple[tuple[jax.Array, jax.Array], Callable[[Ledger], None]]:
        def on_ledger(ledger: Ledger) -> None:
            for child in children:
                ledger.fork(0, child)

        return (jnp.zeros(len(children), jnp.int32), jnp.array(children)), on_ledger

    return [
        Case("allocate, no row grows", full, bounded, ones, grow),
        Case("allocate, every row grows", at_edge, bounded, ones, grow),
        Case("the same with max_new_blocks=None", at_edge, core.allocate, ones, grow),
        Case("allocate, 128 of 256 rows copy", pairs, bounded, ones, grow),
        Case("free 1 row", full, core.free, (every == 7,), lambda led: led.free([7])),
        Case("free 32 rows", full, core.free, (every < 32,), lambda led: led.free(range(32))),
        Case("fork, 1 child", room, core.fork, *fork(range(248, 249))),
        Case("fork, 8 children", room, core.fork, *fork(range(248, 256))),
        Case(
            "reindex 4 beams",
            beams,
            core.reindex,
            (jnp.arange(4), jnp.array(sources)),
            lambda led: led.reindex(dict(enumerate(sources))),
        ),
        Case("retain 64 ids", full, core.retain, named, lambda led: led.retain(ids)),
        Case("release 64 ids", kept, core.release, named, lambda led: led.release(ids)),
    ]


def make_start(
    sizes: Sizes,
    lengths: list[int],
    forks: Sequence[tuple[int, int]] = (),
    *,
    append: int = 0,
    retained: Sequence[int] = (),
) -> tuple[BlockState, Ledger]:
    """A state and a ledger after the same calls; `append` rows then take one token more."""
    state = core.create_block_state(**asdict(sizes))
    ledger = Ledger(**asdict(sizes))
    state, _ = core.checked.allocate(state, np.array(lengths, np.int32))
    ledger.allocate(dict(enumerate(lengths)))
    if forks:
        parents, children = np.array(forks, np.int32).T
        state = core.checked.fork(state, parents, children)
    for parent, child in forks:
        ledger.fork(parent, child)
    more = np.arange(sizes.max_seqs) < append
    state, _ = core.checked.allocate(state, more.astype(np.int32))
    ledger.allocate(dict.fromkeys(range(append), 1))
    if retained:
        state = core.checked.retain(state, np.array(retained, np.int32))
        ledger.retain(retained)
    return jax.block_until_ready(state), ledger


def check_same_ids(title: str, state: BlockState, ledger: Ledger) -> None:
    width = state.max_blocks_per_seq
    tables = [table + [0] * (width - len(table)) for table in ledger.tables]
    stack = state.free_blocks[: int(state.num_free)]
    for name, ours, theirs in (
        ("free stack", stack, ledger.free_blocks),
        ("tables", state.block_tables, tables),
        ("counts", state.refcounts, ledger.refcounts),
        ("lengths", state.lengths, ledger.lengths),
    ):
        if not np.array_equal(np.asarray(ours), np.asarray(theirs)):
            raise SystemExit(f"{title}: the {name} of core and ledger differ")


def copy_ledger(ledger: Ledger) -> Ledger:
    twin = copy.copy(ledger)
    twin.free_blocks, twin.refcounts = list(ledger.free_blocks), list(ledger.refcounts)
    twin.tables, twin.lengths = [list(table) for table in ledger.tables], list(ledger.lengths)
    return twin


copy_state = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
