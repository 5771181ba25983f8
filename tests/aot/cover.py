"""A small set of entries in which every two values of two factors meet, where they may meet.

The full product takes an hour to compile, and a kernel that fails to compile mostly does so
for one value or for two that meet (a head count with a block size). A dtype may fail in one kernel
on one target, which is three: those meet too.
"""

import functools
import heapq
import itertools

from tests.aot.shapes import FACTORS, Entry, is_served

STRENGTH = (*itertools.combinations(FACTORS, 2), ("target", "kernel", "pool"))
"""The factors all of whose values meet."""


def served_entries() -> list[Entry]:
    """The product of the factors, without what no one may run, in a fixed order."""
    entries = (Entry(*values) for values in itertools.product(*FACTORS.values()))
    return [entry for entry in entries if is_served(entry)]


@functools.cache
def covering_entries() -> tuple[Entry, ...]:
    """Greedy: the entry in which most still have to meet, the first of equals."""
    entries = served_entries()
    missing = set().union(*map(_meetings, entries))
    # Gains only shrink, so an entry whose gain is up to date and still the largest is the choice.
    heap = [(-len(STRENGTH), index) for index in range(len(entries))]
    chosen = []
    while missing:
        _, index = heapq.heappop(heap)
        meetings = _meetings(entries[index])
        candidate = (-len(meetings & missing), index)
        if heap and candidate > heap[0]:
            heapq.heappush(heap, candidate)
            continue
        chosen.append(entries[index])
        missing -= meetings
    return tuple(chosen)


def _meetings(entry: Entry) -> set[tuple]:
    """The values of the entry that meet in it, each with its factors."""
    return {(factors, tuple(getattr(entry, f) for f in factors)) for factors in STRENGTH}
