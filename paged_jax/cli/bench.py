"""Measure a model under load, or replay a trace of arrivals without one.

`bench serve` measures a running server. With --simulate the engine's scheduler and block accounting
run under every combination of the values given, with a formula for the time of a dispatch. Nothing
of JAX is loaded then.
"""

import argparse
import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paged_jax.cli import bench_serve, options

if TYPE_CHECKING:
    from paged_jax.engine.report import RunLog

# What acts in one of the two uses only; each is refused in the other. Values are defaults.
_WITH_MODEL = {
    "model": options.DEFAULT_MODEL,
    "num_requests": 32,
    "prompt_len": 128,
    "output_len": 64,
    "prefix_len": 0,
}
_WITH_TRACE = {
    "policies": None,
    "pool_sizes": None,
    "pool_tokens": None,
    "block_sizes": None,
    "step_seconds": 0.01,
    "token_seconds": 3e-5,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command, and a command of its own for servers."""
    kinds = parser.add_subparsers(dest="what", metavar="serve")
    summary = bench_serve.SUMMARY
    server = kinds.add_parser("serve", help=summary, description=summary, allow_abbrev=False)
    bench_serve.add_arguments(server)
    options.add_model(parser)
    parser.set_defaults(model=None)  # so that a model is refused where none is used
    parser.add_argument("--request-rate", type=float, metavar="R", help=_RATE)
    load = parser.add_argument_group("load on a model")
    _add_int(load, "--num-requests", "N", "requests")
    _add_int(load, "--prompt-len", "N", "random tokens per prompt")
    _add_int(load, "--output-len", "N", "tokens per output")
    _add_int(load, "--prefix-len", "N", "leading tokens that all prompts have in common")
    trace = parser.add_argument_group("simulation")
    trace.add_argument("--simulate", metavar="TRACE", help=_TRACE)
    trace.add_argument("--policies", type=_strings, metavar="A,B", help="fcfs, priority")
    pools = trace.add_mutually_exclusive_group()
    pools.add_argument(
        "--pool-sizes", type=options.integers, metavar="N,M", help="blocks in the pool"
    )
    pools.add_argument(
        "--pool-tokens",
        type=options.integers,
        metavar="N,M",
        help="tokens in the pool: equal memory for every block size",
    )
    trace.add_argument(
        "--block-sizes", type=options.integers, metavar="P,Q", help="tokens per block"
    )
    for name, what in (("step", "decode step, or dispatch with prefill"), ("token", "token")):
        default = _WITH_TRACE[f"{name}_seconds"]
        text = f"cost of a {what} (default {default:g}: the order of an 8B model on one H100)"
        trace.add_argument(f"--{name}-seconds", type=float, metavar="X", help=text)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object")
    output.add_argument("--timeline", metavar="PNG", help="draw queue, batch, blocks, latencies")
    output.add_argument("--blocks", metavar="PNG", help="draw the pool when it was fullest")
    output.add_argument("--events", metavar="JSONL", help="write every event")
    options.add_engine(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints figures of one run, or a table with a line per simulated combination."""
    if arguments.what == "serve":
        return bench_serve.run(arguments)
    is_simulated = arguments.simulate is not None
    for name in _WITH_MODEL if is_simulated else _WITH_TRACE:
        if getattr(arguments, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} acts only {'without' if is_simulated else 'with'} --simulate")
    for name, default in (_WITH_TRACE if is_simulated else _WITH_MODEL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    rate = arguments.request_rate
    if rate is not None and not rate > 0:
        raise ValueError(f"request-rate ({rate}) must be above 0")
    if arguments.timeline or arguments.blocks:
        from paged_jax.cli.plots import check_can_plot

        check_can_plot()
    if is_simulated:
        from paged_jax.cli.bench_trace import run_grid

        rows = run_grid(arguments)
        print(json.dumps({"runs": rows}) if arguments.json else _table(rows))
    else:
        from paged_jax.cli.bench_model import run_model

        figures = run_model(arguments)
        print(json.dumps(figures) if arguments.json else _list(figures))
    return 0


@contextlib.contextmanager
def run_log(arguments: argparse.Namespace, max_model_len: int) -> Iterator["RunLog"]:
    """A log of a run that writes and draws at the end what the flags ask for."""
    from paged_jax.engine.events import JsonlEvents
    from paged_jax.engine.report import RunLog

    sink = JsonlEvents(arguments.events) if arguments.events else contextlib.nullcontext()
    with sink as forward:
        made = RunLog(max_model_len, forward=forward, keeps_blocks=arguments.blocks is not None)
        yield made
    if arguments.timeline or arguments.blocks:
        from paged_jax.cli.plots import block_map, timeline

        if arguments.timeline:
            timeline(made.events, arguments.timeline)
        if arguments.blocks:
            block_map(made.fullest, arguments.blocks)


_TRACE = (
    'a file of JSON lines {"arrival": seconds, "prompt_tokens": n, "output_tokens": m}, each with '
    '"prefix_group" (a name), "prefix_tokens" and "priority" if wanted; or sharegpt:N, N requests '
    "with lognormal lengths around ShareGPT's means (161 and 338): an approximation of that data"
)
_RATE = "Poisson arrivals per second (default: all at once; 10 for sharegpt:N)"

# Title, figure, format.
_COLUMNS = (
    ("policy", "policy", "{}"),
    ("blocks", "num_blocks", "{}"),
    ("block size", "block_size", "{}"),
    ("TTFT P50", "ttft_p50_s", "{:.2f} s"),
    ("P99", "ttft_p99_s", "{:.2f} s"),
    ("urgent P99", "urgent_ttft_p99_s", "{:.2f} s"),
    ("latency P50", "latency_p50_s", "{:.2f} s"),
    ("P99", "latency_p99_s", "{:.2f} s"),
    ("preempted", "num_preemptions", "{}"),
    ("mean batch", "mean_batch_rows", "{:.1f}"),
    ("KV waste", "kv_waste_fraction", "{:.1%}"),
    ("contiguous", "contiguous_waste_fraction", "{:.1%}"),
    ("prefix hits", "prefix_hit_fraction", "{:.1%}"),
    ("makespan", "seconds", "{:.1f} s"),
    ("tokens/s", "output_tokens_per_s", "{:.0f}"),
)

_LINES = (
    ("requests", "num_requests", "{}"),
    ("prompt tokens", "prompt_tokens", "{}"),
    ("output tokens", "output_tokens", "{}"),
    ("time", "seconds", "{:.2f} s"),
    ("output tokens/s", "output_tokens_per_s", "{:.1f}"),
    ("prompt and output tokens/s", "total_tokens_per_s", "{:.1f}"),
    ("time to first token, P50", "ttft_p50_s", "{:.3f} s"),
    ("time to first token, P99", "ttft_p99_s", "{:.3f} s"),
    ("latency, P50", "latency_p50_s", "{:.3f} s"),
    ("latency, P99", "latency_p99_s", "{:.3f} s"),
    ("dispatches", "num_dispatches", "{}"),
    ("mean rows per dispatch", "mean_batch_rows", "{:.1f}"),
    ("preemptions", "num_preemptions", "{}"),
    ("prompt tokens from the prefix cache", "prefix_hit_fraction", "{:.1%}"),
    ("KV slots held and empty", "kv_waste_fraction", "{:.1%}"),
    ("the same, max_model_len reserved per request", "contiguous_waste_fraction", "{:.1%}"),
)


def _table(rows: list[dict]) -> str:
    # Columns that say nothing are left out.
    silent = set() if any(row["prefix_hit_fraction"] for row in rows) else {"prefix_hit_fraction"}
    if all(row["urgent_ttft_p99_s"] == row["ttft_p99_s"] for row in rows):
        silent.add("urgent_ttft_p99_s")
    columns = [column for column in _COLUMNS if column[1] not in silent]
    return options.table(rows, columns)


def _list(figures: dict) -> str:
    return "\n".join(f"{title}: {form.format(figures[name])}" for title, name, form in _LINES)


def _add_int(group, flag: str, letter: str, what: str) -> None:
    default = _WITH_MODEL[flag.removeprefix("--").replace("-", "_")]
    group.add_argument(flag, type=int, metavar=letter, help=f"{what} (default {default})")


def _strings(text: str) -> list[str]:
    return text.split(",")
