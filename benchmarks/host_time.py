"""How long does the host take per dispatch, and does it depend on how many requests wait?

    python benchmarks/host_time.py

Measures schedule, ledger and bookkeeping of one dispatch, with every row running and with different
numbers of requests waiting; no model, no device. The tokens of the dispatch are handed over as the
engine does it, without text. Medians and minima in microseconds.
"""

import statistics
import time

from paged_jax.config import ResolvedConfig
from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.scheduler import schedule
from paged_jax.engine.scheduler_state import SchedulerState
from paged_jax.sampling_params import SamplingParams

NUM_RUNNING = 256
NUM_WAITING = (0, 100, 1_000, 10_000)
PROMPT, OUTPUT = 200, 4000
DISPATCHES = 300


def config(decode_steps: int) -> ResolvedConfig:
    """256 rows in a pool that is not short of blocks."""
    return ResolvedConfig(
        max_model_len=8192,
        block_size=16,
        num_blocks=65_536,
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        decode_steps=decode_steps,
    )


def measure(num_waiting: int, decode_steps: int) -> list[float]:
    """Seconds per dispatch in which all rows decode."""
    settled = config(decode_steps)
    state = SchedulerState.create(settled)
    sequences = {}
    for order in range(NUM_RUNNING + num_waiting):
        request = Request(
            request_id=str(order),
            prompt=None,
            prompt_token_ids=[(order * 7919 + i) % 32_000 for i in range(PROMPT)],
            params=SamplingParams(),
            max_total_tokens=PROMPT + OUTPUT,
            seed=0,
            order=order,
            arrival_time=0.0,
        )
        request.sequences = [Sequence(request=request, tokens=list(request.prompt_token_ids))]
        sequences[request.request_id] = request.sequences[0]
        state.add(request)
    seconds: list[float] = []
    while len(seconds) < DISPATCHES:
        start = time.perf_counter()
        plan = schedule(state, 0.0, settled)
        mine = [sequences[segment.request_id] for segment in plan.segments]
        state.apply(plan, mine)
        for segment, sequence in zip(plan.segments, mine, strict=True):
            count = segment.num_sampled
            sequence.num_unread -= count
            sequence.tokens += [11] * count
            state.publish(sequence)
        passed = time.perf_counter() - start
        if plan.num_decode == NUM_RUNNING:
            seconds.append(passed)
    return seconds


def main() -> None:
    """Prints a table."""
    print(f"{NUM_RUNNING} running; microseconds per dispatch, median (minimum)")
    print("| waiting | 1 decode step | 8 decode steps |")
    print("|---|---|---|")
    for num_waiting in NUM_WAITING:
        cells = []
        for decode_steps in (1, 8):
            seconds = measure(num_waiting, decode_steps)
            cells.append(f"{1e6 * statistics.median(seconds):.0f} ({1e6 * min(seconds):.0f})")
        print(f"| {num_waiting} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
