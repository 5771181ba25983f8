"""The protocol of a runner: build the engine, one cold pass, one timed pass, one JSON line."""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

from benchmarks.workload import Request, make_workload


class Answer(NamedTuple):
    """The tokens generated for one request and the seconds from submission to the first of them."""

    token_ids: list[int]
    first_token_s: float


Generate = Callable[[list[Request]], list[Answer]]


def measure(build: Callable[[argparse.Namespace], Generate], *, packages: list[str]) -> None:
    """Measures one engine in this process and prints the result as the last line.

    Start-up runs from process start to the built engine, plus what the cold pass took beyond the
    timed one: there an engine that compiles lazily meets its shapes. Both passes have the same
    lengths and different token ids.

    Args:
      build: Loads the model and returns the function that answers a batch of requests.
      packages: Distributions whose versions are reported.
    """
    options = _parse_options()
    generate = build(options)
    built_s = time.time() - options.started_at
    passes = [
        make_workload(options.requests, seed=options.seed, pass_index=index) for index in (0, 1)
    ]
    cold, cold_s = _timed_pass(generate, passes[0])
    answers, total_s = _timed_pass(generate, passes[1])
    result = {
        "versions": {package: version(package) for package in packages},
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in passes[1]),
        "output_tokens": sum(request.output_len for request in passes[1]),
        "built_s": built_s,
        "cold_batch_s": cold_s,
        "startup_s": built_s + max(0.0, cold_s - total_s),
        "fresh_first_token_s": built_s + min(answer.first_token_s for answer in cold),
        "first_token_s": statistics.median(answer.first_token_s for answer in answers),
        "total_s": total_s,
        "peak_rss_bytes": _peak_rss_bytes(),
        "token_ids": [answer.token_ids for answer in answers],
    }
    print("\n" + json.dumps(result), flush=True)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--started-at", type=float, default=time.time())
    return parser.parse_args()


def _timed_pass(generate: Generate, requests: list[Request]) -> tuple[list[Answer], float]:
    start = time.perf_counter()
    answers = generate(requests)
    elapsed_s = time.perf_counter() - start
    for request, answer in zip(requests, answers, strict=True):
        if len(answer.token_ids) != request.output_len:
            raise RuntimeError(
                f"{len(answer.token_ids)} tokens generated, {request.output_len} were requested"
            )
    return answers, elapsed_s


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
