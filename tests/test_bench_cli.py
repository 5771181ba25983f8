"""`paged-jax bench`: what it prints, writes, draws and refuses."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from paged_jax.cli import main
from paged_jax.engine.events import read_events

SMALL = ["--max-model-len", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"]


@pytest.fixture
def bench(capsys):
    """Runs the command; returns exit code, stdout, stderr."""

    def bench(*args):
        try:
            code = main(["bench", *map(str, args)])
        except SystemExit as leave:
            code = leave.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return bench


@pytest.fixture
def trace(tmp_path):
    """Six requests of two priorities, with a common prefix."""
    path = tmp_path / "trace.jsonl"
    fields = {"prompt_tokens": 20, "output_tokens": 12, "prefix_group": "a", "prefix_tokens": 16}
    lines = [{"arrival": i / 4, "priority": i % 2, **fields} for i in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_grid_has_a_line_per_combination(bench, trace):
    code, out, err = bench(
        *("--simulate", trace, "--policies", "fcfs,priority", "--pool-sizes", "12,40"),
        *("--block-sizes", "4,8", *SMALL),
    )
    assert (code, err) == (0, "")
    title, *lines = out.splitlines()
    assert "TTFT P50" in title
    assert "KV waste" in title
    assert len(lines) == 8
    assert [line.split()[:3] for line in lines[:4]] == [
        *(["fcfs", "12", "4"], ["fcfs", "40", "4"]),
        *(["fcfs", "12", "8"], ["fcfs", "40", "8"]),
    ]


def test_a_pool_in_tokens_has_equal_memory(bench, trace):
    code, out, _ = bench(
        "--simulate", trace, "--pool-tokens", "160", "--block-sizes", "4,16", "--json", *SMALL
    )
    assert code == 0
    runs = json.loads(out)["runs"]
    assert [(run["block_size"], run["num_blocks"]) for run in runs] == [(4, 40), (16, 10)]
    for run in runs:
        assert run["num_requests"] == 6
        assert run["output_tokens"] == 72
        assert 0 < run["kv_waste_fraction"] < run["contiguous_waste_fraction"] < 1
        assert run["ttft_p50_s"] <= run["ttft_p99_s"] <= run["latency_p99_s"]
        assert run["prefix_hit_fraction"] > 0.3


def test_chat_like_arrivals_are_drawn(bench):
    args = ["--simulate", "sharegpt:20", "--pool-sizes", "40", "--json", *SMALL]
    code, out, _ = bench(*args, "--request-rate", "2", "--seed", "1")
    assert code == 0
    [run] = json.loads(out)["runs"]
    assert run["num_requests"] == 20
    assert bench(*args, "--request-rate", "2", "--seed", "1")[1] == out
    assert bench(*args, "--request-rate", "2", "--seed", "2")[1] != out


def test_one_run_is_written_and_drawn(bench, trace, tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"{name}.png" for name in ("timeline", "blocks")}
    events = tmp_path / "events.jsonl"
    code, _, err = bench(
        *("--simulate", trace, "--pool-sizes", "24", "--block-size", "4", *SMALL),
        *("--timeline", files["timeline"], "--blocks", files["blocks"], "--events", events),
    )
    assert (code, err) == (0, "")
    for file in files.values():
        assert file.read_bytes().startswith(b"\x89PNG")
    kinds = [event.kind for event in read_events(events)]
    assert kinds.count("add") == kinds.count("first_token") == kinds.count("finish") == 6


def test_a_simulation_loads_no_jax(trace):
    args = ["bench", "--simulate", trace, "--pool-sizes", "24", *SMALL]
    code = f"import sys; from paged_jax.cli import main; main({args}); print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["--pool-sizes", "--pool-tokens"]),
        (["--pool-sizes", "0"], ["'0' must be integers of at least 1"]),
        (["--pool-sizes", "x"], ["'x' must be integers"]),
        (["--pool-sizes", "8", "--pool-tokens", "8"], ["not allowed with"]),
        (["--pool-sizes", "8", "--policies", "lottery"], ["scheduling_policy ('lottery')"]),
        (["--pool-sizes", "8", "--num-requests", "3"], ["--num-requests acts only without"]),
        (["--pool-sizes", "8", "--model", "x"], ["--model acts only without"]),
        (["--pool-sizes", "8", "--dtype", "float32"], ["--dtype does not act with --simulate"]),
        (["--pool-sizes", "8", "--request-rate", "1"], ["--request-rate does not act"]),
        (["--pool-sizes", "8", "--step-seconds", "0"], ["step-seconds must be above 0"]),
        (["--pool-sizes", "8,9", "--events", "x"], ["show one run, not 2"]),
        (["--pool-tokens", "8", "--block-sizes", "16"], ["--pool-tokens (8)", "block size (16)"]),
        (["--pool-sizes", "1", "--block-size", "4"], ["must fit into the pool (1 blocks)"]),
        (["--pool-sizes", "8", "--max-model-len", "16"], ["max_model_len (16)"]),
    ],
    ids=lambda value: " ".join(value) or "none" if value and value[0].startswith("--") else "",
)
def test_what_cannot_be_simulated_is_refused(bench, trace, args, words):
    code, out, err = bench("--simulate", trace, *args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize("name", ["no/such/file", "sharegpt:", "sharegpt:0", "sharegpt:-1"])
def test_a_trace_that_is_none_is_refused(bench, name):
    code, out, err = bench("--simulate", name, "--pool-sizes", "8")
    assert (code, out) == (2, "")
    assert name in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--pool-sizes", "8"], "--pool-sizes acts only with --simulate"),
        (["--token-seconds", "1"], "--token-seconds acts only with --simulate"),
        (["--num-requests", "0"], "--num-requests (0) must be at least 1"),
        (["--prefix-len", "129"], "--prefix-len (129) must be in 0..128"),
        (["--request-rate", "0"], "request-rate (0.0) must be above 0"),
    ],
)
def test_a_load_that_is_none_is_refused(bench, args, words):
    code, out, err = bench(*args)
    assert (code, out) == (2, "")
    assert words in err


# With a model.

TINY_LLAMA = Path(__file__).parent / "data" / "tiny" / "llama"
LOAD = [
    *("--model", TINY_LLAMA, "--num-requests", 6, "--prompt-len", 20, "--output-len", 9),
    *("--prefix-len", 16, "--block-size", 4, "--num-blocks", 24, *SMALL, "--warmup", "lazy"),
]


@pytest.mark.by_hand
@pytest.mark.exhaustive
def test_a_model_is_measured(bench, tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"{name}.png" for name in ("timeline", "blocks")}
    events = tmp_path / "events.jsonl"
    code, out, _ = bench(
        *(*LOAD, "--json", "--timeline", files["timeline"]),
        *("--blocks", files["blocks"], "--events", events),
    )
    assert code == 0
    figures = json.loads(out)
    assert figures["num_requests"] == 6
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (6 * 20, 6 * 9)
    assert 0 < figures["ttft_p50_s"] <= figures["ttft_p99_s"] <= figures["latency_p99_s"]
    assert 0 < figures["kv_waste_fraction"] < figures["contiguous_waste_fraction"] < 1
    assert figures["prefix_hit_fraction"] > 0.3
    assert figures["stats"]["num_used"] == 0
    for file in files.values():
        assert file.read_bytes().startswith(b"\x89PNG")
    kinds = Counter(event.kind for event in read_events(events))
    assert kinds["add"] == kinds["first_token"] == kinds["finish"] == 6
    assert kinds["dispatch"] == figures["num_dispatches"]


def test_a_load_at_a_rate_counts_from_arrival(bench, tmp_path):
    events = tmp_path / "events.jsonl"
    code, out, _ = bench(*LOAD, "--request-rate", 50, "--events", events)
    assert code == 0
    assert "time to first token, P99: " in out
    assert "KV slots held and empty: " in out
    added = [event.time for event in read_events(events) if event.kind == "add"]
    assert len(set(added)) == 6
    assert added == sorted(added)


def test_a_prompt_that_the_model_refuses_is_an_error(bench):
    code, out, err = bench(*LOAD, "--prompt-len", 64)
    assert (code, out) == (2, "")
    assert "max_model_len (64)" in err.splitlines()[-1]
