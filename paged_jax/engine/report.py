"""Figures of a run from its events: rates, latencies, and how full batch and blocks were."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paged_jax.engine.events import Event
from paged_jax.engine.occupancy import BlockUse, KVWaste, block_uses
from paged_jax.ledger import Ledger


class RunLog:
    """Collects the events of a run and looks at its blocks; pass it as `events`.

    Args:
      max_model_len: Tokens that a contiguous cache would reserve per row, to compare with.
      forward: Is handed every event too.
      keeps_blocks: Whether to keep a picture of the blocks at their fullest.
    """

    def __init__(
        self,
        max_model_len: int,
        *,
        forward: Callable[[Event], None] | None = None,
        keeps_blocks: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.fullest: list[BlockUse] = []
        """What blocks were used for when rows held most of them."""
        self._forward = forward
        self._keeps_blocks = keeps_blocks
        self._waste = KVWaste(max_model_len=max_model_len)
        self._most = 0

    def __call__(self, event: Event) -> None:
        """Takes an event."""
        self.events.append(event)
        if self._forward is not None:
            self._forward(event)

    def look(self, ledger: Ledger, names: Callable[[], Mapping[int, str]]) -> None:
        """Counts the blocks of this moment, after a dispatch.

        Args:
          names: What to call each row, asked only when a picture is kept.
        """
        num_held = self._waste.add(ledger)
        if self._keeps_blocks and num_held > self._most:
            self._most = num_held
            self.fullest = block_uses(ledger, names())

    def figures(self) -> dict[str, float]:
        """`summary`, and the part of the slots that was wasted."""
        return {
            **summary(self.events),
            "kv_waste_fraction": self._waste.fraction,
            "contiguous_waste_fraction": self._waste.contiguous_fraction,
            **self._waste.means(),
        }


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Times of requests in seconds, each list in the order in which requests ended."""

    finished_at: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    """From arrival to the first token."""
    total: list[float] = field(default_factory=list)
    """From arrival to the end."""
    per_token: list[float] = field(default_factory=list)
    """From the first token to the end, per token; of requests that got more than one."""


def latencies(events: Iterable[Event]) -> Latencies:
    """Times of the requests that finished; those aborted or still running are left out."""
    added: dict[str | None, float] = {}
    first: dict[str | None, float] = {}
    found = Latencies()
    for event in events:
        if event.kind == "add":
            added[event.request_id] = event.time
            first.pop(event.request_id, None)
        elif event.kind == "first_token":
            first.setdefault(event.request_id, event.time)
        elif event.kind == "finish" and event.request_id in added:
            start = added.pop(event.request_id)
            found.finished_at.append(event.time)
            begun = first.pop(event.request_id, event.time)
            found.first_token.append(begun - start)
            if event.count > 1:
                found.per_token.append((event.time - begun) / (event.count - 1))
            found.total.append(event.time - start)
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated; 0.0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(events: Sequence[Event]) -> dict[str, float]:
    """The figures of a run, by name; times in seconds.

    Rates are over the time from the first event to the last. `mean_batch_rows` and
    `mean_batch_tokens` are per dispatch that ran tokens.
    """
    times = latencies(events)
    ran = [event.data for event in events if event.kind == "dispatch" and event.data["num_tokens"]]
    at = [event.time for event in events]
    seconds = max(at) - min(at) if at else 0.0
    prompt_tokens = _total(events, "add")
    output_tokens = _total(events, "finish")
    return {
        "num_requests": len(times.total),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "seconds": seconds,
        "output_tokens_per_s": output_tokens / seconds if seconds else 0.0,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / seconds if seconds else 0.0,
        "ttft_p50_s": percentile(times.first_token, 50),
        "ttft_p99_s": percentile(times.first_token, 99),
        "tpot_p50_s": percentile(times.per_token, 50),
        "tpot_p99_s": percentile(times.per_token, 99),
        "latency_p50_s": percentile(times.total, 50),
        "latency_p99_s": percentile(times.total, 99),
        "num_dispatches": len(ran),
        "mean_batch_rows": sum(data["num_rows"] for data in ran) / len(ran) if ran else 0.0,
        "mean_batch_tokens": sum(data["num_tokens"] for data in ran) / len(ran) if ran else 0.0,
        "num_preemptions": sum(event.kind == "preempt" for event in events),
        "blocks_allocated_per_s": _total(events, "allocate") / seconds if seconds else 0.0,
        "recomputed_tokens": _recomputed(events, sum(data["num_tokens"] for data in ran)),
    }


def _recomputed(events: Sequence[Event], num_run: float) -> int:
    """Tokens that ran beside each prompt, less what was cached, and each output but its last."""
    cached: dict[str | None, int] = {}
    for event in events:
        if event.kind == "admit":
            cached.setdefault(event.request_id, event.count)
    outputs = [event.count for event in events if event.kind in ("finish", "abort")]
    once = _total(events, "add") - sum(cached.values()) + sum(max(0, n - 1) for n in outputs)
    return max(0, int(num_run) - once)


def _total(events: Iterable[Event], kind: str) -> int:
    return sum(event.count for event in events if event.kind == kind)
