"""Checks the conservation laws of a `BlockState` on the host."""

import numpy as np

from paged_jax.core.state import BlockState


class AuditError(AssertionError):
    """A block state broke one of its laws; the message names the first wrong block."""


def audit(state: BlockState, external: np.ndarray | None = None) -> None:
    """Raises when blocks were lost, doubled, or counted wrongly.

    The laws: free plus allocated blocks make N; the blocks with a positive count are exactly the
    allocated ones; every count equals the owners that name the block; no id stands twice on the
    stack; the null block is untouched; a row holds ceil(length / P) blocks; no fault bit is set.

    Args:
      state: The state to check; it is read back to the host.
      external: i32[N+1], references held by owners other than rows; None means none.
    Raises: AuditError; ValueError for `external` of another shape.
    """
    if external is not None and np.shape(external) != (state.num_blocks + 1,):
        raise ValueError(f"external must be [{state.num_blocks + 1}], not {np.shape(external)}")
    num_blocks, num_free = state.num_blocks, int(state.num_free)
    stack = np.asarray(state.free_blocks)
    refcounts = np.asarray(state.refcounts)
    tables, lengths = np.asarray(state.block_tables), np.asarray(state.lengths)
    if int(state.faults):
        raise AuditError(f"fault bits are set: {int(state.faults):#b}")
    if not 0 <= num_free <= num_blocks:
        raise AuditError(f"num_free ({num_free}) is outside 0..{num_blocks}")

    def check(wrong: np.ndarray, law: str, **values: np.ndarray) -> None:
        if wrong.any():
            block = int(np.flatnonzero(wrong)[0])
            shown = ", ".join(f"{name} {array[block]}" for name, array in values.items())
            raise AuditError(f"block {block}: {law}" + (f" ({shown})" if shown else ""))

    free = stack[:num_free]
    outside = (free < 1) | (free > num_blocks)
    if outside.any():
        raise AuditError(f"block {free[outside][0]}: an id outside 1..{num_blocks} is on the stack")
    on_stack = np.bincount(free, minlength=num_blocks + 1)
    check(on_stack > 1, "stands more than once on the free stack", times=on_stack)
    if stack[num_free:].any():
        block = stack[num_free:][stack[num_free:] != 0][0]
        raise AuditError(f"block {block}: stands on the stack above num_free ({num_free})")

    held = -(-lengths // state.block_size)
    is_held = np.arange(tables.shape[1])[None, :] < held[:, None]
    wrong_rows = np.flatnonzero(
        (held > tables.shape[1])
        | (lengths < 0)
        | np.any(is_held != (tables != 0), axis=1)
        | np.any((tables < 0) | (tables > num_blocks), axis=1)
    )
    if wrong_rows.size:
        row = int(wrong_rows[0])
        ids = tables[row]
        wrong = np.flatnonzero((is_held[row] != (ids != 0)) | (ids < 0) | (ids > num_blocks))
        block = int(ids[wrong[0]]) if wrong.size else 0
        raise AuditError(
            f"block {block}: row {row} of length {lengths[row]} must hold {held[row]} blocks, "
            f"its table is {ids[: held[row] + 1].tolist()}"
        )
    owners = np.bincount(tables[is_held], minlength=num_blocks + 1)
    if external is not None:
        owners = owners + np.asarray(external)
    owners[0] = 0
    check(refcounts != owners, "its count differs from its owners", count=refcounts, owners=owners)
    check((refcounts > 0) & (on_stack > 0), "is free and has owners", count=refcounts)
    lost = (refcounts == 0) & (on_stack == 0)
    lost[0] = False
    check(lost, "is neither free nor owned")
