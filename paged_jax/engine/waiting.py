"""The queue of sequences that hold no row, by rank."""

import heapq
from collections.abc import Iterator

from paged_jax.engine.request import Sequence


class WaitingQueue:
    """A priority queue from which any sequence can be taken; its cost does not grow with it."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], int, Sequence]] = []
        self._live: dict[Sequence, int] = {}
        self._num_pushed = 0

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence at the place of its rank."""
        assert sequence not in self._live
        self._num_pushed += 1
        self._live[sequence] = self._num_pushed
        heapq.heappush(self._heap, (sequence.rank, self._num_pushed, sequence))

    def pop(self) -> Sequence:
        """Takes the first one out. Raises: IndexError when nobody waits."""
        while True:
            _, number, sequence = heapq.heappop(self._heap)
            if self._live.get(sequence) == number:
                del self._live[sequence]
                return sequence

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence out, if it is in."""
        self._live.pop(sequence, None)
        # Entries of those who left stay in the heap until they come up, or are too many.
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._live

    def __iter__(self) -> Iterator[Sequence]:
        """In order of rank."""
        return iter(sorted(self._live, key=lambda sequence: sequence.rank))
