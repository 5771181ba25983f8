"""Run one workload with blocks of several sizes, and show what each size costs and saves."""

import argparse
import csv
import json
import math
from typing import TYPE_CHECKING, Any

from paged_jax.cli import options

if TYPE_CHECKING:
    from paged_jax.engine.trace import TraceRequest

BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
_SHAREGPT = "sharegpt-like"

# Title, figure, format.
_COLUMNS = (
    ("block size", "block_size", "{}"),
    ("blocks", "num_blocks", "{}"),
    ("used KV", "used_kv_fraction", "{:.1%}"),
    ("requests, mean", "mean_resident_rows", "{:.1f}"),
    ("most", "most_resident_rows", "{}"),
    ("tokens, mean", "mean_resident_tokens", "{:.0f}"),
    ("tokens/s", "output_tokens_per_s", "{:.0f}"),
    ("TPOT P50", "tpot_p50_s", "{:.4f} s"),
    ("P99", "tpot_p99_s", "{:.4f} s"),
    ("latency P99", "latency_p99_s", "{:.2f} s"),
    ("blocks/s", "blocks_allocated_per_s", "{:.0f}"),
    ("prefix hits", "prefix_hit_fraction", "{:.1%}"),
    ("preempted", "num_preemptions", "{}"),
    ("recomputed", "recomputed_tokens", "{}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument(
        "model",
        nargs="?",
        default=options.DEFAULT_MODEL,
        help=f"built-in name, directory or .gguf file (default: {options.DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--block-sizes",
        type=options.integers,
        default=BLOCK_SIZES,
        metavar="P,Q",
        help="1,2,4,...,256",
    )
    parser.add_argument("--workload", default=_SHAREGPT, metavar="NAME", help=_WORKLOAD)
    parser.add_argument(
        "--pool-tokens", type=int, default=4096, metavar="N", help="of every pool (default 4096)"
    )
    parser.add_argument("--request-rate", type=float, metavar="R", help="default: all at once")
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="scheduler and blocks alone, with a formula for time",
    )
    parser.add_argument("--step-seconds", type=float, default=0.01, metavar="X")
    parser.add_argument("--token-seconds", type=float, default=3e-5, metavar="X")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object")
    output.add_argument("--csv", metavar="FILE", help="write the table")
    output.add_argument("--plot", metavar="PNG", help="draw what a larger block costs and saves")
    options.add_engine(parser)


_WORKLOAD = (
    "sharegpt-like or sharegpt-like:N (default 64 requests), lengths like ShareGPT's up to "
    "--max-model-len; or a file of `paged-jax bench --simulate`"
)


def run(arguments: argparse.Namespace) -> int:
    """Prints a line per block size."""
    given = options.engine_options(arguments)
    for name in ("block_size", "num_blocks", "kv_cache_memory_bytes"):
        if name in given:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is what a sweep varies; use --block-sizes, --pool-tokens")
    if max(arguments.block_sizes) > arguments.pool_tokens:
        raise ValueError(
            f"--pool-tokens ({arguments.pool_tokens}) must be at least the largest block "
            f"({max(arguments.block_sizes)})"
        )
    if arguments.plot:
        from paged_jax.cli.plots import check_can_plot

        check_can_plot()
    rows = (_simulated if arguments.simulate else _measured)(arguments, given)
    for row in rows:
        row["used_kv_fraction"] = 1.0 - row["kv_waste_fraction"]
    if arguments.csv:
        with open(arguments.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if arguments.plot:
        from paged_jax.cli.plots import block_sizes

        block_sizes(rows, arguments.plot)
    print(json.dumps({"runs": rows}) if arguments.json else options.table(rows, _COLUMNS))
    return 0


def _simulated(arguments: argparse.Namespace, given: dict[str, Any]) -> list[dict[str, Any]]:
    from paged_jax.config import EngineConfig, ResolvedConfig
    from paged_jax.engine.report import RunLog
    from paged_jax.engine.simulate import DispatchCost, simulate

    config = EngineConfig.from_options(given)
    length = config.max_model_len or 2048
    trace = _trace(arguments, length, config.seed)
    cost = DispatchCost(step_seconds=arguments.step_seconds, token_seconds=arguments.token_seconds)
    rows = []
    for size in arguments.block_sizes:
        settled = ResolvedConfig(
            max_model_len=length,
            block_size=size,
            num_blocks=arguments.pool_tokens // size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or 2048,
            scheduling_policy=config.scheduling_policy,
            enable_prefix_caching=config.enable_prefix_caching,
            decode_steps=config.decode_steps,
        )
        figures = simulate(trace, settled, cost, RunLog(length))
        rows.append({"block_size": size, "num_blocks": settled.num_blocks, **figures})
    return rows


def _measured(arguments: argparse.Namespace, given: dict[str, Any]) -> list[dict[str, Any]]:
    from paged_jax.cli.bench_model import run_load, warm_up
    from paged_jax.cli.status import startup_status
    from paged_jax.engine.report import RunLog
    from paged_jax.engine.trace import token_ids

    rows = []
    for size in arguments.block_sizes:
        engine_options = {
            "max_num_seqs": 32,
            "warmup": "all",  # no program compiles while the clock runs
            **given,
            "block_size": size,
            "num_blocks": arguments.pool_tokens // size,
        }
        with startup_status():
            from paged_jax.llm import LLM

            llm = LLM(arguments.model, **engine_options)
        with llm:
            engine = llm.engine
            trace = _trace(arguments, engine.config.max_model_len, given.get("seed", 0))
            warm_up(engine, 2 * size + 1)
            vocab = engine.vocab_size
            load = [
                (request.arrival, [token % vocab for token in prompt], request.output_tokens)
                for request, (prompt, _) in zip(trace, token_ids(trace), strict=True)
            ]
            figures = run_load(engine, load, RunLog(engine.config.max_model_len))
            assert engine.runner.kv is not None
            per_slot = engine.runner.kv.block_bytes / size
        rows.append(
            {
                "block_size": size,
                "num_blocks": engine.config.num_blocks,
                **figures,
                "used_kv_bytes": figures["mean_resident_tokens"] * per_slot,
                "allocated_kv_bytes": figures["mean_allocated_slots"] * per_slot,
            }
        )
    return rows


def _trace(arguments: argparse.Namespace, longest: int, seed: int) -> list["TraceRequest"]:
    from paged_jax.engine.trace import read_trace, sharegpt_like

    name, _, count = arguments.workload.partition(":")
    if name != _SHAREGPT:
        if arguments.request_rate is not None:
            raise ValueError("--request-rate does not act on a workload from a file")
        return read_trace(arguments.workload)
    if count and not (count.isdecimal() and int(count)):
        raise ValueError(f"--workload ({arguments.workload}): N must be at least 1")
    rate = math.inf if arguments.request_rate is None else arguments.request_rate
    if not rate > 0:
        raise ValueError(f"--request-rate ({rate}) must be above 0")
    longest = min(longest, arguments.pool_tokens)
    return sharegpt_like(int(count or 64), request_rate=rate, seed=seed, max_model_len=longest)
