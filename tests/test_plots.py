import builtins
import sys

import pytest

from paged_jax.cli import plots
from paged_jax.engine.events import Event
from paged_jax.engine.occupancy import BlockUse

pytest.importorskip("matplotlib")

USES = [
    BlockUse(owners=("a", "b"), is_cached=True),
    BlockUse(owners=("a",), is_cached=True),
    BlockUse(owners=("b",)),
    BlockUse(is_cached=True),
    BlockUse(),
    BlockUse(),
]


def run(num_requests=4):
    """Requests one after the other, each with two dispatches and every second one preempted."""
    for i in range(num_requests):
        name, time = str(i), float(i)
        yield Event(time=time, dispatch=2 * i, kind="add", request_id=name, count=5)
        for half in (0, 1):
            data = {"num_tokens": 5 - 4 * half, "num_rows": 1, "num_decode": half}
            data |= {"num_running": 1, "num_waiting": 3 - i, "num_swapped": i % 2}
            data |= {"num_free": 4 - half, "num_cached": i, "seconds": 0.4}
            at = time + 0.4 * (1 + half)
            yield Event(time=at, dispatch=2 * i + half, kind="dispatch", data=data)
        if i % 2:
            yield Event(time=time + 0.5, dispatch=2 * i, kind="preempt", request_id=name)
        yield Event(time=time + 0.4, dispatch=2 * i, kind="first_token", request_id=name)
        yield Event(time=time + 0.8, dispatch=2 * i + 1, kind="finish", request_id=name, count=2)


@pytest.fixture
def drawn(monkeypatch):
    """Keeps the figures that are drawn."""
    figures, make = [], plots._new_figure

    def keep(width, height):
        figures.append(make(width, height))
        return figures[-1]

    monkeypatch.setattr(plots, "_new_figure", keep)
    return figures


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_timeline_marks_percentiles_and_preemptions(tmp_path, drawn):
    path = tmp_path / "timeline.png"
    plots.timeline(list(run()), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    [figure] = drawn
    queue, batch, blocks, waits = figure.axes
    assert labels(queue) == ["waiting", "running", "swapped", "preemptions: 2"]
    assert labels(batch) == ["tokens of a dispatch", "rows that decode"]
    assert labels(blocks) == ["free", "cached, reclaimable", "preemptions: 2"]
    assert labels(waits) == [
        *("arrival to first token", "P50 first token: 0.4 s", "P99 first token: 0.4 s"),
        *("arrival to end", "P50 end: 0.8 s", "P99 end: 0.8 s"),
    ]
    waiting = queue.lines[0]
    assert list(waiting.get_ydata()) == [3, 3, 2, 2, 1, 1, 0, 0]
    assert waiting.get_xdata()[0] == pytest.approx(0.4)


def test_a_timeline_shows_a_run_in_which_nothing_ended(tmp_path):
    plots.timeline(list(run())[:3], tmp_path / "timeline.svg")
    assert "<svg" in (tmp_path / "timeline.svg").read_text()


def test_a_timeline_needs_a_dispatch(tmp_path):
    with pytest.raises(ValueError, match="no dispatch"):
        plots.timeline(
            [Event(time=0.0, dispatch=0, kind="add", request_id="a")], tmp_path / "x.png"
        )


def test_counts_of_a_block_map_add_up():
    assert plots.block_counts(USES) == {"of one owner": 2, "shared": 1, "cached": 1, "free": 2}


def test_a_block_map_has_a_cell_per_block(tmp_path, drawn):
    path = tmp_path / "blocks.png"
    plots.block_map(USES, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    [figure] = drawn
    [axes] = figure.axes
    [cells] = axes.collections
    colours = [tuple(colour) for colour in cells.get_facecolors()]
    assert len(cells.get_paths()) == len(colours) == len(USES)
    # shared, a, b, cached, free, free
    assert len(set(colours)) == 5
    assert colours[4] == colours[5]
    assert axes.get_title() == "2 of one owner, 1 shared, 1 cached, 2 free"
    assert labels(axes) == ["a: 1 blocks", "b: 1 blocks", "shared", "cached, no reader", "free"]


def test_a_block_map_names_the_largest_owners(tmp_path, drawn):
    uses = [BlockUse(owners=(f"r{i}",)) for i in range(30) for _ in range(1 + (i == 29))]
    plots.block_map(uses, tmp_path / "blocks.png")
    [axes] = drawn[0].axes
    assert labels(axes)[0] == "r29: 2 blocks"
    assert "and 20 others" in labels(axes)


def test_an_empty_or_large_pool_can_be_drawn(tmp_path):
    plots.block_map([BlockUse()] * 3, tmp_path / "small.png")
    plots.block_map([BlockUse(owners=("a", "b"))] * 5000, tmp_path / "large.png")


def test_without_matplotlib_the_line_for_pip_is_told(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError("no matplotlib")
        return real(name, *args, **kwargs)

    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'paged-jax\[plot\]'"):
        plots.check_can_plot()
