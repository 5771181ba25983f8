"""Pictures of a run: requests and blocks over time, and what each block is used for."""

from collections import Counter
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from paged_jax.engine.events import Event
from paged_jax.engine.occupancy import BlockUse
from paged_jax.engine.report import latencies, percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FREE, _CACHED, _SHARED, _EDGE = "#ffffff", "#c9d6e2", "#3b3b3b", "#9a9a9a"
_MAX_NAMED = 10
"""Owners that the legend names: those with the most blocks."""


def check_can_plot() -> None:
    """Raises ImportError with the line for pip when matplotlib is missing."""
    _new_figure(1, 1)


def timeline(events: Sequence[Event], path: str | PathLike[str]) -> None:
    """Draws requests, batch, blocks and latencies over the time of a run.

    Preemptions are red ticks above requests and blocks; P50 and P99 of the time to the first token
    and to the end are lines across the latencies.

    Args:
      events: Of one run, in order.
      path: The picture; its suffix says the format.
    Raises: ValueError when there is no dispatch among the events.
    """
    dispatches = [event for event in events if event.kind == "dispatch"]
    if not dispatches:
        raise ValueError("there is no dispatch among the events: nothing to draw over time")
    start = min(event.time for event in events)
    at = [event.time - start for event in dispatches]
    figure = _new_figure(11, 10)
    queue, batch, blocks, waits = figure.subplots(4, 1, sharex=True)

    for name in ("num_waiting", "num_running", "num_swapped"):
        values = [event.data.get(name, 0) for event in dispatches]
        if name != "num_swapped" or any(values):
            queue.step(at, values, where="post", label=name.removeprefix("num_"))
    queue.set_ylabel("requests")

    tokens = [event.data["num_tokens"] for event in dispatches]
    decode = [event.data["num_decode"] for event in dispatches]
    batch.plot(at, tokens, ".", markersize=3, label="tokens of a dispatch")
    batch.plot(at, decode, ".", markersize=3, label="rows that decode")
    batch.set_ylabel("batch")
    batch.set_yscale("log")

    free = [event.data["num_free"] for event in dispatches]
    cached = [event.data.get("num_cached", 0) for event in dispatches]
    names = ["free", "cached, reclaimable"]
    blocks.stackplot(at, free, cached, labels=names, colors=["#b7d7b0", _CACHED], step="post")
    blocks.set_ylabel("KV blocks")

    _mark_preemptions(events, start, (queue, blocks))
    _draw_latencies(waits, events, start)
    waits.set_xlabel("seconds")
    for axes in (queue, blocks, waits):
        axes.set_ylim(bottom=0)
    for axes in figure.axes:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, bbox_inches="tight")


def block_sizes(rows: Sequence[Mapping[str, Any]], path: str | PathLike[str]) -> None:
    """Draws what blocks of each size cost and save, from the rows of `paged-jax sweep`.

    Args:
      rows: Figures by block size, in any order.
      path: The picture; its suffix says the format.
    """
    rows = sorted(rows, key=lambda row: row["block_size"])
    sizes = [row["block_size"] for row in rows]
    figure = _new_figure(9, 9)
    memory, speed, work = figure.subplots(3, 1, sharex=True)

    memory.plot(sizes, [100 * row["used_kv_fraction"] for row in rows], "o-", label="used KV")
    hits = [100 * row["prefix_hit_fraction"] for row in rows]
    memory.set_ylabel("% of allocated slots")
    if any(hits):
        memory.plot(sizes, hits, "s--", label="prompt tokens from\nthe prefix cache")
        memory.set_ylabel("% of allocated slots,\n% of prompt tokens")
    memory.set_ylim(0, 105)

    speed.plot(sizes, [row["output_tokens_per_s"] for row in rows], "o-", label="tokens/s")
    speed.set_ylabel("output tokens per second")
    speed.set_ylim(bottom=0)
    waits = speed.twinx()
    waits.plot(sizes, [1000 * row["tpot_p99_s"] for row in rows], "s--", color="#c0504d")
    waits.set_ylabel("P99 of the time per\noutput token, ms", color="#c0504d")
    waits.set_ylim(bottom=0)

    work.plot(sizes, [row["blocks_allocated_per_s"] for row in rows], "o-", label="blocks/s")
    work.plot(sizes, [row["recomputed_tokens"] for row in rows], "s--", label="tokens recomputed")
    work.set_yscale("symlog")
    work.set_ylabel("allocations per second,\ntokens in all")
    work.set_xscale("log", base=2)
    work.set_xticks(sizes, [str(size) for size in sizes])
    work.set_xlabel("tokens per block")
    for axes in (memory, speed, work):
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.12, 0.5), frameon=False)
    figure.savefig(path, bbox_inches="tight")


def block_map(uses: Sequence[BlockUse], path: str | PathLike[str]) -> None:
    """Draws every block as a cell in its owner's colour, block 1 first, row after row.

    Blocks of several owners are dark, blocks that only the cache keeps are grey, free
    ones are white.
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle

    owned = Counter(use.owners[0] for use in uses if len(use.owners) == 1)
    names = list(dict.fromkeys(use.owners[0] for use in uses if len(use.owners) == 1))
    colours = dict(zip(names, _palette(len(names)), strict=True))
    width = min(128, max(8, int((2 * len(uses)) ** 0.5)))
    height = -(-len(uses) // width)

    figure = _new_figure(10, 1.2 + 10 * height / width)
    axes = figure.subplots()
    cells = [Rectangle((i % width, i // width), 1, 1) for i in range(len(uses))]
    colour = [_colour(use, colours) for use in uses]
    axes.add_collection(PatchCollection(cells, facecolor=colour, edgecolor=_EDGE, linewidth=0.4))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([y + 0.5 for y in range(height)])
    axes.set_yticklabels([str(1 + y * width) for y in range(height)], fontsize=6)
    axes.set_ylabel("first block of the line")

    counts = block_counts(uses)
    axes.set_title(", ".join(f"{count} {name}" for name, count in counts.items()))
    named = [name for name, _ in owned.most_common(_MAX_NAMED)]
    patches = [Patch(facecolor=colours[n], label=f"{n}: {owned[n]} blocks") for n in named]
    if len(owned) > len(named):
        patches.append(Patch(facecolor="none", label=f"and {len(owned) - len(named)} others"))
    patches += [
        Patch(facecolor=_SHARED, label="shared"),
        Patch(facecolor=_CACHED, label="cached, no reader"),
        Patch(facecolor=_FREE, edgecolor=_EDGE, label="free"),
    ]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    figure.savefig(path, bbox_inches="tight")


def block_counts(uses: Sequence[BlockUse]) -> dict[str, int]:
    """Blocks of one owner, of several, of the cache alone, and free; they add up to all."""
    owners = Counter(min(len(use.owners), 2) for use in uses)
    cached = sum(use.is_cached for use in uses if not use.owners)
    return {
        "of one owner": owners[1],
        "shared": owners[2],
        "cached": cached,
        "free": owners[0] - cached,
    }


def _colour(use: BlockUse, colours: dict[str, Any]) -> Any:
    if len(use.owners) > 1:
        return _SHARED
    if use.owners:
        return colours[use.owners[0]]
    return _CACHED if use.is_cached else _FREE


def _palette(count: int) -> list[Any]:
    """Colours that differ between neighbours: hues a golden angle apart."""
    from colorsys import hsv_to_rgb

    return [hsv_to_rgb(i * 0.618034 % 1.0, 0.55 + 0.3 * (i % 2), 0.95) for i in range(count)]


def _mark_preemptions(events: Sequence[Event], start: float, panels: tuple["Axes", ...]) -> None:
    times = [event.time - start for event in events if event.kind == "preempt"]
    for axes in panels if times else ():
        height = [0.95] * len(times)
        place = axes.get_xaxis_transform()
        label = f"preemptions: {len(times)}"
        axes.plot(times, height, "|", color="red", markersize=10, transform=place, label=label)


def _draw_latencies(axes: "Axes", events: Sequence[Event], start: float) -> None:
    times = latencies(events)
    at = [time - start for time in times.finished_at]
    for name, values, colour in (
        ("first token", times.first_token, "tab:green"),
        ("end", times.total, "tab:purple"),
    ):
        axes.plot(at, values, ".", color=colour, label=f"arrival to {name}")
        for percent, style in ((50, "--"), (99, ":")) if values else ():
            value = percentile(values, percent)
            label = f"P{percent} {name}: {value:.3g} s"
            axes.axhline(value, color=colour, linestyle=style, linewidth=1, label=label)
    axes.set_ylabel("seconds, at the end\nof a request")


def _new_figure(width: float, height: float) -> "Figure":
    # Without pyplot: no window system, and no figure is kept alive.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need an extra: pip install 'paged-jax[plot]'") from error
    return Figure(figsize=(width, height), dpi=120)
