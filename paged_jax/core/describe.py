"""A block state in words, for debugging."""

from collections import defaultdict

import numpy as np
from jax.typing import ArrayLike

from paged_jax.core.audit import AuditError, audit
from paged_jax.core.state import BlockState


def describe(
    state: BlockState,
    *,
    row: int | None = None,
    block: int | None = None,
    external: ArrayLike | None = None,
    written: ArrayLike | None = None,
) -> str:
    """Says who holds which block, what is wasted, and whether the sums add up.

    Args:
      state: Read back to the host.
      row: Only this row; None: all that hold tokens.
      block: Only this block: where it stands in which row, or in the free stack.
      external: i32[N+1], references held by owners other than rows, as for `audit`.
      written: i32[S], tokens per row whose keys and values exist, such as `RowState.position`;
        None: all. The rest is reserved.
    Raises: ValueError for a row or block out of range, for both, or for arrays of another shape.
    """
    for name, values, size in (
        ("external", external, state.num_blocks + 1),
        ("written", written, state.max_seqs),
    ):
        if values is not None and np.shape(values) != (size,):
            raise ValueError(f"{name} must be [{size}], not {np.shape(values)}")
    if row is not None and block is not None:
        raise ValueError("row and block must not both be given")
    view = _View(state, external, written)
    if row is not None and not 0 <= row < state.max_seqs:
        raise ValueError(f"row ({row}) must be in 0..{state.max_seqs - 1}")
    if block is not None and not 0 <= block <= state.num_blocks:
        raise ValueError(f"block ({block}) must be in 0..{state.num_blocks}")
    if block is not None:
        return view.block_line(block)
    if row is not None:
        return "\n".join(view.row_lines(row))
    lines = view.pool_lines()
    for number in np.flatnonzero(view.lengths != 0).tolist():
        lines += ["", *view.row_lines(number)]
    return "\n".join(lines)


class _View:
    """Host copies of a state, and what is derived from them."""

    def __init__(
        self, state: BlockState, external: ArrayLike | None, written: ArrayLike | None
    ) -> None:
        self.state = state
        self.size = state.block_size
        self.tables = np.asarray(state.block_tables)
        self.lengths = np.asarray(state.lengths)
        self.counts = np.asarray(state.refcounts)
        self.stack = np.asarray(state.free_blocks)[: max(0, int(state.num_free))]
        self.external = np.zeros_like(self.counts) if external is None else np.asarray(external)
        self.written = self.lengths if written is None else np.asarray(written)
        self.owners: dict[int, list[str]] = defaultdict(list)
        for row, table in enumerate(self.tables):
            for logical in range(self.held(row)):
                self.owners[int(table[logical])].append(f"row {row} [{logical}]")
        for block in np.flatnonzero(self.external).tolist():
            self.owners[block].append(f"{self.external[block]} outside")

    def held(self, row: int) -> int:
        """Blocks that a row holds."""
        return min(-(-int(self.lengths[row]) // self.size), self.tables.shape[1])

    def count(self, block: int) -> int:
        """References of a block; 0 for an id that is none."""
        return int(self.counts[block]) if 0 <= block < len(self.counts) else 0

    def filled(self, lengths: np.ndarray) -> int:
        """Slots of used blocks that rows of these lengths fill, a shared block counted once."""
        filled = np.where(self.external > 0, self.size, 0)  # others hold whole blocks
        for row, length in enumerate(lengths.tolist()):
            ids = self.tables[row, : self.held(row)]
            inside = np.clip(length - np.arange(len(ids)) * self.size, 0, self.size)
            is_block = (ids >= 0) & (ids < len(filled))
            np.maximum.at(filled, ids[is_block], inside[is_block])
        return int(filled[1:].sum())

    def pool_lines(self) -> list[str]:
        """Totals, fragmentation, conservation, and the verdict of the audit."""
        total, free = self.state.num_blocks, int(self.state.num_free)
        used = int(np.sum(self.counts[1:] > 0))
        rows = sum(self.held(row) for row in range(self.state.max_seqs))
        outside = int(self.external.sum())
        slots = used * self.size
        written, held = self.filled(self.written), self.filled(self.lengths)
        unused = (slots - written) / slots if slots else 0.0
        shared = int(np.sum(self.counts > 1))
        lines = [
            f"{total} blocks of {self.size} tokens: {used} used ({shared} shared), {free} free",
            f"conservation: {free} free + {used} used = {free + used} of {total}; "
            f"{rows} references of rows + {outside} outside = {rows + outside} of "
            f"{int(self.counts.sum())} counted",
            f"fragmentation: used blocks have {slots} slots, {written} written, "
            f"{held - written} reserved, {slots - held} past the end of a row "
            f"({unused:.1%} not in use)",
            f"free stack, top first: {_ids(self.stack[::-1])}",
        ]
        try:
            audit(self.state, self.external)
        except AuditError as error:
            return [*lines, f"AUDIT: {error}"]
        return [*lines, "audit: clean"]

    def row_lines(self, row: int) -> list[str]:
        """Where each position of a row lies, and where its next token goes."""
        length = int(self.lengths[row])
        head = f"row {row}: {_number(length, 'token')} in {_number(self.held(row), 'block')}"
        if self.written[row] < length:
            head += f", of them {length - int(self.written[row])} reserved"
        lines = [f"{head}; {self._next(row)}"]
        if length:
            lines.append("  logical  positions    block  slots          count  also held by")
        for logical in range(self.held(row)):
            block = int(self.tables[row, logical])
            first, end = logical * self.size, min((logical + 1) * self.size, length)
            slots = (block * self.size, block * self.size + end - first - 1)
            others = [owner for owner in self.owners[block] if owner != f"row {row} [{logical}]"]
            lines.append(
                f"  {logical:<7}  {_span(first, end - 1):<11}  {block:<5}  {_span(*slots):<13}  "
                f"{self.count(block):<5}  {', '.join(others)}{self._wrong(block)}".rstrip()
            )
        return lines

    def block_line(self, block: int) -> str:
        """Owners of one block, and its place in the free stack."""
        if block == 0:
            return "block 0: the null block, never handed out; padding is written here"
        depth = np.flatnonzero(self.stack[::-1] == block)
        owners = self.owners.get(block, [])
        text = f"block {block}: count {self.counts[block]}, "
        text += f"held by {', '.join(owners)}" if owners else "held by nobody"
        for place in depth.tolist():
            text += f", free (to be handed out after {_number(place, 'other')})"
        return text + self._wrong(block)

    def _next(self, row: int) -> str:
        """What appending one token to this row alone would do."""
        length = int(self.lengths[row])
        logical, offset = divmod(length, self.size)
        if logical >= self.tables.shape[1]:
            return "its table is full"
        if not offset:
            return f"position {length} takes a new block"
        block = int(self.tables[row, logical])
        count = self.count(block)
        how = "in place" if count <= 1 else f"after a copy (count {count})"
        return f"position {length} goes to block {block}, offset {offset}, {how}"

    def _wrong(self, block: int) -> str:
        """A mark on blocks whose count, owners and free stack contradict each other."""
        if block == 0:
            return "  <- WRONG: the null block"
        if not 0 < block < len(self.counts):
            return "  <- WRONG: no such block"
        owners = len([owner for owner in self.owners.get(block, []) if owner.startswith("row")])
        owners += int(self.external[block])
        is_free = bool(np.any(self.stack == block))
        if self.counts[block] != owners:
            return f"  <- WRONG: count {self.counts[block]}, {owners} owners"
        if is_free == (owners > 0):
            return "  <- WRONG: owned and free" if is_free else "  <- WRONG: neither owned nor free"
        return ""


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _ids(ids: np.ndarray, most: int = 16) -> str:
    shown = " ".join(map(str, ids[:most].tolist()))
    rest = len(ids) - most
    return (shown or "empty") + (f" ... and {rest} more" if rest > 0 else "")
