"""Every combination of engine options, and whether requests get the tokens that they get alone.

    python -m tests.engine.equality_table [--cases 200] [--first 0] [--seed 0] [--real]

CI runs a pairwise covering set of them through `test_equality.py`.
"""

import argparse
import itertools
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from tests.cover import pairwise
from tests.engine.workloads import (
    NUM_BLOCKS,
    Alone,
    Ask,
    assert_empty,
    differences,
    limit,
    make_asks,
    make_engine,
    preempted,
    run_asks,
)

FACTORS: dict[str, tuple] = {
    "block_size": (1, 2, 4, 16),
    "chunk": (1, 3, 8, 64),
    "decode_steps": (1, 4, 8),
    "overlap": (False, True),
    "enable_prefix_caching": (False, True),
    "preemption_mode": ("recompute", "swap", "auto"),
    "scheduling_policy": ("fcfs", "priority"),
    "is_forced": (False, True),
    "is_crowded": (True, False),
    "has_aborts": (False, True),
}
"""`chunk` is also the most rows, up to 8; `is_forced`: a third of the requests is preempted after
every token."""

NUM_WORKLOADS = 6
"""Few, so that each request is run alone once for many cases."""

MOST_DIFFERENT = 1 / 500


@dataclass
class Tally:
    """What all cases together have compared."""

    num_requests: int = 0
    num_different: int = 0
    """Requests with a near tie that recomputing or chunking has decided otherwise."""
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    faults: list[str] = field(default_factory=list)
    """Differences that nothing excuses."""

    def __str__(self) -> str:
        return (
            f"{self.num_requests} requests compared, {self.num_different} differ by a near tie, "
            f"{len(self.faults)} differ otherwise; {self.num_preemptions} preemptions, "
            f"{self.num_hit_tokens} prompt tokens cached"
        )


def covering_cases(count: int) -> list[dict[str, Any]]:
    """A set in which every two values of two factors meet, filled up to `count` at random."""
    chosen = pairwise(FACTORS, lambda a, b: True)
    draw = random.Random(1)
    while len(chosen) < count:
        case = {name: draw.choice(values) for name, values in FACTORS.items()}
        if case not in chosen:
            chosen.append(case)
    return chosen


def all_cases() -> list[dict[str, Any]]:
    """The product, in an order in which every part has some of everything."""
    cases = [
        dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())
    ]
    random.Random(2).shuffle(cases)
    return cases


def run_case(
    model, alone: Alone, case: dict[str, Any], tally: Tally, *, seed: int, is_real: bool = False
) -> None:
    """Runs a workload twice through one engine and adds to the tally.

    Args:
      is_real: Build the engine of the case, and not one of 8 rows that plans like it.
    """
    names = ("block_size", "overlap", "enable_prefix_caching")
    names += ("preemption_mode", "scheduling_policy")
    options = {name: case[name] for name in names}
    options["num_blocks"] = NUM_BLOCKS[case["block_size"]]
    if is_real:
        options["max_num_seqs"] = min(8, case["chunk"])
        options["max_num_batched_tokens"] = case["chunk"]
        options["decode_steps"] = case["decode_steps"]
    engine = make_engine(model, **options)
    if not is_real:
        limit(engine, chunk=case["chunk"], decode_steps=case["decode_steps"])
    asks = make_asks(
        seed,
        is_short=case["chunk"] < 8,
        spread=8 if case["is_crowded"] else 60,
        aborts=case["has_aborts"],
    )
    forced = {ask.name for ask in asks[::3]} if case["is_forced"] else set()
    for _ in range(2):  # cold and warm
        with preempted(lambda sequence: sequence.request.request_id in forced):
            run = run_asks(engine, asks)
        assert_empty(engine)
        _compare(asks, run, alone, tally, f"{case}, seed {seed}")
    stats = engine.stats()
    tally.num_preemptions += stats["num_preemptions"]
    tally.num_hit_tokens += stats["prefix_hits_tokens"]
    engine.reset_prefix_cache()
    assert engine.stats()["num_free"] == stats["num_blocks"]
    assert int(engine.runner.blocks.num_free) == stats["num_blocks"]


def _compare(asks: list[Ask], run, alone: Alone, tally: Tally, where: str) -> None:
    tally.num_requests += len(asks)
    near = set()
    for ask, index, own, got in differences(asks, run, alone):
        text = f"{ask.name}, choice {index}: {own} alone, {got} here; {where}"
        if run.is_recomputed(ask) and alone.is_near(ask, index, got):
            near.add(ask.name)
            print(f"near tie: {text}")
        else:
            tally.faults.append(text)
    tally.num_different += len(near)


def main(argv: list[str] | None = None) -> int:
    """Prints a line per hundred cases and the tally; 1 if anything differs that must not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, help="how many; default all")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    parser.add_argument("--seconds", type=float, help="stop after so many")
    parser.add_argument("--real", action="store_true", help="compile each combination's own sizes")
    args = parser.parse_args(argv)
    from tests import conftest

    model, tally, start = conftest.toy.__wrapped__(), Tally(), time.monotonic()  # type: ignore
    alone = Alone(model)
    cases = all_cases()[args.first :][: args.cases]
    num_run = 0
    for i, case in enumerate(cases, args.first):
        if args.seconds is not None and time.monotonic() - start > args.seconds:
            break
        seed = args.seed + i % NUM_WORKLOADS
        run_case(model, alone, case, tally, seed=seed, is_real=args.real)
        num_run += 1
        if num_run % 100 == 0:
            print(f"{num_run} cases, {time.monotonic() - start:.0f} s: {tally}", flush=True)
    print(f"{num_run} of {len(all_cases())} cases, {time.monotonic() - start:.0f} s: {tally}")
    for fault in tally.faults:
        print("FAULT", fault)
    is_bad = tally.faults or tally.num_different > MOST_DIFFERENT * tally.num_requests
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
