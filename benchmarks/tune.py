"""Which sizes of tiles and buffers are fastest on this TPU or GPU?

For every shape, block size and dtype of the pool, each candidate runs in a program that calls the
kernel for eight layers, every layer on the output of the one before. The calls of a case are timed
in turn, in a new random order each round, and their medians are compared. The fastest candidate
becomes the case's entry in pallas_kernels/<tpu or gpu>/tuned/<device>.json if it beats what
`pallas_kernels/<tpu or gpu>/config.py` makes of the shapes alone by more than `--min-gain`; else
the case has no entry, and loses one it had. Entries of other cases stay. What the compiler refuses,
and what computes other numbers than the sizes from shapes, is left out with a line that says so.

`limit` is the share of the least time in which the chip could read the keys and values once, or
make the products in bfloat16 if that takes longer. On a GPU it is of the reading alone, at the
measured bandwidth of a copy; kernels there are those in Triton.

    python benchmarks/tune.py                                         # on a TPU or GPU; hours
    python benchmarks/tune.py --shapes llama3-8b --kernels decode --block-sizes 16
    python benchmarks/tune.py --dry-run --device-kind "TPU v6e"       # anywhere: what would run
    python benchmarks/tune.py --dry-run --device-kind "NVIDIA H100 80GB HBM3"
    python benchmarks/tune.py --interpret                             # anywhere: a tiny case
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from timing import interleave, number, table
from tune_case import SHAPES, Case, Load, Model, inputs_of, layer_of

KERNELS = ("decode", "prefill")
POOL_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
SHAPES_ALONE = "from shapes"
TOLERANCE = 0.02  # of the largest output: tiles round sums in another order


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse_options(arguments)
    is_measured = not (options.dry_run or options.interpret)
    backend = jax.default_backend()
    if is_measured and backend not in ("tpu", "gpu"):
        print(
            f"without a GPU tune.py measures on a TPU, and JAX found {backend}: run it on one of "
            "them, or see what it would do with --dry-run or --interpret",
            file=sys.stderr,
        )
        return 2
    is_tpu = backend == "tpu" if is_measured else options.device_kind.startswith("TPU")
    # Only the chip's own kernels are loaded.
    chip = importlib.import_module("tune_tpu" if is_tpu else "tune_gpu")
    with contextlib.nullcontext() if is_measured else chip.traced_for(options.device_kind):
        info = chip.facts()
        plans = {case: candidates(case) for case in _cases(options, chip)}
    if options.dry_run:
        for case, plan in plans.items():
            print(f"\n{case}: entry {case.ask(None)[1]}, {len(plan)} candidates")
            print("\n".join(plan))
        return 0
    path = options.output or chip.TUNED / f"{chip.table_name(info)}.json"
    if options.interpret and options.output is None:
        path = Path(tempfile.mkdtemp()) / path.name
    read_entries(path)  # now, rather than after an hour
    for case, plan in plans.items():
        print(f"\n{case}", flush=True)
        if options.interpret:  # two are enough to go through everything
            plan = dict(itertools.islice(plan.items(), 2))
        medians = measure(case, plan, info, options)
        best = choose(medians, options.min_gain)
        key = case.ask(None)[1]
        print(f"entry {key}: {best or 'none, shapes do as well'}", flush=True)
        merge(path, f"paged_{case.kernel}", key, None if best is None else plan[best])
    print(f"\n{path}")
    return 0


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add_list(flag: str, known: Sequence[Any], default: Sequence[Any], to: type = str) -> None:
        def parse(text: str) -> list[Any]:
            values = [to(value) for value in text.split(",")]
            if unknown := set(values) - set(known):
                raise argparse.ArgumentTypeError(f"{unknown} not in {known}")
            return values

        parser.add_argument(flag, type=parse, default=default, help=f"of {known}")

    add_list("--shapes", tuple(SHAPES), tuple(SHAPES))
    add_list("--kernels", KERNELS, KERNELS)
    add_list("--block-sizes", (8, 16, 32, 64, 128, 256), (16, 64, 128), int)
    add_list("--pool-dtypes", POOL_DTYPES, ("bfloat16", "int8"))
    parser.add_argument("--output", type=Path, metavar="FILE", help="table to merge entries into")
    parser.add_argument("--repeats", type=int, default=10, help="rounds")
    parser.add_argument("--min-gain", type=float, default=0.02, help="fraction, for an entry")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="print cases and candidates")
    how.add_argument("--interpret", action="store_true", help="interpret a tiny case")
    parser.add_argument("--device-kind", default="TPU v6e", help="for the two options above")
    return parser.parse_args(arguments)


def _cases(options: argparse.Namespace, chip: Any) -> list[Case]:
    if options.interpret:
        load = Load(num_rows=1, num_tokens=16, mean_len=400, context_len=512, num_layers=2)
        model = Model(num_heads=2, num_kv_heads=1, head_dim=chip.TOY_HEAD_DIM)
        tiny = {"chip": chip, "shape": "tiny", "model": model, "load": load}
        tiny |= {"block_size": 128, "pool_dtype": "bfloat16"}
        return [Case(kernel=kernel, **tiny) for kernel in options.kernels]
    found = []
    for kernel, shape, block_size, dtype in itertools.product(
        options.kernels, options.shapes, options.block_sizes, options.pool_dtypes
    ):
        pool = {"block_size": block_size, "pool_dtype": dtype}
        case = Case(chip=chip, kernel=kernel, shape=shape, model=SHAPES[shape], **pool)
        try:
            case.ask(None)
            found.append(case)
        except NotImplementedError as error:
            print(f"{case}: left out, {error}")
    return found


def candidates(case: Case) -> dict[str, Any]:
    """The sizes that follow from shapes, and a grid around them, each by its text.

    What a kernel would change before it takes it is left out.
    """
    heads, _, start = case.ask(None)
    grid = case.chip.grid(heads, start)
    found: dict[str, Any] = {SHAPES_ALONE: start}
    for values in itertools.product(*map(sorted, grid.values())):
        wanted = dataclasses.replace(start, **dict(zip(grid, values, strict=True)))
        settled = case.ask(wanted)[2]
        entry = case.chip.entry_of(settled)
        if entry == case.chip.entry_of(wanted) and settled != start:
            found[" ".join(f"{k}={v}" for k, v in entry.items())] = settled
    return found


def measure(
    case: Case, plan: dict[str, Any], info: Any, options: argparse.Namespace
) -> dict[str, float]:
    """Microseconds a layer by candidate, without those that do not compile or disagree."""
    arrays, num_bytes, num_flops = inputs_of(case, case.chip.memory_bytes(info))
    interpret = case.chip.interpret_params() if options.interpret else False
    calls, first = {}, None
    for name, config in plan.items():
        run = jax.jit(functools.partial(_layers, case, config, interpret))
        try:
            program = run.lower(jnp.int32(1), arrays).compile()
        except Exception as error:  # what compilers raise has no type in common
            print(f"refused: {name}: {' '.join(str(error).split())[:160]}", flush=True)
            continue
        out = np.asarray(program(jnp.int32(1), arrays), np.float32)
        first = out if first is None else first
        if not np.abs(out - first).max() <= TOLERANCE * np.abs(first).max():
            print(f"left out, its numbers are others: {name}", flush=True)
            continue
        timed = functools.partial(program, jnp.int32(case.load.num_layers), arrays)
        calls[name] = (lambda: None, lambda _, timed=timed: jax.block_until_ready(timed()))
    times = interleave(calls, options.repeats)
    medians = {name: float(np.median(us)) / case.load.num_layers for name, us in times.items()}
    least = case.chip.least_seconds(info, num_bytes, num_flops)
    lines = [["", "us a layer", "limit"]]
    for name, us in sorted(medians.items(), key=lambda item: item[1]):
        limit = "-" if least is None else f"{1e8 * least / us:.1f} %"
        lines.append([name, number(us), limit])
    print(table(lines))
    return medians


def _layers(
    case: Case, config: Any, interpret: Any, num_layers: Any, arrays: dict[str, jax.Array]
) -> jax.Array:
    """Layer after layer, each with the output of the last as its queries."""
    layer = layer_of(case, config, interpret, arrays)
    return case.chip.run_layers(layer, num_layers, case, arrays["q"])


def choose(medians: dict[str, float], min_gain: float) -> str | None:
    """The fastest candidate, if it beats the sizes from shapes by more than the fraction."""
    limit = medians.get(SHAPES_ALONE, float("inf")) / (1 + min_gain)
    others = {us: name for name, us in medians.items() if name != SHAPES_ALONE and us < limit}
    return others[min(others)] if others else None


def read_entries(path: Path) -> dict[str, dict[str, Any]]:
    """{kernel: {key: fields of a config}}, nothing where there is no file; raises if it is none."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return {kernel: dict(entries) for kernel, entries in found.items()}


def merge(path: Path, kernel: str, key: str, config: Any) -> None:
    """Replaces or removes one entry; a reader finds the old file or the new one."""
    entries = read_entries(path)
    (of_kernel := entries.setdefault(kernel, {})).pop(key, None)
    if config is not None:
        # The limit on a TPU's vector memory follows from the rest.
        fields = dataclasses.asdict(config).items()
        of_kernel[key] = {name: value for name, value in fields if name != "vmem_limit_bytes"}
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    os.replace(new, path)


if __name__ == "__main__":
    raise SystemExit(main())
