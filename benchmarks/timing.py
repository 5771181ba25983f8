"""Timing calls in turn, and tables of what came out."""

import gc
import random
import time
from collections.abc import Callable

import numpy as np

WARMUP = 3  # rounds that compile, and are not counted

Call = tuple[Callable[[], object], Callable]  # what makes the argument, and what is timed
Times = dict[str, np.ndarray]  # microseconds of each round


def interleave(calls: dict[str, Call], repeats: int) -> Times:
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    gc.collect()
    gc.disable()
    for _ in range(WARMUP + repeats):
        shuffle(order)
        for name in order:
            make, run = calls[name]
            argument = make()
            begin = time.perf_counter()
            result = run(argument)
            times[name].append(time.perf_counter() - begin)
            del argument, result
    gc.enable()
    return {name: 1e6 * np.array(values[WARMUP:]) for name, values in times.items()}


def ratio_of(times: Times, numerator: str, denominator: str) -> dict[str, float]:
    return {
        "of_medians": float(np.median(times[numerator]) / np.median(times[denominator])),
        "of_minima": float(np.min(times[numerator]) / np.min(times[denominator])),
    }


def summaries(times: Times) -> dict[str, dict[str, float]]:
    return {name: summary(values) for name, values in times.items()}


def summary(values: np.ndarray) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {
        "median": float(middle),
        "q1": float(low),
        "q3": float(high),
        "min": float(values.min()),
    }


def text(figure: dict[str, float] | None) -> str:
    if figure is None:
        return "-"
    return f"{number(figure['median'])} ({number(figure['min'])})"


def number(us: float) -> str:
    return f"{us:,.1f}" if us < 10 else f"{us:,.0f}"


def table(lines: list[list[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )
