"""Which sizes of tiles and buffers are fastest on this TPU?

For every shape, block size and dtype of the pool, each candidate runs in a program that calls the
kernel for eight layers, every layer on the output of the one before. The calls of a case are timed
in turn, in a new random order each round, and their medians are compared. The fastest candidate
becomes the case's entry in pallas_kernels/tpu/tuned/<device>.json if it beats what
`pallas_kernels/tpu/config.py` makes of the shapes alone by more than `--min-gain`; else the case
has no entry, and loses one it had. Entries of other cases stay. What the compiler refuses, and what
computes other numbers than the sizes from shapes, is left out with a line that says so.

`limit` is the share of the least time in which the chip could read the keys and values once, or
make the products in bfloat16 if that takes longer.

    python benchmarks/tune.py                                         # on a TPU; hours
    python benchmarks/tune.py --shapes llama3-8b --kernels decode --block-sizes 16
    python benchmarks/tune.py --dry-run --device-kind "TPU v6e"       # anywhere: what would run
    python benchmarks/tune.py --interpret                             # anywhere: a tiny case
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from timing import interleave, number, table

from pallas_kernels.tpu import config as chip_config
from pallas_kernels.tpu.config import DecodeConfig, PrefillConfig
from pallas_kernels.tpu.decode import paged_decode
from pallas_kernels.tpu.heads import LANES, SUBLANES, Heads, heads_of
from pallas_kernels.tpu.prefill import paged_prefill

TUNED = Path(__file__).resolve().parents[1] / "pallas_kernels" / "tpu" / "tuned"
KERNELS = ("decode", "prefill")
POOL_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")  # kinds whose devices have two TensorCores
SHAPES_ALONE = "from shapes"
MAX_POOL_BYTES = 1 << 30
TOLERANCE = 0.02  # of the largest output: tiles round sums in another order

Config = DecodeConfig | PrefillConfig


@dataclass(frozen=True, kw_only=True)
class Model:
    """Attention of a model; its layers without a window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    soft_cap: float | None = None
    has_sinks: bool = False


SHAPES = {
    "llama3-8b": Model(num_heads=32, num_kv_heads=8),
    "llama3-70b": Model(num_heads=64, num_kv_heads=8),
    "qwen3-0.6b": Model(num_heads=16, num_kv_heads=8),
    "gemma2-9b": Model(num_heads=16, num_kv_heads=8, head_dim=256, soft_cap=50.0),
    "gemma3-4b": Model(num_heads=8, num_kv_heads=4, head_dim=256),
    "smollm2": Model(num_heads=9, num_kv_heads=3, head_dim=64),
    "gpt-oss-20b": Model(num_heads=64, num_kv_heads=8, head_dim=64, has_sinks=True),
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much a step has to do; lengths spread evenly from half to one and a half of the mean."""

    num_rows: int = 64  # of decode
    num_tokens: int = 2048  # new ones of prefill, 256 a row
    mean_len: int = 2048
    context_len: int = 8192  # what a row of block tables can name
    num_layers: int = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """What an entry is measured on."""

    kernel: str
    shape: str
    model: Model
    block_size: int
    pool_dtype: str
    load: Load = Load()

    def __str__(self) -> str:
        return f"{self.kernel} {self.shape}, blocks of {self.block_size}, {self.pool_dtype}"

    @property
    def q_dtype(self) -> str:
        return "float32" if self.pool_dtype == "float32" else "bfloat16"

    def pool(self, num_layers: int, num_blocks: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the pool and its scales; narrow heads lie side by side in a row."""
        model, dtype = self.model, jnp.dtype(self.pool_dtype)
        per_row = max(1, LANES // model.head_dim)
        rows = 2 * -(-model.num_kv_heads // per_row)
        shape = (num_layers, num_blocks, rows, self.block_size, per_row * model.head_dim)
        found = {"kv": jax.ShapeDtypeStruct(shape, dtype)}
        if dtype.itemsize == 1:
            scales = 2 * model.num_kv_heads
            scales += 0 if scales in (2, 4) else -scales % SUBLANES  # what a kernel can copy
            shape = (*shape[:2], scales, self.block_size)
            found["scales"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return found

    @property
    def block_bytes(self) -> int:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.pool(1, 1).values())

    def ask(self, candidate: Config | None) -> tuple[Heads, str, Config]:
        """Its heads, the key of its entry, and the sizes that a kernel takes if that is the entry.

        Raises: NotImplementedError for a pool that no kernel can serve.
        """
        model, load, found = self.model, self.load, []

        def trace(pool: dict[str, jax.Array]) -> None:
            queries = model.num_heads, model.head_dim
            heads = heads_of(queries, pool["kv"], model.num_kv_heads, pool.get("scales"))
            args, limits = (heads, pool["kv"], self.q_dtype), {"max_tokens": load.context_len}
            found.extend([heads, chip_config.key(*args)])
            if self.kernel == "decode":
                limits["num_rows"] = load.num_rows
                found.append(chip_config.decode_config(*args, **limits))
            else:
                limits["num_tokens"] = load.num_tokens
                found.append(chip_config.prefill_config(*args, **limits))

        with mock.patch.object(chip_config, "lookup", return_value=candidate):
            jax.eval_shape(trace, self.pool(1, 1))
        return tuple(found)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse_options(arguments)
    is_measured = not (options.dry_run or options.interpret)
    if is_measured and jax.default_backend() != "tpu":
        print(
            f"tune.py measures on a TPU, and JAX found {jax.default_backend()}: run it on one, or "
            "see what it would do with --dry-run or --interpret",
            file=sys.stderr,
        )
        return 2
    with contextlib.nullcontext() if is_measured else _traced_for(options.device_kind):
        info = pltpu.get_tpu_info()
        plans = {case: candidates(case) for case in _cases(options)}
    if options.dry_run:
        for case, plan in plans.items():
            print(f"\n{case}: entry {case.ask(None)[1]}, {len(plan)} candidates")
            print("\n".join(plan))
        return 0
    path = options.output or TUNED / f"{chip_config.device_name(info)}.json"
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


def _traced_for(kind: str) -> contextlib.AbstractContextManager:
    """Lets kernels ask about a device that need not be there."""
    num_cores = 2 if kind in TWO_CORES else 1
    device = AbstractDevice(device_kind=kind, num_cores=num_cores, platform="tpu")
    axes = {"axis_types": (AxisType.Auto,), "abstract_device": device}
    return use_abstract_mesh(AbstractMesh((1,), ("x",), **axes))


def _cases(options: argparse.Namespace) -> list[Case]:
    if options.interpret:
        load = Load(num_rows=1, num_tokens=16, mean_len=400, context_len=512, num_layers=2)
        tiny = {"shape": "tiny", "model": Model(num_heads=2, num_kv_heads=1), "load": load}
        tiny |= {"block_size": 128, "pool_dtype": "bfloat16"}
        return [Case(kernel=kernel, **tiny) for kernel in options.kernels]
    found = []
    for kernel, shape, block_size, dtype in itertools.product(
        options.kernels, options.shapes, options.block_sizes, options.pool_dtypes
    ):
        model, pool = SHAPES[shape], {"block_size": block_size, "pool_dtype": dtype}
        case = Case(kernel=kernel, shape=shape, model=model, **pool)
        try:
            case.ask(None)
            found.append(case)
        except NotImplementedError as error:
            print(f"{case}: left out, {error}")
    return found


def candidates(case: Case) -> dict[str, Config]:
    """The sizes that follow from shapes, and a grid around them, each by its text.

    What a kernel would change before it takes it is left out.
    """
    heads, _, start = case.ask(None)
    divisors = [n for n in range(1, heads.pool_heads + 1) if heads.pool_heads % n == 0]
    tiles = [2**i for i in range(4, 10) if 256 <= 2**i * heads.queries <= 1024]
    if isinstance(start, DecodeConfig):
        grid = {
            "block_tokens": {256, 512, 1024, 2048, start.block_tokens},
            "heads_per_tile": {n for n in divisors if n == 1 or n * heads.queries <= 64},
            "num_buffers": {2, 3, 4},
        }
    else:
        grid = {
            "tile_tokens": {*tiles, start.tile_tokens},
            "chunk_tokens": {256, 512, 1024, start.chunk_tokens},
            "heads_per_step": {1, heads.pool_heads},
        }
    found: dict[str, Config] = {SHAPES_ALONE: start}
    for values in itertools.product(*map(sorted, grid.values())):
        wanted = dataclasses.replace(start, **dict(zip(grid, values, strict=True)))
        settled = case.ask(wanted)[2]
        if entry_of(settled) == entry_of(wanted) and settled != start:
            found[" ".join(f"{k}={v}" for k, v in entry_of(settled).items())] = settled
    return found


def entry_of(config: Config) -> dict[str, int]:
    """What a table holds; the limit on vector memory follows from it."""
    entry = dataclasses.asdict(config)
    del entry["vmem_limit_bytes"]
    return entry


def measure(
    case: Case, plan: dict[str, Config], info: Any, options: argparse.Namespace
) -> dict[str, float]:
    """Microseconds a layer by candidate, without those that do not compile or disagree."""
    arrays, num_bytes, num_flops = inputs_of(case, info)
    interpret = pltpu.InterpretParams() if options.interpret else False
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
    # The facts are those of one core.
    least = max(num_bytes / info.mem_bw_bytes_per_second, num_flops / info.bf16_ops_per_second)
    least /= info.num_cores
    lines = [["", "us a layer", "limit"]]
    for name, us in sorted(medians.items(), key=lambda item: item[1]):
        lines.append([name, number(us), f"{1e8 * least / us:.1f} %"])
    print(table(lines))
    return medians


def _layers(
    case: Case, config: Config, interpret: Any, num_layers: Any, arrays: dict[str, jax.Array]
) -> jax.Array:
    """Layer after layer, each with the output of the last as its queries."""
    model, kv = case.model, arrays["kv"]
    options = {name: arrays[name] for name in ("scales", "sinks") if name in arrays}
    options |= {"num_kv_heads": model.num_kv_heads, "soft_cap": model.soft_cap}
    options |= {"sm_scale": model.head_dim**-0.5, "config": config, "interpret": interpret}

    def layer(i: jax.Array, q: jax.Array) -> jax.Array:
        args = (q, kv, jax.lax.rem(i, jnp.int32(kv.shape[0])))
        args += (arrays["block_tables"], arrays["context_lens"])
        if case.kernel == "decode":
            return paged_decode(*args, **options)[0]
        return paged_prefill(*args, arrays["starts"], **options)[0]

    return jax.lax.fori_loop(0, num_layers, layer, arrays["q"])


def inputs_of(case: Case, info: Any) -> tuple[dict[str, jax.Array], int, int]:
    """Arguments of `_layers`, bytes that a layer must read, and what it must multiply and add."""
    load, model, rng = case.load, case.model, np.random.default_rng(0)
    limit = min(MAX_POOL_BYTES, info.hbm_capacity_bytes // 4)
    is_decode = case.kernel == "decode"
    row_bytes = -(-load.mean_len // case.block_size) * case.block_bytes
    num_rows = load.num_rows if is_decode else load.num_tokens // 256
    num_rows = max(1, min(num_rows, limit // row_bytes))
    lens = rng.permutation(np.linspace(load.mean_len // 2, load.mean_len * 3 // 2, num_rows))
    lens = lens.astype(np.int32)
    is_used = np.arange(load.context_len // case.block_size) < -(-lens // case.block_size)[:, None]
    num_blocks = int(is_used.sum())
    tables = np.zeros(is_used.shape, np.int32)
    tables[is_used] = 1 + rng.permutation(num_blocks)
    new = np.minimum(lens, 1 if is_decode else load.num_tokens // num_rows)
    num_layers = max(1, min(load.num_layers, limit // (num_blocks * case.block_bytes)))
    q_shape = (num_rows if is_decode else load.num_tokens, model.num_heads, model.head_dim)
    arrays = {
        "q": jax.random.normal(jax.random.key(0), q_shape, jnp.dtype(case.q_dtype)),
        "block_tables": jnp.asarray(tables),
        "context_lens": jnp.asarray(lens),
        "starts": jnp.asarray(np.cumsum([0, *new]), jnp.int32),
    }
    pool = case.pool(num_layers, num_blocks + 1)
    arrays["kv"] = _filled(pool["kv"].shape, pool["kv"].dtype)
    if "scales" in pool:
        arrays["scales"] = jnp.full(pool["scales"].shape, 0.02, jnp.float32)
    if model.has_sinks:
        arrays["sinks"] = jnp.zeros(model.num_heads, jnp.float32)
    pairs = int(np.sum(new * lens - new * (new - 1) // 2))  # of a query and a key it sees
    num_flops = 4 * model.num_heads * model.head_dim * pairs
    return arrays, num_blocks * case.block_bytes, num_flops


@functools.partial(jax.jit, static_argnums=(0, 1))
def _filled(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Blocks that differ from their neighbours, made without a float32 copy of the pool."""
    few = jax.random.normal(jax.random.key(1), (61, *shape[2:]), jnp.float32)
    few = (few if dtype != jnp.int8 else 50 * few).astype(dtype)
    return few[jnp.arange(math.prod(shape[:2])).reshape(shape[:2]) % 61]


def choose(medians: dict[str, float], min_gain: float) -> str | None:
    """The fastest candidate, if it beats the sizes from shapes by more than the fraction."""
    limit = medians.get(SHAPES_ALONE, float("inf")) / (1 + min_gain)
    others = {us: name for name, us in medians.items() if name != SHAPES_ALONE and us < limit}
    return others[min(others)] if others else None


def read_entries(path: Path) -> dict[str, dict[str, Any]]:
    """{kernel: {key: fields of a config}}, nothing where there is no file; raises if it is none."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return {kernel: dict(entries) for kernel, entries in found.items()}


def merge(path: Path, kernel: str, key: str, config: Config | None) -> None:
    """Replaces or removes one entry; a reader finds the old file or the new one."""
    entries = read_entries(path)
    (of_kernel := entries.setdefault(kernel, {})).pop(key, None)
    if config is not None:
        of_kernel[key] = entry_of(config)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    os.replace(new, path)


if __name__ == "__main__":
    raise SystemExit(main())
