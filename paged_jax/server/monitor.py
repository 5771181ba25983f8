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

        `blocks` are cells of [kind, number of the owner in `owners`, or -1].
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
        self._state = {
            "stats": stats,
            "tokens_per_s": (count - before) / (last - then) if last > then else 0.0,
            "block_size": engine.config.block_size,
            "blocks": block_map(engine.state.ledger, numbers),
            "owners": owners,
            "running": [_row(s, now) for s in running[:MAX_LISTED]],
            "waiting": [_row(s, now) for s in listed],
        }
        return self._state


def block_map(ledger: Ledger, numbers: dict[int, int]) -> list[list[int]]:
    """Kind and owner of each block, or of each group of neighbours where there are many.

    Args:
      numbers: Owner of each row.
    """
    cells = [[FREE, -1] for _ in range(ledger.num_blocks)]
    for row, table in enumerate(ledger.tables):
        for block in table:
            cell = cells[block - 1]
            cell[0], cell[1] = (OWNED if cell[0] == FREE else SHARED), numbers.get(row, -1)
    for block, count in enumerate(ledger.refcounts[1:]):
        if count and cells[block][0] == FREE:
            cells[block][0] = CACHED
    group = -(-len(cells) // MAX_CELLS)
    return [max(cells[i : i + group]) for i in range(0, len(cells), group)]


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
