"""Turns what an engine does into events; nothing is done while nobody listens."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from paged_jax.engine.events import Event, Kind
from paged_jax.engine.request import Request
from paged_jax.engine.scheduler_state import SchedulerState
from paged_jax.ledger import Ledger, LedgerAllocation
from paged_jax.outputs import FinishReason
from paged_jax.plan import Plan

_logger = logging.getLogger("paged_jax")


class Recorder:
    """Numbers dispatches and tells a sink of them, until it raises: no request ends by that."""

    def __init__(self) -> None:
        self.sink: Callable[[Event], None] | None = None
        self.num_dispatches = 0
        self._held: list[int] = []
        self._last_read = 0.0

    def added(self, request: Request) -> None:
        """A request was taken in."""
        self._tell("add", request, count=len(request.prompt_token_ids))

    def before(self, plan: Plan, ledger: Ledger) -> None:
        """A plan is about to be applied."""
        self.num_dispatches += 1
        if self.sink is None:
            return
        for row in plan.free_rows:
            table = tuple(ledger.tables[row])
            self._tell("free", ids=table, count=len(table), data={"row": row})
        if plan.release_ids:
            self._tell("evict", ids=plan.release_ids, count=len(plan.release_ids))
        self._held = [len(table) for table in ledger.tables]
        for row in plan.free_rows:
            self._held[row] = 0

    def after(
        self,
        plan: Plan,
        allocation: LedgerAllocation,
        state: SchedulerState,
        requests: Mapping[str, Request],
    ) -> dict[str, float]:
        """A plan was applied; returns what `read` tells of the dispatch."""
        if self.sink is None:
            return {}
        ledger = state.ledger
        for name, _ in plan.preempted:
            self._tell("preempt", requests[name])
        for name, _, row in plan.swapped_out:
            self._tell("swap_out", requests[name], data={"row": row})
        for name, _, row, first in plan.swapped_in:
            ids = tuple(ledger.tables[row][first:])
            self._tell("swap_in", requests[name], ids=ids, count=len(ids))
        shared = {row: num_tokens for row, _, num_tokens in plan.shares}
        for parent, child in plan.forks + plan.branches:
            self._tell("fork", count=len(ledger.tables[child]), data={"row": child, "of": parent})
            self._held[child] = self._held[parent]
        for segment in plan.segments:
            request = requests[segment.request_id]
            if segment.is_admission:
                self._tell("admit", request, count=shared.get(segment.row, 0))
                self._held[segment.row] += len(
                    next((ids for row, ids, _ in plan.shares if row == segment.row), ())
                )
            if ids := tuple(ledger.tables[segment.row][self._held[segment.row] :]):
                self._tell("allocate", request, ids=ids, count=len(ids))
        for pair in allocation.copies.values():
            self._tell("copy", ids=pair, count=1)
        return {
            "num_tokens": sum(segment.num_tokens for segment in plan.segments),
            "num_rows": len(plan.segments),
            "num_decode": plan.num_decode,
            "num_running": len(state.running),
            "num_waiting": len(state.waiting),
            "num_swapped": sum(s.swapped_tokens > 0 for s in state.waiting),
            "num_free": ledger.num_free,
            "num_cached": state.num_cached,
        }

    def read(self, number: int, start_time: float, data: dict[str, float]) -> None:
        """The results of a dispatch were read; with overlap it began when the one before ended."""
        now = time.monotonic()
        seconds = now - max(start_time, self._last_read)
        self._last_read = now
        if data:
            data = data | {"seconds": seconds}
            self._send(Event(time=now, dispatch=number, kind="dispatch", data=data))

    def first_token(self, request: Request) -> None:
        """The first token of a request was read."""
        self._tell("first_token", request, count=1)

    def ended(self, request: Request, reason: FinishReason) -> None:
        """A request ended."""
        count = sum(len(sequence.output_ids) for sequence in request.sequences)
        self._tell("abort" if reason == "abort" else "finish", request, count=count)

    def failed(self) -> None:
        """A dispatch failed."""
        self._tell("fault")

    def _tell(self, kind: Kind, request: Request | None = None, **fields: Any) -> None:
        if self.sink is not None:
            name = None if request is None else request.request_id
            now, number = time.monotonic(), self.num_dispatches
            self._send(Event(time=now, dispatch=number, kind=kind, request_id=name, **fields))

    def _send(self, event: Event) -> None:
        if self.sink is None:
            return
        try:
            self.sink(event)
        except Exception:
            _logger.exception("events raised, and gets no more of them")
            self.sink = None
