"""How much of the memory for KV holds no token: three allocators on one trace.

    python benchmarks/fragmentation.py [--trace FILE | --requests 400] [--plot out.png]

A clock of steps: requests arrive, wait in order, and grow by a token a step until they have said
all of their output. Who cannot grow lets the youngest go back to the queue, to be computed again.
No model runs; the allocators are those of allocators.py, the last one the ledger of the engine.

Internal waste: slots that a request has and no token. External waste: free slots outside the
largest hole. Refused: requests that found enough free slots in all and no hole that was large
enough, when they were first in the queue. Moved: tokens copied to make room. Means are over all
steps until the last request has ended.
"""

import argparse
import json
import math
import platform
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allocators import Allocator, Growing, Paged, Reserving

from paged_jax.engine.trace import TraceRequest, read_trace, sharegpt_like

STEPS_PER_SECOND = 25.0


@dataclass
class Curves:
    """Slots by step."""

    live: list[int] = field(default_factory=list)
    internal: list[int] = field(default_factory=list)
    external: list[int] = field(default_factory=list)
    usable: list[int] = field(default_factory=list)
    """Free and in the largest hole."""
    running: list[int] = field(default_factory=list)


def simulate(
    allocator: Allocator, trace: Sequence[TraceRequest], slots: int
) -> tuple[dict[str, Any], Curves]:
    """Runs a trace to its end. Returns: figures, and what they are means of."""
    arrivals = deque(sorted(range(len(trace)), key=lambda i: trace[i].arrival))
    waiting: deque[int] = deque()
    said = [0] * len(trace)
    running: dict[int, int] = {}  # request -> tokens
    refused: set[int] = set()
    preempted = step = 0
    curves = Curves()
    while arrivals or waiting or running:
        while arrivals and trace[arrivals[0]].arrival * STEPS_PER_SECOND <= step:
            waiting.append(arrivals.popleft())
        while waiting:
            first = waiting[0]
            tokens = trace[first].prompt_tokens + said[first]
            if not allocator.admit(first, tokens):
                if allocator.free >= allocator.wanted(tokens) > allocator.largest:
                    refused.add(first)
                if not running:
                    raise ValueError(f"request {first} does not fit into {slots} slots alone")
                break
            running[first] = tokens
            waiting.popleft()
        for request in list(running):
            if request not in running:
                continue
            while not allocator.grow(request, running[request] + 1):
                youngest = next(reversed(running))
                preempted += 1
                allocator.release(youngest)
                del running[youngest]
                waiting.appendleft(youngest)
                if youngest == request:
                    break
            else:
                running[request] += 1
                said[request] += 1
                if said[request] == trace[request].output_tokens:
                    allocator.release(request)
                    del running[request]
        live, free = sum(running.values()), allocator.free
        curves.live.append(live)
        curves.internal.append(slots - free - live)
        curves.external.append(free - allocator.largest)
        curves.usable.append(allocator.largest)
        curves.running.append(len(running))
        step += 1
    return {
        "allocator": allocator.name,
        "steps": step,
        "mean_running": _mean(curves.running),
        "most_running": max(curves.running),
        "live": _mean(curves.live) / slots,
        "internal_waste": _mean(curves.internal) / slots,
        "external_waste": _mean(curves.external) / slots,
        "waste_of_allocated": sum(curves.internal)
        / max(1, sum(curves.internal) + sum(curves.live)),
        "refused_with_enough_free": len(refused),
        "preempted": preempted,
        "tokens_moved": allocator.moved,
    }, curves


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def run(
    trace: Sequence[TraceRequest], slots: int, longest: int, block_size: int
) -> tuple[list[dict[str, Any]], dict[str, Curves]]:
    """All three on one trace."""
    made: list[Allocator] = [
        Reserving(slots, longest),
        Growing(slots, longest),
        Paged(slots, longest, block_size, max_seqs=len(trace)),
    ]
    figures, curves = [], {}
    for allocator in made:
        found, curves[allocator.name] = simulate(allocator, trace, slots)
        figures.append(found)
    return figures, curves


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    heads = [
        *("allocator", "steps", "running, mean (most)", "live", "internal waste"),
        *("external waste", "refused", "preempted", "moved"),
    ]
    lines = [heads, ["---"] * len(heads)]
    for found in figures:
        shares = (found[name] for name in ("live", "internal_waste", "external_waste"))
        lines.append(
            [
                found["allocator"],
                str(found["steps"]),
                f"{found['mean_running']:.1f} ({found['most_running']})",
                *(f"{share:.1%}" for share in shares),
                str(found["refused_with_enough_free"]),
                str(found["preempted"]),
                str(found["tokens_moved"]),
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(curves: dict[str, Curves], slots: int, path: str) -> None:
    """The pool over time, one panel per allocator."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), dpi=120)
    panels = figure.subplots(len(curves), 1, sharex=True, sharey=True)
    parts = (
        ("live", "tokens", "#3b6ea5"),
        ("internal", "internal waste", "#e8a33d"),
        ("external", "external waste", "#c0504d"),
        ("usable", "free, in the largest hole", "#dfe7df"),
    )
    for axes, (name, found) in zip(panels, curves.items(), strict=True):
        heights = [[count / slots * 100 for count in getattr(found, part)] for part, *_ in parts]
        axes.stackplot(
            [step / STEPS_PER_SECOND for step in range(len(found.live))],
            heights,
            labels=[label for _, label, _ in parts],
            colors=[colour for *_, colour in parts],
        )
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylabel("% of the pool")
        axes.set_ylim(0, 100)
    panels[-1].set_xlabel(f"seconds ({STEPS_PER_SECOND:g} steps each)")
    panels[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    """Prints the table; see the page's top."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", help="file of `paged-jax bench --simulate`")
    parser.add_argument("--requests", type=int, default=400, help="drawn like ShareGPT's")
    parser.add_argument("--request-rate", type=float, default=4.0, help="per second")
    parser.add_argument("--slots", type=int, default=16384, help="tokens that the pool holds")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--plot", help="picture of the pool over time")
    arguments = parser.parse_args()
    longest = arguments.max_model_len
    trace = (
        read_trace(arguments.trace)
        if arguments.trace
        else sharegpt_like(
            arguments.requests,
            request_rate=arguments.request_rate or math.inf,
            seed=arguments.seed,
            max_model_len=longest,
        )
    )
    figures, curves = run(trace, arguments.slots, longest, arguments.block_size)
    print(table(figures))
    if arguments.plot:
        plot(curves, arguments.slots, arguments.plot)
    if arguments.json:
        facts = {"python": platform.python_version(), "machine": platform.machine()}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({**vars(arguments), **facts, "figures": figures}, file, indent=2)


if __name__ == "__main__":
    main()
