"""200 clients at once, a third of whom leave in the middle; and the load of `bench serve`."""

import asyncio
import itertools
import json
import random

import pytest

from benchmarks.server_load import alone, make_bodies, resident_bytes, run_clients
from paged_jax.cli import main
from paged_jax.engine.trace import read_trace, uniform
from tests.server.harness import serving, toy_llm


@pytest.mark.exhaustive
def test_two_hundred_clients_lose_and_mix_nothing(toy):
    llm = toy_llm(toy, num_blocks=60, max_num_seqs=16, max_waiting=170)
    with serving(llm) as server:
        draw = random.Random(0)
        prompts = ["".join(draw.choices("abcdef ghij", k=draw.randrange(1, 30))) for _ in range(24)]
        cases = alone(server.url, make_bodies(draw, prompts, 30))
        asyncio.run(run_clients(server.url, cases, clients=200, seconds=4, seed=1))
        server.settle()
        before = resident_bytes()
        tally = asyncio.run(run_clients(server.url, cases, clients=200, seconds=20))
        stats = server.settle()
        grown = resident_bytes() - before
        print(json.dumps(tally.figures()), grown)
        assert tally.wrong == []
        assert tally.num_whole > 200
        assert tally.num_left > 50
        assert tally.num_healthy > 5
        assert stats["num_preemptions"] > 0
        # The clients live in this process too; a leak of a few KiB per request would show.
        assert grown < 48 * 2**20
        assert server.app.state.metrics.num_tracked == 0


def test_bench_serve_reports_and_saves(server, tmp_path, capsys):
    trace, samples = tmp_path / "trace.jsonl", tmp_path / "samples.jsonl"
    common = ["bench", "serve", "--base-url", server.url, "--json"]
    load = ["--num-requests", "8", "--prompt-len", "9", "--output-len", "5", "--prefix-len", "4"]
    arrivals = ["--request-rate", "50", "--burstiness", "0.5", "--max-concurrency", "3"]
    saved = ["--save-trace", str(trace), "--save-samples", str(samples)]
    assert main([*common, *load, *arrivals, *saved]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_requests"], found["num_failed"]) == (8, 0)
    assert (found["prompt_tokens"], found["output_tokens"]) == (72, 40)
    assert 0 < found["ttft_p50_s"] <= found["ttft_p99_s"] <= found["latency_p99_s"]
    requests = read_trace(trace)
    assert len(requests) == 8
    assert requests[0].prefix_tokens == 4
    assert sorted(request.arrival for request in requests)[-1] > 0
    assert len(samples.read_text().splitlines()) == 8
    # What was saved runs again, and in the simulator.
    assert main([*common, "--trace", str(trace)]) == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 40
    assert main(["bench", "--simulate", str(trace), "--pool-sizes", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["num_requests"] == 8


def test_bench_serve_tells_what_failed(server, capsys):
    common = ["bench", "serve", "--base-url", server.url]
    assert main([*common, "--num-requests", "2", "--prompt-len", "100"]) == 1
    shown = capsys.readouterr().out
    assert "failed: 2" in shown
    assert "max_model_len" in shown
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "--base-url" in capsys.readouterr().err
    for bad in (["--burstiness", "2"], ["--request-rate", "0"], ["--output-len", "0"]):
        assert main([*common, *bad]) == 2
        assert bad[0] in capsys.readouterr().err


def test_arrivals_are_poisson_or_come_in_bursts():
    def spread(burstiness: float) -> float:
        sizes = {"prompt_tokens": 1, "output_tokens": 1}
        trace = uniform(4000, request_rate=10, burstiness=burstiness, seed=1, **sizes)
        gaps = [b.arrival - a.arrival for a, b in itertools.pairwise(trace)]
        mean = sum(gaps) / len(gaps)
        assert mean == pytest.approx(0.1, rel=0.1)
        return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2

    # Of a gamma distribution the squared coefficient of variation is 1 / shape.
    assert spread(1.0) == pytest.approx(1.0, rel=0.15)
    assert spread(0.25) == pytest.approx(4.0, rel=0.3)
    assert spread(4.0) == pytest.approx(0.25, rel=0.15)
