"""`paged-jax bench serve`: a load of streaming clients on a running server."""

import argparse
import dataclasses
import json
import math
import os
from typing import TYPE_CHECKING

from paged_jax.cli.serve import KEY_VARIABLE

if TYPE_CHECKING:
    from paged_jax.engine.trace import TraceRequest

SUMMARY = "measure a running server, ours or another with OpenAI's /v1/completions"

_LENGTHS = {"num_requests": 100, "prompt_len": 128, "output_len": 64, "prefix_len": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="without /v1")
    parser.add_argument("--model", help="what the server calls it (default: its first)")
    parser.add_argument("--api-key", help=f"default: ${KEY_VARIABLE}")
    load = parser.add_argument_group("load")
    load.add_argument("--trace", metavar="TRACE", help="requests of a file, as `bench --simulate`")
    for name, default in _LENGTHS.items():
        flag = "--" + name.replace("_", "-")
        load.add_argument(flag, type=int, metavar="N", help=f"default {default}")
    load.add_argument(
        "--request-rate", type=float, metavar="R", help="arrivals per second (default: all at once)"
    )
    load.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        help="1 (default) is Poisson; less comes in bursts, more is more regular",
    )
    load.add_argument("--max-concurrency", type=int, metavar="N", help="most requests at once")
    load.add_argument("--seed", type=int, default=0, help="of arrivals and prompts (default 0)")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object")
    output.add_argument("--save-trace", metavar="TRACE", help="write the requests, for --trace")
    output.add_argument("--save-samples", metavar="JSONL", help="write what each client saw")


def run(arguments: argparse.Namespace) -> int:
    """Prints the figures; exit code 1 when a request failed."""
    try:
        import httpx

        from paged_jax.server.load import figures, run_load
    except ImportError as error:
        raise ImportError("bench serve needs an extra: pip install 'paged-jax[serve]'") from error
    import asyncio

    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise ValueError(f"--max-concurrency ({arguments.max_concurrency}) must be at least 1")
    trace = _trace(arguments)
    if arguments.save_trace:
        from paged_jax.engine.trace import write_trace

        write_trace(arguments.save_trace, trace)
    try:
        samples = asyncio.run(
            run_load(
                arguments.base_url.rstrip("/"),
                arguments.model,
                trace,
                seed=arguments.seed,
                max_concurrency=arguments.max_concurrency,
                api_key=arguments.api_key or os.environ.get(KEY_VARIABLE) or None,
            )
        )
    except httpx.HTTPError as error:
        raise ValueError(f"--base-url ({arguments.base_url}): {error}") from error
    if arguments.save_samples:
        with open(arguments.save_samples, "w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(dataclasses.asdict(s)) + "\n" for s in samples)
    found = figures(samples)
    if arguments.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{title}: {form.format(found[name])}" for title, name, form in _LINES))
    errors = [sample.error for sample in samples if sample.error]
    if errors and not arguments.json:
        print(f"first failure: {errors[0]}")
    return 1 if errors else 0


def _trace(arguments: argparse.Namespace) -> "list[TraceRequest]":
    from paged_jax.engine.trace import read_trace, uniform

    if arguments.trace:
        for name in (*_LENGTHS, "request_rate", "burstiness"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} does not act with --trace")
        return read_trace(arguments.trace)
    sizes = {}
    for name, default in _LENGTHS.items():
        given = getattr(arguments, name)
        sizes[name] = default if given is None else given
        if sizes[name] < (name != "prefix_len"):
            raise ValueError(f"--{name.replace('_', '-')} ({given}) is too small")
    rate, burstiness = arguments.request_rate, arguments.burstiness
    if burstiness is not None and rate is None:
        raise ValueError("--burstiness needs --request-rate")
    for flag, value in (("--request-rate", rate), ("--burstiness", burstiness)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag} ({value}) must be above 0")
    return uniform(
        sizes["num_requests"],
        prompt_tokens=sizes["prompt_len"],
        output_tokens=sizes["output_len"],
        prefix_tokens=sizes["prefix_len"],
        request_rate=math.inf if rate is None else rate,
        burstiness=1.0 if burstiness is None else burstiness,
        seed=arguments.seed,
    )


_LINES = (
    ("requests", "num_requests", "{}"),
    ("failed", "num_failed", "{}"),
    ("time", "seconds", "{:.2f} s"),
    ("prompt tokens", "prompt_tokens", "{}"),
    ("output tokens", "output_tokens", "{}"),
    ("requests/s", "requests_per_s", "{:.2f}"),
    ("output tokens/s", "output_tokens_per_s", "{:.1f}"),
    ("time to first token, P50", "ttft_p50_s", "{:.3f} s"),
    ("time to first token, P99", "ttft_p99_s", "{:.3f} s"),
    ("between chunks, P50", "itl_p50_s", "{:.4f} s"),
    ("between chunks, P99", "itl_p99_s", "{:.4f} s"),
    ("time per output token, P50", "tpot_p50_s", "{:.4f} s"),
    ("time per output token, P99", "tpot_p99_s", "{:.4f} s"),
    ("latency, P50", "latency_p50_s", "{:.3f} s"),
    ("latency, P99", "latency_p99_s", "{:.3f} s"),
)
