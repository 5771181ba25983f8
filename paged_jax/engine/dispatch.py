"""One plan at a time to the ledger and to the device, and its results back."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from paged_jax.config import ResolvedConfig
from paged_jax.core import KVCache
from paged_jax.engine.checks import Checker
from paged_jax.engine.recording import Recorder
from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.runner import Runner, tells_prompt
from paged_jax.engine.scheduler_state import Costs, SchedulerState
from paged_jax.engine.step import StepOutputs
from paged_jax.ledger import Ledger
from paged_jax.plan import Plan


@dataclass(kw_only=True)
class Issued:
    """A dispatch whose results have not been read."""

    plan: Plan
    sequences: list[Sequence]
    """One per segment: a result belongs to its sequence, whoever holds the row meanwhile."""
    result: StepOutputs
    number: int
    start_time: float
    told: dict[str, float]
    """What events tell of it."""


class Dispatcher:
    """Keeps what goes with plans: host images of swapped sequences, and checks in debug mode."""

    def __init__(self, runner: Runner, config: ResolvedConfig, *, is_checked: bool) -> None:
        self.images: dict[Sequence, tuple[KVCache, int]] = {}
        """Image and its number of blocks."""
        self.on_fault_point: Callable[[str], None] | None = None
        """Called at every fault point by its name, and may raise: for tests."""
        self._runner = runner
        self._config = config
        self._checker = Checker(config) if is_checked else None
        self.recorder = Recorder()

    def issue(
        self, plan: Plan, state: SchedulerState, requests: Mapping[str, Request]
    ) -> Issued | None:
        """Applies a plan to the ledger and on the device, without waiting for the device.

        Returns: None for a plan without tokens.
        """
        now = time.monotonic()
        sequences = [requests[s.request_id].sequences[s.index] for s in plan.segments]
        for sequence in sequences:
            if sequence.request.first_scheduled_time is None:
                sequence.request.first_scheduled_time = now
        swapped_out = {}
        for name, index, row in plan.swapped_out:
            swapped_out[requests[name].sequences[index]] = self._swap_out(state, row)
        self.fault("dispatch")
        self.recorder.before(plan, state.ledger)
        if self._checker is not None:
            self._checker.follow(plan, [s.owner for s in sequences], state.ledger)
        self.images |= swapped_out
        allocation = state.apply(plan, sequences)
        assert allocation.ok, "the ledger refused a plan"
        told = self.recorder.after(plan, allocation, state, requests)
        images = []
        for name, index, row, first in plan.swapped_in:
            self.fault("swap_in")
            image, num_blocks = self.images.pop(requests[name].sequences[index])
            images.append((state.ledger.tables[row][first:num_blocks], image, first))
        for segment, sequence in zip(plan.segments if self.images else (), sequences, strict=False):
            if segment.is_admission:
                self.images.pop(sequence, None)  # the cache had as much
        if allocation.copies:
            self.fault("copy")
        result = self._runner.issue(plan, sequences, images)
        if self._checker is not None:
            result = self._checker.check(plan, allocation, result, self._runner, state.ledger)
        if result is None:
            return None
        return Issued(
            plan=plan,
            sequences=sequences,
            result=result,
            number=self.recorder.num_dispatches,
            start_time=now,
            told=told,
        )

    def read(self, issued: Issued, costs: Costs) -> StepOutputs:
        """Waits for the results of a dispatch; numpy arrays."""
        self.fault("read")
        pairs = zip(issued.plan.segments, issued.sequences, strict=True)
        if not any(tells_prompt(segment, sequence) for segment, sequence in pairs):
            issued.result = dataclasses.replace(issued.result, prompt={})
        result: StepOutputs = jax.device_get(issued.result)
        assert bool(result.ok), "the device ran out of blocks that the ledger had"
        self.recorder.read(issued.number, issued.start_time, issued.told)
        prefilled = sum(s.num_tokens for s in issued.plan.segments if not s.is_decode)
        if prefilled:
            seconds = (time.monotonic() - issued.start_time) / prefilled
            costs.recomputed_token = _mean(costs.recomputed_token, seconds)
        return result

    def reset(self) -> None:
        """A new pool; images of those who still wait for them stay."""
        if self._checker is not None:
            self._checker = self._checker.renewed(self._config)
        self._runner.reset()
        self.images = {s: image for s, image in self.images.items() if s.swapped_tokens}

    def adopt(self, images: dict[Sequence, tuple[KVCache, int]], ledger: Ledger) -> None:
        """Goes on with images, and blocks that are in the pool, of another dispatcher."""
        self.images = images
        if self._checker is not None:
            self._checker = Checker(self._config)
            self._checker.adopt(self._runner, ledger, images)

    def fault(self, point: str) -> None:
        """A place where tests let something fail."""
        if self.on_fault_point is not None:
            self.on_fault_point(point)

    def _swap_out(self, state: SchedulerState, row: int) -> tuple[KVCache, int]:
        self.fault("swap_out")
        start = time.monotonic()
        table = state.ledger.tables[row]
        image = self._runner.swap_out(table)
        seconds = 2 * (time.monotonic() - start) / max(1, len(table))
        state.costs.swapped_block = _mean(state.costs.swapped_block, seconds)
        return image, len(table)


def _mean(old: float | None, new: float) -> float:
    """A mean in which the last few count most."""
    return new if old is None else 0.8 * old + 0.2 * new
