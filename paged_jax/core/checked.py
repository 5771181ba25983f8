"""The transitions with an error in place of a fault bit, for the host.

Each takes and returns what its namesake in `paged_jax.core` does, and raises ValueError naming the
first entry that breaks a rule. Not for use under `jit`: the fault bits are read back. Running out
of blocks is an answer and not a fault: `allocate` still says so in its `Allocation`.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from paged_jax.core import allocation
from paged_jax.core import rows as transitions
from paged_jax.core.allocation import Allocation
from paged_jax.core.state import (
    FAULT_FREE_BLOCK,
    FAULT_OCCUPIED,
    FAULT_OUT_OF_RANGE,
    FAULT_REPEATED,
    BlockState,
)

_allocate = jax.jit(allocation.allocate, static_argnames="max_new_blocks")
_free = jax.jit(transitions.free)
_truncate = jax.jit(transitions.truncate)
_fork = jax.jit(transitions.fork)
_share = jax.jit(transitions.share)
_reindex = jax.jit(transitions.reindex)
_retain = jax.jit(transitions.retain)
_release = jax.jit(transitions.release)

_RULES = {
    FAULT_OUT_OF_RANGE: "is out of range: rows are 0..{last_row}, blocks 1..{num_blocks}, "
    "tokens of a row 0..{most_tokens}",
    FAULT_OCCUPIED: "names a row that holds tokens; free it first",
    FAULT_FREE_BLOCK: "names a block that nobody owns",
    FAULT_REPEATED: "names a row or block twice",
}


def allocate(
    state: BlockState, new_tokens: ArrayLike, *, max_new_blocks: int | None = None
) -> tuple[BlockState, Allocation]:
    """See `paged_jax.core.allocate`. Raises: ValueError for a negative number of tokens."""
    new_tokens = _ints(new_tokens, "new_tokens", state.max_seqs)
    negative = np.flatnonzero(np.asarray(new_tokens) < 0)
    if negative.size:
        row = negative[0]
        raise ValueError(f"allocate: new_tokens[{row}] ({new_tokens[row]}) must be at least 0")
    return _allocate(state, new_tokens, max_new_blocks=max_new_blocks)


def free(state: BlockState, rows: ArrayLike) -> BlockState:
    """See `paged_jax.core.free`. Raises: ValueError for a mask that is not bool[S]."""
    mask = jnp.asarray(rows)
    if mask.dtype != bool or mask.shape != (state.max_seqs,):
        raise ValueError(f"free: rows must be bool[{state.max_seqs}], not {mask.dtype}{mask.shape}")
    return _free(state, mask)


def truncate(state: BlockState, lengths: ArrayLike) -> BlockState:
    """See `paged_jax.core.truncate`. Raises: ValueError for a negative length."""
    lengths = _ints(lengths, "lengths", state.max_seqs)
    return _check("truncate", _truncate, state, {"lengths": lengths}, padding=2**31 - 1)


def fork(state: BlockState, parents: ArrayLike, children: ArrayLike) -> BlockState:
    """See `paged_jax.core.fork`. Raises: ValueError for a fault."""
    entries = {"parents": _ints(parents, "parents"), "children": _ints(children, "children")}
    return _check("fork", _fork, state, entries, padding=state.max_seqs)


def share(
    state: BlockState, rows: ArrayLike, block_ids: ArrayLike, num_tokens: ArrayLike
) -> BlockState:
    """See `paged_jax.core.share`. Raises: ValueError for a fault."""
    entries = {
        "rows": _ints(rows, "rows"),
        "block_ids": _ints(block_ids, "block_ids", ndim=2),
        "num_tokens": _ints(num_tokens, "num_tokens"),
    }
    return _check("share", _share, state, entries, padding=state.max_seqs)


def reindex(state: BlockState, rows: ArrayLike, sources: ArrayLike) -> BlockState:
    """See `paged_jax.core.reindex`. Raises: ValueError for a fault."""
    entries = {"rows": _ints(rows, "rows"), "sources": _ints(sources, "sources")}
    return _check("reindex", _reindex, state, entries, padding=state.max_seqs)


def retain(state: BlockState, block_ids: ArrayLike) -> BlockState:
    """See `paged_jax.core.retain`. Raises: ValueError for a fault."""
    entries = {"block_ids": _ints(block_ids, "block_ids")}
    return _check("retain", _retain, state, entries, padding=0)


def release(state: BlockState, block_ids: ArrayLike) -> BlockState:
    """See `paged_jax.core.release`. Raises: ValueError for a fault."""
    entries = {"block_ids": _ints(block_ids, "block_ids")}
    return _check("release", _release, state, entries, padding=0)


def _ints(values: ArrayLike, name: str, size: int | None = None, *, ndim: int = 1) -> jax.Array:
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.integer) and array.size:
        raise ValueError(f"{name} must be integers, not {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, not shape {array.shape}")
    if size is not None and array.shape != (size,):
        raise ValueError(f"{name} must have one entry per row ({size}), not shape {array.shape}")
    limits = np.iinfo(np.int32)
    if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        raise ValueError(f"{name} must fit 32 bits")
    return jnp.asarray(array.astype(np.int32))


def _check(
    name: str,
    transition: Callable[..., BlockState],
    state: BlockState,
    entries: dict[str, jax.Array],
    *,
    padding: int,
) -> BlockState:
    """Applies a transition whose first argument may be padded; raises for its first bad entry."""
    sizes = {key: array.shape[0] for key, array in entries.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{name}: arguments must have as many entries as each other, not {sizes}")
    # Bits that an earlier call left are put aside, so that they cannot hide a new one.
    clean = dataclasses.replace(state, faults=jnp.zeros_like(state.faults))
    after = transition(clean, *entries.values())
    if not int(after.faults):
        return dataclasses.replace(after, faults=state.faults)
    first, *others = entries.values()
    for i in range(first.shape[0]):
        # The call again with its first entries only: the rules stay where they are, in core.
        bits = int(transition(clean, first.at[i + 1 :].set(padding), *others).faults)
        if bits:
            shown = ", ".join(
                f"{key}[{i}] = {np.asarray(array[i])}" for key, array in entries.items()
            )
            rules = " and ".join(rule for bit, rule in _RULES.items() if bits & bit)
            rules = rules.format(
                last_row=state.max_seqs - 1,
                num_blocks=state.num_blocks,
                most_tokens=state.max_blocks_per_seq * state.block_size,
            )
            raise ValueError(f"{name}: entry {i} ({shown}) {rules}")
    raise AssertionError("a fault without an entry")
