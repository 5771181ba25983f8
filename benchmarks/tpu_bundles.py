"""How long is the static schedule of the TPU attention kernels?

A schedule length is the number of instruction bundles, a cycle each, that the compiler lays out: a
floor under the time, as it knows no stalls, and known without a device. Counted is what one item
takes on the steady path: copies of the next item started, the wait, products and softmax without
masks. Beginnings and ends of rows and blocks at their edges are not in it.

decode   bundles per token and layer, all KV heads, beside the cycles in which HBM delivers a token
prefill  bundles per tile of 512 query rows and 512 keys of a KV head, with the starting of copies
         and without, and the share of the matrix units' nominal peak that the latter is

    python benchmarks/tpu_bundles.py                        # with the extra `aot`; ten minutes
    python benchmarks/tpu_bundles.py --targets v6e --sweep  # other sizes of items, heads per tile
    python benchmarks/tpu_bundles.py --json FILE
"""

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from llo import FLAGS, Kernel, read_kernel, steady_path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pallas_kernels.tpu.config import decode_config, prefill_config
from pallas_kernels.tpu.decode import paged_decode
from pallas_kernels.tpu.heads import heads_of
from pallas_kernels.tpu.prefill import paged_prefill
from tests.aot.targets import compile_for

CONTEXT_LEN = 8192
NUM_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Data sheet of a TensorCore."""

    clock_ghz: float  # v7x: a guess
    hbm_gb_s: float
    peak_tflop_s: float  # bfloat16
    delay_slots: int = 4  # bundles after a branch, executed in any case; on v7x some have fewer

    @property
    def bytes_per_cycle(self) -> float:
        return self.hbm_gb_s / self.clock_ghz

    @property
    def flop_per_cycle(self) -> float:
        return 1e3 * self.peak_tflop_s / self.clock_ghz


CHIPS = {
    "v5e": Chip(clock_ghz=1.5, hbm_gb_s=819, peak_tflop_s=197),
    "v5p": Chip(clock_ghz=1.75, hbm_gb_s=2460 / 2, peak_tflop_s=459 / 2),
    "v6e": Chip(clock_ghz=1.75, hbm_gb_s=1640, peak_tflop_s=918),
    "v7x": Chip(clock_ghz=2.2, hbm_gb_s=3700, peak_tflop_s=1153, delay_slots=6),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel at a shape; a bound is a number per chip, of bundles per token or of the share."""

    kernel: str
    num_kv_heads: int
    group: int
    head_dim: int = 128
    block_size: int = 128
    pool: str = "bfloat16"
    bounds: dict[str, float] = dataclasses.field(default_factory=dict)
    is_bound_by_hbm: bool = False
    targets: tuple[str, ...] = tuple(CHIPS)

    def __str__(self) -> str:
        sizes = f"K{self.num_kv_heads} G{self.group} D{self.head_dim} P{self.block_size}"
        return f"{self.kernel} {sizes} {self.pool}"

    @property
    def heads_per_row(self) -> int:
        """KV heads side by side in a pool row."""
        return max(1, 128 // self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a layer, with the scales of an 8-bit pool."""
        itemsize = jnp.dtype(self.pool).itemsize
        scale_bytes = 4 if itemsize == 1 else 0
        return 2 * self.num_kv_heads * (self.head_dim * itemsize + scale_bytes)


_DECODE_BOUNDS = {"v5e": 1.4, "v6e": 1.25, "v7x": 1.25}
_PACKED_BOUNDS = {"v5e": 0.9, "v6e": 0.9, "v7x": 0.9}
_PREFILL_BOUNDS = {"v5e": 1.0, "v6e": 0.3, "v7x": 0.3}

CASES = (
    Case(kernel="decode", num_kv_heads=8, group=4, bounds=_DECODE_BOUNDS, is_bound_by_hbm=True),
    Case(kernel="decode", num_kv_heads=8, group=4, block_size=64, is_bound_by_hbm=True),
    Case(kernel="decode", num_kv_heads=8, group=4, block_size=16, is_bound_by_hbm=True),
    Case(
        kernel="decode",
        num_kv_heads=8,
        group=4,
        head_dim=64,
        bounds=_PACKED_BOUNDS,
        is_bound_by_hbm=True,
    ),
    Case(kernel="decode", num_kv_heads=2, group=8, is_bound_by_hbm=True),
    Case(kernel="decode", num_kv_heads=1, group=8, is_bound_by_hbm=True),
    Case(kernel="decode", num_kv_heads=8, group=4, pool="int8", is_bound_by_hbm=True),
    Case(
        kernel="decode",
        num_kv_heads=8,
        group=4,
        pool="float8_e4m3fn",
        is_bound_by_hbm=True,
        targets=("v7x",),
    ),
    Case(kernel="decode", num_kv_heads=8, group=4, pool="float8_e5m2", is_bound_by_hbm=True),
    # Two KV heads: a step has one of them, and XLA's copies around the kernel stay small.
    Case(kernel="prefill", num_kv_heads=2, group=4, bounds=_PREFILL_BOUNDS),
    Case(kernel="prefill", num_kv_heads=2, group=4, head_dim=256, bounds=_PREFILL_BOUNDS),
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What was counted of a case on a target under a config."""

    case: str
    target: str
    config: dict[str, Any]
    is_default: bool
    item_bundles: int
    body_bundles: int
    value: float  # bundles per token, or share of peak
    with_copies: float  # the same, or the share with copies started
    budget: float | None  # cycles per token in which HBM delivers it
    bound: float | None
    slots: dict[str, float]  # of the body, the fullest first

    @property
    def is_ok(self) -> bool | None:
        """Whether every bound is kept, in the two digits that are printed; None without one."""
        value = round(self.value, 2)
        if self.case.startswith("prefill"):
            return None if self.bound is None else value >= self.bound
        bounds = [bound for bound in (self.bound, self.budget) if bound is not None]
        return value <= min(bounds) if bounds else None


def main() -> None:
    options = _parse_options()
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        # Before the compiler is loaded, which is with the first target.
        flags = FLAGS.format(folder=folder)
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}"
        for case in CASES:
            if options.cases not in str(case):
                continue
            for target in options.targets:
                if target in case.targets:
                    for figure in measure(case, target, Path(folder), options.sweep):
                        print(_progress(figure), file=sys.stderr, flush=True)
                        figures.append(figure)
    print(table(figures))
    if options.json:
        report = {
            "versions": {p: importlib.metadata.version(p) for p in ("jax", "libtpu")},
            "figures": [dataclasses.asdict(figure) | {"is_ok": figure.is_ok} for figure in figures],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", default=",".join(CHIPS), help=f"of {','.join(CHIPS)}")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases with TEXT in them")
    parser.add_argument("--sweep", action="store_true", help="other configs than the default too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    options = parser.parse_args()
    options.targets = options.targets.split(",")
    for target in options.targets:
        if target not in CHIPS:
            parser.error(f"--targets: {target!r} is not one of {', '.join(CHIPS)}")
    return options


def measure(case: Case, target: str, folder: Path, is_swept: bool) -> Iterator[Figure]:
    """The figure of the default config and, on request, those of others."""
    kernel, default = compile_case(case, target, folder, {})
    yield figure_of(case, target, kernel, default, is_default=True)
    if is_swept:
        others = _other_items if case.kernel == "decode" else _other_tiles
        for fields in others(case, default):
            try:
                kernel, config = compile_case(case, target, folder, fields)
            # A tile that does not fit is an answer too.
            except jax.errors.JaxRuntimeError as error:
                print(f"{case} {target} {fields}: {str(error)[:100]}", file=sys.stderr)
                continue
            yield figure_of(case, target, kernel, config, is_default=False)


def _other_items(case: Case, default: Any) -> Iterator[dict[str, int]]:
    for tokens in (512, 1024, 2048):
        if tokens != default.block_tokens:
            yield {"block_tokens": tokens}
    pool_heads = case.num_kv_heads // case.heads_per_row
    for heads in (1, 2, 4):
        is_fit = pool_heads % heads == 0 and heads * case.heads_per_row * case.group <= 16
        if heads != default.heads_per_tile and is_fit:
            yield {"heads_per_tile": heads}


def _other_tiles(_: Case, default: Any) -> Iterator[dict[str, int]]:
    for tokens, keys in itertools.product((64, 128, 256), (256, 512, 1024)):
        if (tokens, keys) != (default.tile_tokens, default.chunk_tokens):
            yield {"tile_tokens": tokens, "chunk_tokens": keys}


def compile_case(
    case: Case, target: str, folder: Path, fields: dict[str, int]
) -> tuple[Kernel, Any]:
    """Compiles a case and reads its bundles; `fields` replace those of the default config."""
    for file in folder.iterdir():
        file.unlink()
    configs: list[Any] = []
    pool_rows, width = 2 * case.num_kv_heads // case.heads_per_row, max(128, case.head_dim)
    dtype = jnp.dtype(case.pool)
    block = (pool_rows, case.block_size, width)
    # Above what vector memory holds.
    num_blocks = (300 << 20) // (2 * pool_rows * case.block_size * width * dtype.itemsize)
    kv = jax.ShapeDtypeStruct((2, num_blocks, *block), dtype)
    scales = None
    if dtype.itemsize == 1:
        scale_block = (2, num_blocks, 2 * case.num_kv_heads, case.block_size)
        scales = jax.ShapeDtypeStruct(scale_block, jnp.float32)
    num_heads = case.num_kv_heads * case.group
    num_tokens = NUM_ROWS if case.kernel == "decode" else 256
    q = jax.ShapeDtypeStruct((num_tokens, num_heads, case.head_dim), jnp.bfloat16)
    tables = jax.ShapeDtypeStruct((NUM_ROWS, CONTEXT_LEN // case.block_size), jnp.int32)
    lens = jax.ShapeDtypeStruct((NUM_ROWS,), jnp.int32)
    starts = jax.ShapeDtypeStruct((NUM_ROWS + 1,), jnp.int32)

    def run(q, kv, scales, tables, lens, starts):
        heads = heads_of(q.shape[1:], kv, case.num_kv_heads, scales)
        choose, sizes = decode_config, {"num_rows": NUM_ROWS}
        if case.kernel == "prefill":
            choose, sizes = prefill_config, {"num_tokens": num_tokens}
        # Here, where the target is known.
        config = choose(heads, kv, q.dtype, max_tokens=CONTEXT_LEN, **sizes)
        if fields:
            config = dataclasses.replace(config, **fields, vmem_limit_bytes=48 << 20)
        configs.append(config)
        common = {
            "sm_scale": case.head_dim**-0.5,
            "num_kv_heads": case.num_kv_heads,
            "scales": scales,
            "config": config,
        }
        if case.kernel == "decode":
            return paged_decode(q, kv, 1, tables, lens, **common)[0]
        return paged_prefill(q, kv, 1, tables, lens, starts, **common)[0]

    compile_for(target, run, (q, kv, scales, tables, lens, starts))
    kernel = read_kernel(folder, f"paged_{case.kernel}", delay_slots=CHIPS[target].delay_slots)
    return kernel, configs[-1]


def figure_of(case: Case, target: str, kernel: Kernel, config: Any, *, is_default: bool) -> Figure:
    steady, chip = steady_path(kernel), CHIPS[target]
    if case.kernel == "decode":
        value = with_copies = len(steady.item) / config.block_tokens
    else:
        value, with_copies = (
            _share(case, config, chip, path) for path in (steady.body, steady.item)
        )
    is_bound = case.is_bound_by_hbm
    return Figure(
        case=str(case),
        target=target,
        config=dataclasses.asdict(config),
        is_default=is_default,
        item_bundles=len(steady.item),
        body_bundles=len(steady.body),
        value=value,
        with_copies=with_copies,
        budget=case.token_bytes / chip.bytes_per_cycle if is_bound else None,
        bound=case.bounds.get(target),
        slots=kernel.shares(steady.body),
    )


def _share(case: Case, config: Any, chip: Chip, path: tuple[int, ...]) -> float:
    """Of the peak: two products of the tile's rows, keys and head_dim."""
    flop = 4 * config.tile_tokens * case.group * config.chunk_tokens * case.head_dim
    return flop / (len(path) * chip.flop_per_cycle)


def table(figures: list[Figure]) -> str:
    """Two Markdown tables."""
    parts = []
    for kernel, names in (
        ("decode", ["bundles per token", "bound", "HBM's cycles"]),
        ("prefill", ["share of peak", "with copies started", "bound"]),
    ):
        own = [figure for figure in figures if figure.case.startswith(kernel)]
        if not own:
            continue
        lines = [["case", "target", "config", "bundles per item", *names, "", "fullest slots"]]
        lines += [["---"] * len(lines[0]), *map(_line, own)]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def _line(figure: Figure) -> list[str]:
    config = figure.config
    if figure.case.startswith("decode"):
        sizes = f"{config['block_tokens']} keys, {config['heads_per_tile']} heads"
        numbers = [_text(x) for x in (figure.value, figure.bound, figure.budget)]
        bundles = str(figure.item_bundles)
    else:
        sizes = f"{config['tile_tokens']} x {config['chunk_tokens']}"
        numbers = [_text(x) for x in (figure.value, figure.with_copies, figure.bound)]
        bundles = f"{figure.body_bundles} + {figure.item_bundles - figure.body_bundles}"
    verdict = {None: "", True: "ok", False: "missed"}[figure.is_ok]
    fullest = ", ".join(f"{kind} {share:.2f}" for kind, share in list(figure.slots.items())[:2])
    name = figure.case if figure.is_default else f"({figure.case})"
    return [name, figure.target, sizes, bundles, *numbers, verdict, fullest]


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def _progress(figure: Figure) -> str:
    return " | ".join(_line(figure))


if __name__ == "__main__":
    main()
