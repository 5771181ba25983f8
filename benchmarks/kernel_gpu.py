"""How near do paged decode kernels come to the bandwidth of this GPU?

The roofline is the bytes that one layer of a step must move (live keys and values with scales,
queries, outputs, tables) over the bandwidth of a copy within the device, which is measured in the
same run: bytes read plus bytes written over its median time. A program calls a kernel for many
layers, each on the output of the one before, and waits once; the table has medians per layer and
the share of the roofline. Layers hold 256 MiB, so that caches do not help.

Rivals: our backends, JAX's deprecated Triton kernel, cuDNN through JAX, and FlashInfer and vLLM's
FlashAttention where PyTorch and they are installed. Each finds its own layout prepared. Its first
output is compared with pallas_kernels/reference.py before it is timed; one that is wrong is not.

    python benchmarks/kernel_gpu.py                                   # on a GPU
    python benchmarks/kernel_gpu.py --batches 64 --lengths 2048 --json FILE
    python benchmarks/kernel_gpu.py --interpret                       # anywhere: toy size, no times
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from gpu_load import TOLERANCE, Arrays, Load, Shape, build, error_of, expected
from gpu_rivals import OURS, RIVALS, Prepared, Program, Refused

MAX_RUN_S = 0.2
"""A slow rival gets fewer calls a run."""
MAX_CELL_S = 3.0
"""A slow one fewer runs."""
COPY_BYTES = 2 << 30
MAX_TEXT = 100
MEMORY_SHARE = 0.9
TOY = {"batches": [2], "lengths": [24], "block_sizes": [16]}
TOY_SHAPE = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A rival at a load: a time, or why there is none."""

    text: str
    us: float | None = None  # per layer
    variant: str = ""
    error: float | None = None  # of the outputs, as a fraction
    is_fault: bool = False  # it was to run and did not, or its numbers are wrong


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse_options(arguments)
    # Before JAX looks for a device: PyTorch and JAX share its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_SHARE))
    if options.interpret:
        jax.config.update("jax_disable_most_optimizations", True)  # compiles faster
    elif jax.default_backend() != "gpu":
        print(
            f"kernel_gpu.py measures on a GPU, and JAX found {jax.default_backend()}: run it on "
            "one, or see that it works with --interpret",
            file=sys.stderr,
        )
        return 2
    bandwidth = None if options.interpret else copy_bandwidth(COPY_BYTES)
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "is_interpreted": options.interpret,
        "copy_gb_s": None if bandwidth is None else bandwidth / 1e9,
        "shape": asdict(options.shape),
        "rows": [],
    }
    rows = report["rows"]
    for load in options.loads:
        print(f"batch {load.batch}, length {load.length}, block {load.block_size}", flush=True)
        cells = measure_load(load, options)
        rows.append(row_of(load, cells, bandwidth))
        if options.json:  # at once: a kernel may end the process
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{markdown(report)}")
    return int(any(cell["is_fault"] for row in rows for cell in row["cells"].values()))


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--batches", type=numbers, default=[1, 8, 64, 256])
    parser.add_argument("--lengths", type=numbers, default=[512, 2048, 8192, 32768])
    parser.add_argument("--block-sizes", type=numbers, default=[16, 64])
    parser.add_argument("--rivals", default=",".join(RIVALS), help=f"of {','.join(RIVALS)}")
    for name, field in Shape.__dataclass_fields__.items():
        kind: Any = field.type
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=field.default)
    parser.add_argument("--repeats", type=int, default=10, help="runs of a program")
    parser.add_argument("--interpret", action="store_true", help="toy size, no times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    options = parser.parse_args(arguments)
    options.rivals = options.rivals.split(",")
    for rival in options.rivals:
        if rival not in RIVALS:
            parser.error(f"--rivals: {rival!r} is not one of {', '.join(RIVALS)}")
    if options.interpret:
        vars(options).update(TOY | TOY_SHAPE)
    options.shape = Shape(**{name: vars(options)[name] for name in Shape.__dataclass_fields__})
    options.loads = [
        Load(shape=options.shape, batch=batch, length=length, block_size=block_size)
        for batch in options.batches
        for length in options.lengths
        for block_size in options.block_sizes
    ]
    return options


def copy_bandwidth(num_bytes: int, repeats: int = 10, copies: int = 8) -> float:
    """Bytes per second, read and written, of copies of an array within the device."""
    source = jnp.zeros(num_bytes // 4, jnp.float32)
    copy = jax.jit(jnp.copy)
    jax.block_until_ready(copy(source))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(copies):
            last = copy(source)
        jax.block_until_ready(last)
        times.append((time.perf_counter() - begin) / copies)
    return 2 * source.nbytes / statistics.median(times)


def measure_load(load: Load, options: argparse.Namespace) -> dict[str, Cell]:
    """One row of the table."""
    free = _free_bytes()
    # The pool and one rival's own layout of it.
    if free is not None and 2 * load.pool_bytes > free:
        return {name: Cell(text="does not fit") for name in options.rivals}
    arrays = build(load)
    want = expected(load, arrays)
    cells = {}
    for name in options.rivals:
        cells[name] = _measure(name, load, arrays, want, options)
        print(f"  {name}: {cells[name].text}", flush=True)
        gc.collect()  # its layout
    return cells


def _free_bytes() -> int | None:
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats["bytes_limit"] - stats["bytes_in_use"]


def _measure(
    name: str, load: Load, arrays: Arrays, want: np.ndarray, options: argparse.Namespace
) -> Cell:
    """A cell; what a rival raises is in it, and the others go on."""
    try:
        variants = RIVALS[name](load, arrays, options.interpret)
        found = [
            _measure_variant(variant, prepared, load, want, options)
            for variant, prepared in variants.items()
        ]
    except Refused as error:
        return Cell(text=str(error))
    except Exception as error:  # what compilers and other packages raise has no type in common
        text = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
        return Cell(text=text, is_fault=name in OURS)
    right = [cell for cell in found if not cell.is_fault]
    if not right:
        return Cell(text=found[0].text, error=found[0].error, is_fault=name in OURS)
    return min(right, key=lambda cell: cell.us or 0.0)


def _measure_variant(
    variant: str, prepared: Prepared, load: Load, want: np.ndarray, options: argparse.Namespace
) -> Cell:
    once = prepared(1)
    error = error_of(load, once.read(once.run()), want)
    if not error <= TOLERANCE:
        return Cell(text=f"wrong: error {error:.3g}", variant=variant, error=error, is_fault=True)
    seconds = _timed(once.run)
    num_calls = max(1, min(load.num_calls, int(MAX_RUN_S / seconds)))
    if options.interpret:
        num_calls = 1  # enough to go through everything
    program = once if num_calls == 1 else prepared(num_calls)
    median = _median(program, options.repeats)
    if options.interpret:
        return Cell(text="right", variant=variant, error=error)
    us = 1e6 * median / num_calls
    return Cell(text=f"{us:.1f} us", us=us, variant=variant, error=error)


def _median(program: Program, repeats: int) -> float:
    """Seconds of a run, the first one left out."""
    first = _timed(program.run)
    rounds = max(1, min(repeats, int(MAX_CELL_S / first)))
    return statistics.median(_timed(program.run) for _ in range(rounds))


def _timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def row_of(load: Load, cells: dict[str, Cell], bandwidth: float | None) -> dict[str, Any]:
    """A row of the report; `least_us` is the roofline."""
    sizes = {"batch": load.batch, "length": load.length, "block_size": load.block_size}
    least = None if bandwidth is None else 1e6 * load.step_bytes / bandwidth
    found = {}
    for name, cell in cells.items():
        fraction = None if least is None or cell.us is None else least / cell.us
        found[name] = asdict(cell) | {"roofline_fraction": fraction}
    return sizes | {"step_bytes": load.step_bytes, "least_us": least, "cells": found}


def markdown(report: dict[str, Any]) -> str:
    """The table of a report."""
    names = list(report["rows"][0]["cells"])
    lines = [["batch", "length", "block", "MB", "roofline, us", *names]]
    lines.append(["---"] * len(lines[0]))
    for row in report["rows"]:
        least = "-" if row["least_us"] is None else f"{row['least_us']:.1f}"
        sizes = [str(row[key]) for key in ("batch", "length", "block_size")]
        cells = [_cell_text(cell) for cell in row["cells"].values()]
        lines.append([*sizes, f"{row['step_bytes'] / 1e6:.1f}", least, *cells])
    shape = "H {num_heads}, K {num_kv_heads}, D {head_dim}, {dtype}, pool {pool_dtype}"
    copy = "interpreted on CPU, toy size: numbers are checked, nothing is timed"
    if report["copy_gb_s"] is not None:
        copy = f"copy within the device {report['copy_gb_s']:.0f} GB/s; us per layer (of roofline)"
    head = f"Paged decode, {shape.format(**report['shape'])}; {copy}."
    return "\n".join([head, "", *(f"| {' | '.join(line)} |" for line in lines)])


def _cell_text(cell: dict[str, Any]) -> str:
    text = cell["text"].replace("|", "/")
    text = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
    if cell["us"] is None:
        return text
    fraction = cell["roofline_fraction"]
    return f"{cell['us']:.1f}" if fraction is None else f"{cell['us']:.1f} ({100 * fraction:.0f} %)"


if __name__ == "__main__":
    raise SystemExit(main())
