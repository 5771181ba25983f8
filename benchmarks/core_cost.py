"""What do the transitions of the functional core cost?

Five parts, each measured on the default device with dispatch included (`block_until_ready`):

chain        allocate of one token for 256 rows, call after call, each on the state of the last
transitions  every transition, each time on a fresh copy of the same state
growth       allocate and free over N, M and S, the others held fixed
copy         what `copy_blocks` adds to allocate and write when no row copies
step         what allocate adds to a decode step of a model of SmolLM2 135M's sizes

The sizes are N 65,536, S 256, M 512 and blocks of 16 where nothing else is said. A transition runs
under plain `jit`, under `jit` with the state donated, and beside them the same work is done by a
block manager in plain Python (`paged_jax.ledger`), which must reach the same block ids. The calls
of a part are timed in turn, in a new random order each round: a call finds the caches full of other
programs, which `chain` spares it. Neighbours on a shared machine only ever add time, so the tables
show the minimum beside the median.

    python benchmarks/core_cost.py
    python benchmarks/core_cost.py --parts growth --plot FILE.svg     # needs matplotlib
    python benchmarks/core_cost.py --repeats 1000 --json FILE
"""

import argparse
import functools
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from core_cases import Sizes, all_cases, check_same_ids, copy_ledger, copy_state, make_start
from flax import nnx
from timing import Call, interleave, ratio_of, summaries, summary, table, text

from paged_jax import core
from paged_jax.core import BlockState, CacheSpec, KVCache, PagedCache
from paged_jax.ledger import Ledger
from paged_jax.models.decoder import Decoder
from paged_jax.models.spec import RopeSpec, uniform_spec

PARTS = ("chain", "transitions", "growth", "copy", "step")
GROWTH = {
    "num_blocks": [2**k for k in (10, 12, 14, 16, 18, 20)],
    "max_blocks_per_seq": [2**k for k in (5, 6, 7, 8, 9, 10, 11, 12)],
    "max_seqs": [2**k for k in (3, 4, 5, 6, 7, 8, 9, 10)],
}
WAYS = ("donated", "jit", "Ledger")
LETTERS = {"num_blocks": "N", "max_blocks_per_seq": "M", "max_seqs": "S"}
SMOLLM2 = uniform_spec(
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_size=1536,
    norm_eps=1e-5,
    rope=RopeSpec(theta=100000.0),
    max_position_embeddings=8192,
    is_tied=True,
)


def main() -> None:
    options = _parse_options()
    figures = {}
    for part in options.parts:
        print(f"\n{part}", flush=True)
        figures[part] = globals()[f"measure_{part}"](options.repeats)
    report = {
        "machine": {
            "platform": platform.platform(),
            "device": jax.devices()[0].device_kind,
            "cpus": os.cpu_count(),
            "load_average_at_end": os.getloadavg(),  # above `cpus`: other work took part of them
        },
        "jax": jax.__version__,
        "repeats": options.repeats,
        "microseconds": figures,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot_growth(figures["growth"], options.plot)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument(
        "--repeats",
        type=int,
        default=300,
        help="rounds; `copy` makes five times as many, `step` a fifth",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw `growth`")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"--parts: {part!r} is not one of {', '.join(PARTS)}")
    if options.plot and "growth" not in options.parts:
        parser.error("--plot draws the part growth, which --parts leaves out")
    if options.repeats < 5:
        parser.error(f"--repeats ({options.repeats}) must be at least 5")
    return options


def measure_chain(repeats: int) -> dict:
    """One token for every row, call after call: each 16th call gives every row a block."""
    sizes = Sizes()
    tokens = jnp.ones(sizes.max_seqs, jnp.int32)
    one_each = dict.fromkeys(range(sizes.max_seqs), 1)
    half = sizes.block_size // 2
    start, ledger = make_start(sizes, [half] * sizes.max_seqs)
    allocate = functools.partial(core.allocate, max_new_blocks=512)
    runs = {"donated": jax.jit(allocate, donate_argnums=0), "jit": jax.jit(allocate)}
    states = {way: copy_state(start) for way in runs}
    times: dict[str, list[float]] = {}

    def advance(way: str) -> None:
        if way == "Ledger":
            ledger.allocate(one_each)
        else:
            states[way], _ = jax.block_until_ready(runs[way](states[way], tokens))

    # The pool lasts for so many rounds; the first one compiles. Rows grow in the middle of a round.
    for turn in range(min(repeats + 1, sizes.num_blocks // sizes.max_seqs - 1)):
        for way in WAYS:
            for step in range(sizes.block_size):
                begin = time.perf_counter()
                advance(way)
                end = time.perf_counter()
                title = "every row grows" if step == half else "no row grows"
                if turn:
                    times.setdefault(f"allocate, {title} | {way}", []).append(1e6 * (end - begin))
    for state in states.values():
        check_same_ids("chain", state, ledger)
    figures = summaries({name: np.array(values) for name, values in times.items()})
    _print_ways(figures)
    return figures


def measure_transitions(repeats: int) -> dict:
    """Every transition at the default sizes."""
    cases = all_cases()
    calls: dict[str, Call] = {}
    for case in cases:
        state, ledger = case.start
        after, ledger_after = jax.jit(case.transition)(state, *case.args), copy_ledger(ledger)
        case.on_ledger(ledger_after)
        after = after[0] if isinstance(after, tuple) else after
        check_same_ids(case.title, after, ledger_after)
        donating = jax.jit(case.transition, donate_argnums=0)
        calls |= {
            f"{case.title} | donated": _on_state(donating, state, case.args),
            f"{case.title} | jit": _on_state(jax.jit(case.transition), state, case.args),
            f"{case.title} | Ledger": (functools.partial(copy_ledger, ledger), case.on_ledger),
        }
    # What any call costs: the state is an argument and one number of it is read.
    empty = jax.jit(lambda state: state.num_free + 1)
    calls["an empty call | jit"] = _on_state(empty, cases[0].start[0], ())
    figures = summaries(interleave(calls, repeats))
    _print_ways(figures)
    print(f"same ids as the ledger: {len(cases)} of {len(cases)} cases")
    return figures


def measure_growth(repeats: int) -> dict:
    """Allocate and free over one size at a time; every row holds two full blocks and grows."""
    calls: dict[str, Call] = {}
    for size, values in GROWTH.items():
        for value in values:
            sizes = replace(Sizes(), **{size: value})
            state, ledger = make_start(sizes, [2 * sizes.block_size] * sizes.max_seqs)
            allocate = functools.partial(core.allocate, max_new_blocks=2 * sizes.max_seqs)
            tokens = (jnp.ones(sizes.max_seqs, jnp.int32),)
            row = (jnp.arange(sizes.max_seqs) == 1,)
            one_each = dict.fromkeys(range(sizes.max_seqs), 1)
            on_ledger = functools.partial(Ledger.allocate, new_tokens=one_each)
            donate = functools.partial(jax.jit, donate_argnums=0)
            for name, call in (
                ("allocate, donated", _on_state(donate(allocate), state, tokens)),
                ("allocate, jit", _on_state(jax.jit(allocate), state, tokens)),
                ("free one row, donated", _on_state(donate(core.free), state, row)),
                ("Ledger.allocate", (functools.partial(copy_ledger, ledger), on_ledger)),
            ):
                calls[f"{size} | {name} | {value}"] = call
    figures: dict[str, dict] = {size: {} for size in GROWTH}
    for key, figure in summaries(interleave(calls, repeats)).items():
        size, name, value = key.split(" | ")
        figures[size].setdefault(name, {})[int(value)] = figure
    for size, values in GROWTH.items():
        lines = [[f"us: median (minimum), {LETTERS[size]} =", *map(str, values)]]
        lines += [[name, *map(text, points.values())] for name, points in figures[size].items()]
        print(table(lines))
    return figures


def measure_copy(repeats: int) -> dict:
    """Allocate, copy and write for 8 rows in a pool of 4 layers, with and without the copying."""
    sizes = Sizes(num_blocks=2048, max_seqs=8, max_blocks_per_seq=128)
    spec = CacheSpec(num_layers=4, num_kv_heads=4, head_dim=64)
    # The pool is above 256 MiB: XLA treats small ones differently. One pool goes through all calls.
    pool = [core.create_kv_cache(spec, sizes.num_blocks, sizes.block_size, jnp.float32)]
    new = jnp.ones((sizes.max_seqs, spec.num_kv_heads, spec.head_dim), jnp.float32)
    rows = jnp.arange(sizes.max_seqs)

    def step(kv: KVCache, blocks: BlockState, *, is_copied: bool) -> tuple[KVCache, BlockState]:
        tokens = jnp.ones_like(blocks.lengths)
        blocks, allocation = core.allocate(blocks, tokens, max_new_blocks=sizes.max_seqs)
        if is_copied:
            kv = core.copy_blocks(kv, allocation.copy_src, allocation.copy_dst)
        slots = core.slot_mapping(blocks, rows, blocks.lengths - 1)
        for layer in range(spec.num_layers):
            kv = core.write(kv, layer, new, new, slots)
        return kv, blocks

    alone, _ = make_start(sizes, [100] * 8)
    shared, _ = make_start(sizes, [100] * 4 + [0] * 4, [(row, row + 4) for row in range(4)])
    calls: dict[str, Call] = {}
    num_copies = {}
    for title, blocks, is_copied in (
        ("without copy_blocks", alone, False),
        ("with copy_blocks, no row copies", alone, True),
        ("with copy_blocks, 4 rows copy", shared, True),
    ):
        run = jax.jit(functools.partial(step, is_copied=is_copied), donate_argnums=0)
        program = run.lower(pool[0], blocks).compile().as_text() or ""
        num_copies[title] = _count_copies(program, pool[0])
        calls[title] = _on_pool(run, pool, blocks)
    times = interleave(calls, 5 * repeats)
    figures = summaries(times)
    print(table([["us: median (minimum)", ""], *([k, text(v)] for k, v in figures.items())]))
    ratio = ratio_of(times, "with copy_blocks, no row copies", "without copy_blocks")
    print(
        f"with / without, no row copies: medians {ratio['of_medians']:.3f}, "
        f"minima {ratio['of_minima']:.3f}\n"
        f"copies of the whole pool in these programs: {list(num_copies.values())}"
    )
    return figures | {"ratio": ratio, "whole_pool_copies": num_copies}


def measure_step(repeats: int) -> dict:
    """A decode step of 8 rows, every row taking a block: allocate inside, or done before."""
    sizes = Sizes(num_blocks=512, max_seqs=8, max_blocks_per_seq=64)
    graphdef, weights = nnx.split(Decoder(SMOLLM2, rngs=nnx.Rngs(0)))
    leaves, treedef = jax.tree.flatten(weights)
    model_spec = nnx.merge(graphdef, weights).cache_spec()
    pool = [core.create_kv_cache(model_spec, sizes.num_blocks, sizes.block_size, jnp.float32)]
    rows = jnp.arange(sizes.max_seqs)
    allocate = functools.partial(core.allocate, max_new_blocks=sizes.max_seqs)

    def step(kv: KVCache, blocks: BlockState, leaves: list, *, is_inside: bool) -> tuple:
        if is_inside:
            blocks, _ = allocate(blocks, jnp.ones_like(rows))
        batch = core.make_batch(
            blocks, tokens=rows + 1, row_ids=rows, query_lens=jnp.ones_like(rows)
        )
        model = nnx.merge(graphdef, treedef.unflatten(leaves))
        hidden, cache = model(batch, PagedCache(blocks=blocks, kv=kv))
        return cache.kv, (jnp.argmax(model.logits(hidden), axis=-1), blocks)

    before, _ = make_start(sizes, [96] * sizes.max_seqs)
    after, _ = jax.jit(allocate)(before, jnp.ones_like(rows))
    inside = jax.jit(functools.partial(step, is_inside=True), donate_argnums=0)
    outside = jax.jit(functools.partial(step, is_inside=False), donate_argnums=0)
    times = interleave(
        {
            "step, allocate inside": _on_pool(inside, pool, before, leaves),
            "step, allocated before": _on_pool(outside, pool, after, leaves),
        },
        max(5, repeats // 5),
    )
    turns = 100
    loops = {}
    for title, each in (("8", sizes), ("256", Sizes())):
        ones = jnp.ones(each.max_seqs, jnp.int32)
        bound = 2 * each.max_seqs
        loop = jax.jit(
            lambda state, ones=ones, bound=bound: jax.lax.fori_loop(
                0, turns, lambda _, s: core.allocate(s, ones, max_new_blocks=bound)[0], state
            )
        )
        start = make_start(each, [96] * each.max_seqs)[0]
        loops[f"allocate, {title} rows, {turns} in a loop, each"] = _on_state(loop, start, ())
    times |= {name: us / turns for name, us in interleave(loops, max(5, repeats // 5)).items()}
    figures = summaries(times)
    print(table([["us: median (minimum)", ""], *([k, text(v)] for k, v in figures.items())]))
    difference = summary(times["step, allocate inside"] - times["step, allocated before"])
    share = figures[f"allocate, 8 rows, {turns} in a loop, each"]["median"]
    share /= figures["step, allocate inside"]["median"]
    print(
        f"inside - before, round by round: median {difference['median']:.0f} us, "
        f"quartiles {difference['q1']:.0f} to {difference['q3']:.0f}\n"
        f"allocate in a loop / step: {100 * share:.4f} %"
    )
    return figures | {"difference": difference, "share_fraction": share}


def plot_growth(figures: dict, path: Path) -> None:
    """Three panels, one per size; medians as lines, minima as the lower edge of a band."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "core_cost", "font.size": 9}
    styles = {
        "allocate, donated": ("#0b62a4", "o"),
        "allocate, jit": ("#7fb3dd", "s"),
        "free one row, donated": ("#2e8b57", "^"),
        "Ledger.allocate": ("#c2571a", "x"),
    }
    defaults = asdict(Sizes())
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), sharey=True, layout="constrained")
    for panel, (size, series) in zip(panels, figures.items(), strict=True):
        for name, points in series.items():
            color, marker = styles[name]
            x = list(points)
            medians = [point["median"] for point in points.values()]
            minima = [point["min"] for point in points.values()]
            panel.plot(x, medians, color=color, marker=marker, markersize=4, label=name)
            panel.fill_between(x, minima, medians, color=color, alpha=0.12, linewidth=0)
        fixed = ", ".join(f"{LETTERS[k]} {defaults[k]:,}" for k in LETTERS if k != size)
        panel.set(yscale="log", xlabel=f"{LETTERS[size]} = {size}")
        panel.set_xscale("log", base=2)
        panel.set_title(fixed, fontsize=9)
        panel.yaxis.set_major_locator(
            FixedLocator([20, 50, 100, 200, 500, 1000, 2000, 5000, 10000])
        )
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.grid(True, which="major", color="#dddddd", linewidth=0.6)
    panels[0].set_ylabel("microseconds a call")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_svg = path.suffix == ".svg"
    figure.savefig(path, facecolor="white", metadata={"Date": None} if is_svg else None)


def _on_state(run: Callable, state: BlockState, args: tuple) -> Call:
    """A call on a fresh copy of the state, whether it is donated or not."""
    return (
        lambda: jax.block_until_ready(copy_state(state)),
        lambda fresh: jax.block_until_ready(run(fresh, *args)),
    )


def _on_pool(run: Callable, pool: list[KVCache], *args: object) -> Call:
    """A call that donates the pool, which is the first result, and puts it back."""

    def call(kv: KVCache) -> object:
        kv, rest = jax.block_until_ready(run(kv, *args))
        pool.append(kv)
        return rest

    return pool.pop, call


def _count_copies(program: str, cache: KVCache) -> int:
    """Copy instructions of the pool's shape in a compiled program."""
    shape = f"f32[{','.join(map(str, cache.kv.shape))}]"
    return sum(shape in line and " copy(" in line for line in program.splitlines())


def _print_ways(figures: dict[str, dict[str, float]]) -> None:
    titles = dict.fromkeys(key.split(" | ")[0] for key in figures)
    lines = [["us: median (minimum)", *WAYS]]
    lines += [[t, *(text(figures.get(f"{t} | {way}")) for way in WAYS)] for t in titles]
    print(table(lines))


if __name__ == "__main__":
    main()
