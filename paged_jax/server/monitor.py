"""What the dashboard shows of an engine, as one JSON-able value per moment."""

import time
from collections import deque
from typing import Any

from paged_jax.engine.engine import Engine
from paged_jax.ledger import Ledger

MAX_CELLS = 2048
"""Cells of the block map; a larger pool shares cells."""

MAX_LISTED = 50
"""Requests per table."""

FREE, CACHED, OWNED, SHARED = range(4)
"""What a block is, from the least to the most important."""


class Monitor:
    """Looks at an engine between two dispatches; one for all who watch."""

    def __init__(self) -> None:
        self._rates: deque[tuple[float, int]] = deque(maxlen=8)
        self._state: dict[str, Any] = {}
        self._taken = 0.0

    def look(self, engine: Engine) -> dict[str, Any]:
        """The state of this moment; in the engine thread.

        `blocks` are cells of [kind, number of the owner in `owners`, or -1]; `kinds` counts blocks.
        """
        now = time.monotonic()
        if now - self._taken < 0.2:
            return self._state  # of another watcher
        self._taken = now
        stats = engine.stats()
        # The count starts over when an engine is reset.
        if self._rates and stats["generation_tokens"] < self._rates[-1][1]:
            self._rates.clear()
        self._rates.append((now, stats["generation_tokens"]))
        (then, before), (last, count) = self._rates[0], self._rates[-1]
        running = list(engine.state.running)
        owners = list(dict.fromkeys(s.request.request_id for s in running))
        numbers = {s.row: owners.index(s.request.request_id) for s in running if s.row is not None}
        waiting = engine.state.waiting
        listed = list(waiting)[:MAX_LISTED] if len(waiting) <= 1000 else []
        kinds, holders = block_kinds(engine.state.ledger, numbers)
        self._state = {
            "stats": stats,
            "tokens_per_s": (count - before) / (last - then) if last > then else 0.0,
            "block_size": engine.config.block_size,
            "kinds": [kinds.count(kind) for kind in (FREE, CACHED, OWNED, SHARED)],
            "blocks": block_map(kinds, holders),
            "owners": owners,
            "running": [_row(s, now) for s in running[:MAX_LISTED]],
            "waiting": [_row(s, now) for s in listed],
        }
        return self._state


def block_kinds(ledger: Ledger, numbers: dict[int, int]) -> tuple[list[int], list[int]]:
    """Kind and owner of each block, block 1 first; who owns nothing is -1.

    Args:
      numbers: Owner of each row.
    """
    kinds = [CACHED if count else FREE for count in ledger.refcounts]
    owners = [-1] * len(kinds)
    for row, table in enumerate(ledger.tables):
        owner = numbers.get(row, -1)
        for block in table:
            kinds[block] = SHARED if kinds[block] >= OWNED else OWNED
            owners[block] = owner
    return kinds[1:], owners[1:]


def block_map(kinds: list[int], owners: list[int]) -> list[list[int]]:
    """Cells of [kind, owner]: one per block, or per group of neighbours where there are many.

    A group shows the most important of its blocks, the first of these.
    """
    group = -(-len(kinds) // MAX_CELLS)
    if group == 1:
        return [list(cell) for cell in zip(kinds, owners, strict=True)]
    cells = []
    for start in range(0, len(kinds), group):
        part = kinds[start : start + group]
        kind = max(part)
        cells.append([kind, owners[start + part.index(kind)]])
    return cells


def _row(sequence: Any, now: float) -> dict[str, Any]:
    request = sequence.request
    return {
        "id": request.request_id,
        "choice": sequence.index,
        "prompt_tokens": sequence.num_prompt,
        "output_tokens": len(sequence.tokens) - sequence.num_prompt,
        "computed": sequence.num_computed,
        "age_s": round(now - request.arrival_time, 3),
        "preemptions": request.num_preemptions,
        "priority": request.priority,
        "swapped": sequence.swapped_tokens > 0,
    }
