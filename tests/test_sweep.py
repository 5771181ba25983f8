"""`paged-jax sweep`: one workload under blocks of several sizes."""

import csv
import json

import pytest

from paged_jax.cli import main
from paged_jax.engine.events import Event
from paged_jax.engine.report import summary
from paged_jax.engine.trace import TraceRequest, write_trace
from tests.models.tiny import TINY


def swept(capsys, *flags: str) -> list[dict]:
    assert main(["sweep", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def test_larger_blocks_hold_fewer_tokens_and_are_allocated_less_often(capsys, tmp_path):
    flags = ("--simulate", "--workload", "sharegpt-like:60", "--pool-tokens", "4096")
    table, picture = tmp_path / "sweep.csv", tmp_path / "sweep.png"
    rows = swept(capsys, *flags, "--csv", str(table), "--plot", str(picture))
    assert [row["block_size"] for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert all(row["num_blocks"] * row["block_size"] == 4096 for row in rows)
    assert all(row["output_tokens"] == rows[0]["output_tokens"] for row in rows)
    used = [row["used_kv_fraction"] for row in rows]
    assert used[0] == 1.0
    assert used == sorted(used, reverse=True)
    blocks = [row["blocks_allocated_per_s"] for row in rows]
    assert blocks == sorted(blocks, reverse=True)
    assert rows[0]["num_preemptions"] > 0 < rows[0]["recomputed_tokens"]
    for row in rows:
        assert row["mean_resident_tokens"] <= row["mean_allocated_slots"] <= 4096
        assert row["used_kv_fraction"] == pytest.approx(
            row["mean_resident_tokens"] / row["mean_allocated_slots"]
        )
    with table.open(encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert [float(row["used_kv_fraction"]) for row in written] == used
    assert picture.stat().st_size > 10_000


def test_what_runs_once_is_not_recomputed(capsys, tmp_path):
    """Four of a group: 16 tokens of the prefix are computed once, where blocks are that small."""
    trace = [
        TraceRequest(
            arrival=10.0 * i,
            prompt_tokens=20,
            output_tokens=5,
            prefix_group="a",
            prefix_tokens=16,
        )
        for i in range(4)
    ]
    write_trace(tmp_path / "trace.jsonl", trace)
    flags = ("--simulate", "--workload", str(tmp_path / "trace.jsonl"), "--block-sizes", "1,16,32")
    rows = swept(capsys, *flags)
    assert [row["recomputed_tokens"] for row in rows] == [0, 0, 0]
    assert [row["num_preemptions"] for row in rows] == [0, 0, 0]
    assert [row["prefix_hit_fraction"] for row in rows] == [48 / 80, 48 / 80, 0.0]
    assert [row["most_resident_rows"] for row in rows] == [1, 1, 1]
    # 24 tokens each (the last is never written), of which the first computes all.
    taken = [row["blocks_allocated_per_s"] * row["seconds"] for row in rows]
    assert taken == pytest.approx([24 + 3 * 8, 2 + 3 * 1, 4])


def test_times_per_token_and_what_ran_twice_by_hand():
    def event(time, kind, count=0, **data):
        return Event(time=time, dispatch=0, kind=kind, request_id="a", count=count, data=data)

    figures = summary(
        [
            event(0.0, "add", 10),
            event(0.1, "admit", 4),
            event(0.5, "dispatch", num_tokens=6, num_rows=1),
            event(0.5, "first_token", 1),
            event(0.6, "preempt"),
            event(0.7, "admit", 0),
            event(0.9, "dispatch", num_tokens=11, num_rows=1),
            event(1.3, "dispatch", num_tokens=1, num_rows=1),
            event(1.5, "finish", 3),
        ]
    )
    assert figures["tpot_p50_s"] == pytest.approx(0.5)
    assert figures["tpot_p99_s"] == pytest.approx(0.5)
    # Once: 10 - 4 of the prompt, and two of three outputs. 18 ran.
    assert figures["recomputed_tokens"] == 18 - 8


def test_a_model_is_measured(capsys):
    flags = ("--workload", "sharegpt-like:6", "--pool-tokens", "64", "--block-sizes", "2,16")
    sizes = ("--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--max-model-len", "64")
    rows = swept(capsys, str(TINY / "llama"), *flags, *sizes, "--warmup", "lazy")
    assert [row["num_blocks"] for row in rows] == [32, 4]
    for row in rows:
        assert row["num_requests"] == 6
        assert row["output_tokens"] == rows[0]["output_tokens"] > 0
        assert row["output_tokens_per_s"] > 0 < row["blocks_allocated_per_s"]
        assert 0 < row["used_kv_bytes"] <= row["allocated_kv_bytes"]
    assert rows[0]["used_kv_fraction"] > rows[1]["used_kv_fraction"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--block-size", "4"), "--block-size is what a sweep varies"),
        (("--num-blocks", "4"), "--num-blocks is what a sweep varies"),
        (("--block-sizes", "8192"), "--pool-tokens (4096) must be at least the largest block"),
        (("--simulate", "--workload", "sharegpt-like:0"), "N must be at least 1"),
        (("--simulate", "--request-rate", "0"), "--request-rate (0.0) must be above 0"),
        (("--simulate", "--workload", "no/file"), "no/file"),
    ],
)
def test_wrong_flags_are_named(capsys, flags, message):
    assert main(["sweep", *flags]) == 2
    assert message in capsys.readouterr().err
