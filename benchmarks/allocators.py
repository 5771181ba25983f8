"""Three ways to give requests their KV slots: a segment of the most, a growing segment, blocks.

Slots are numbered; nothing is stored. A request is named by an integer.
"""

import bisect
from typing import Protocol

from paged_jax.ledger import Ledger
from paged_jax.shapes import ceil_div


class Allocator(Protocol):
    """A pool of `size` slots."""

    name: str
    moved: int
    """Tokens that were copied from slot to slot."""

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        ...

    @property
    def largest(self) -> int:
        """Slots that a request could be given at once."""
        ...

    def wanted(self, tokens: int) -> int:
        """Slots that a request of so many tokens asks for when it starts."""
        ...

    def admit(self, request: int, tokens: int) -> bool:
        """Gives a new request its slots, if there are any."""
        ...

    def grow(self, request: int, tokens: int) -> bool:
        """Makes room for so many tokens in all."""
        ...

    def release(self, request: int) -> None:
        """Takes all slots back."""
        ...


class Segments:
    """Segments of slots, each request in one; the first hole that is large enough is taken."""

    def __init__(self, size: int) -> None:
        self.size, self.moved = size, 0
        self.segments: dict[int, tuple[int, int]] = {}  # request -> start, length
        self._starts: list[tuple[int, int, int]] = []  # start, length, request; in order

    @property
    def free(self) -> int:
        return self.size - sum(length for _, length in self.segments.values())

    @property
    def largest(self) -> int:
        return max((length for _, length in self.holes()), default=0)

    def holes(self) -> list[tuple[int, int]]:
        """(start, length) of what lies between segments, in order."""
        found, end = [], 0
        for start, length, _ in [*self._starts, (self.size, 0, -1)]:
            if start > end:
                found.append((end, start - end))
            end = start + length
        return found

    def release(self, request: int) -> None:
        start, length = self.segments.pop(request)
        self._starts.remove((start, length, request))

    def _put(self, request: int, start: int, length: int) -> None:
        self.segments[request] = start, length
        bisect.insort(self._starts, (start, length, request))

    def _first_fit(self, length: int) -> int | None:
        return next((start for start, hole in self.holes() if hole >= length), None)


class Reserving(Segments):
    """Each request has a segment for the longest that it may become."""

    name = "reserve the maximum"

    def __init__(self, size: int, longest: int) -> None:
        super().__init__(size)
        self._longest = longest

    def wanted(self, tokens: int) -> int:
        return self._longest

    def admit(self, request: int, tokens: int) -> bool:
        start = self._first_fit(self._longest)
        if start is None:
            return False
        self._put(request, start, self._longest)
        return True

    def grow(self, request: int, tokens: int) -> bool:
        return tokens <= self._longest


class Growing(Segments):
    """A segment for the prompt, twice as long when it is full: where it lies, else in the first
    hole, else after all others have been pushed together."""

    name = "contiguous, growing"

    def __init__(self, size: int, longest: int) -> None:
        super().__init__(size)
        self._longest = longest
        self._tokens: dict[int, int] = {}

    def wanted(self, tokens: int) -> int:
        length = 16
        while length < tokens:
            length *= 2
        return min(length, self._longest)

    def admit(self, request: int, tokens: int) -> bool:
        length = self.wanted(tokens)
        start = self._first_fit(length)
        if start is None:
            return False
        self._put(request, start, length)
        self._tokens[request] = tokens
        return True

    def grow(self, request: int, tokens: int) -> bool:
        start, length = self.segments[request]
        self._tokens[request] = tokens
        if tokens <= length:
            return True
        longer = min(2 * length, self._longest)
        if self.free < longer - length:
            return False
        self.release(request)
        if any(hole <= start and start + longer <= hole + size for hole, size in self.holes()):
            self._put(request, start, longer)
            return True
        found = self._first_fit(longer)
        if found is None:
            found = self._compact()
        self._put(request, found, longer)
        self.moved += tokens - 1
        return True

    def _compact(self) -> int:
        """Pushes all segments to the start; returns where the only hole begins."""
        end, kept = 0, list(self._starts)
        self._starts.clear()
        for start, length, request in kept:
            if start != end:
                self.moved += self._tokens[request]
            self._put(request, end, length)
            end += length
        return end


class Paged:
    """Blocks in any order, by the ledger of the engine."""

    def __init__(self, size: int, longest: int, block_size: int, max_seqs: int) -> None:
        self.name = f"paged, blocks of {block_size}"
        self.moved = 0
        self.block_size = block_size
        self.ledger = Ledger(
            size // block_size, block_size, max_seqs, ceil_div(longest, block_size)
        )
        self._rows: dict[int, int] = {}
        self._idle = list(range(max_seqs))

    @property
    def free(self) -> int:
        return self.ledger.num_free * self.block_size

    @property
    def largest(self) -> int:
        """A request takes any blocks, so all of them."""
        return self.free

    def wanted(self, tokens: int) -> int:
        return ceil_div(tokens, self.block_size) * self.block_size

    def admit(self, request: int, tokens: int) -> bool:
        if not self._idle or self.wanted(tokens) > self.free:
            return False
        self._rows[request] = row = self._idle.pop()
        return self.ledger.allocate({row: tokens}).ok

    def grow(self, request: int, tokens: int) -> bool:
        row = self._rows[request]
        return self.ledger.allocate({row: tokens - self.ledger.lengths[row]}).ok

    def release(self, request: int) -> None:
        row = self._rows.pop(request)
        self.ledger.free([row])
        self._idle.append(row)
