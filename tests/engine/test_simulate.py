"""Traces through scheduler and ledger, with times worked out by hand."""

import math

import pytest

from benchmarks import mixed_trace
from paged_jax.config import ResolvedConfig
from paged_jax.engine.report import RunLog
from paged_jax.engine.simulate import DispatchCost, simulate
from paged_jax.engine.trace import TraceRequest, read_trace, sharegpt_like

COST = DispatchCost(step_seconds=1.0, token_seconds=0.125)
FAST = DispatchCost(step_seconds=0.01, token_seconds=3e-5)


def request(arrival, prompt_tokens, output_tokens, **fields):
    return TraceRequest(
        arrival=arrival, prompt_tokens=prompt_tokens, output_tokens=output_tokens, **fields
    )


def run(trace, cost=COST, **options):
    """Figures and run_log of a trace under the options."""
    settings = {
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "scheduling_policy": "fcfs",
        "enable_prefix_caching": True,
        "decode_steps": 1,
    }
    config = ResolvedConfig(**{**settings, **options})
    run_log = RunLog(config.max_model_len, keeps_blocks=True)
    return simulate(trace, config, cost, run_log), run_log


def times(run_log, kind):
    return {e.request_id: e.time for e in run_log.events if e.kind == kind}


def test_one_request_takes_a_dispatch_per_token():
    figures, run_log = run([request(2.0, 8, 3)])
    # Prompt: 1 + 8/8 s; then two tokens at 1 + 1/8 s.
    assert times(run_log, "add") == {"0": 2.0}
    assert times(run_log, "first_token") == {"0": 4.0}
    assert times(run_log, "finish") == {"0": 6.25}
    assert (figures["ttft_p50_s"], figures["latency_p99_s"]) == (2.0, 4.25)
    assert (figures["num_dispatches"], figures["mean_batch_rows"]) == (3, 1.0)


def test_several_steps_of_a_dispatch_cost_as_many():
    figures, run_log = run([request(0.0, 8, 5)], decode_steps=4)
    assert times(run_log, "finish") == {"0": 2.0 + 4 * 1.125}
    assert figures["num_dispatches"] == 2


def test_who_arrives_during_a_dispatch_waits_for_its_end():
    _, run_log = run([request(0.0, 8, 1), request(1.0, 8, 1)])
    assert times(run_log, "add") == {"0": 0.0, "1": 1.0}
    assert times(run_log, "finish") == {"0": 2.0, "1": 4.0}
    admitted = [e for e in run_log.events if e.kind == "admit"]
    assert [(e.request_id, e.time) for e in admitted] == [("0", 0.0), ("1", 2.0)]


def test_nothing_happens_between_arrivals():
    figures, run_log = run([request(0.0, 8, 1), request(100.0, 8, 1)])
    assert times(run_log, "finish") == {"0": 2.0, "1": 102.0}
    assert figures["num_dispatches"] == 2
    assert figures["seconds"] == 102.0


def test_a_long_prompt_runs_in_chunks():
    _, run_log = run([request(0.0, 40, 1)], max_num_batched_tokens=16)
    tokens = [e.data["num_tokens"] for e in run_log.events if e.kind == "dispatch"]
    assert tokens == [16, 16, 8, 0]
    assert times(run_log, "finish") == {"0": 3 + 40 / 8}


def test_the_urgent_go_first_with_priority():
    # One row: who is second waits for the first to end.
    trace = [request(0.0, 8, 1), request(0.5, 8, 1, priority=1), request(1.0, 8, 1, priority=-1)]
    _, fcfs = run(trace, max_num_seqs=1)
    figures, by_priority = run(trace, max_num_seqs=1, scheduling_policy="priority")
    assert times(fcfs, "finish") == {"0": 2.0, "1": 4.0, "2": 6.0}
    assert times(by_priority, "finish") == {"0": 2.0, "1": 6.0, "2": 4.0}
    assert figures["urgent_ttft_p99_s"] == 3.0


def test_a_prefix_of_a_group_is_computed_once():
    trace = [
        request(4.0 * i, 24, 2, prefix_group=group, prefix_tokens=16)
        for i, group in enumerate(["a", "a", "b", "a"])
    ]
    figures, run_log = run(trace)
    # The second and the fourth find four whole blocks.
    assert figures["prefix_hit_fraction"] == 2 * 16 / (4 * 24)
    assert [e.count for e in run_log.events if e.kind == "admit"] == [0, 16, 0, 16]
    assert run(trace, enable_prefix_caching=False)[0]["prefix_hit_fraction"] == 0


def test_blocks_are_seen_when_they_are_fullest():
    trace = [request(0.0, 6, 8), request(4.0, 6, 8)]
    _, run_log = run(trace, num_blocks=12, enable_prefix_caching=False)
    owners = [use.owners for use in run_log.fullest]
    assert owners.count(("0",)) == 4
    assert owners.count(("1",)) >= 2
    assert len(owners) == 12


def test_preempted_requests_end_too():
    trace = [request(0.0, 8, 24) for _ in range(6)]
    figures, run_log = run(trace, num_blocks=16)
    assert figures["num_preemptions"] > 0
    assert figures["num_preemptions"] == sum(e.kind == "preempt" for e in run_log.events)
    assert [e.count for e in run_log.events if e.kind == "finish"] == [24] * 6
    assert run(trace)[0]["num_preemptions"] == 0


def test_a_request_that_fills_the_pool_ends_early():
    _, run_log = run([request(0.0, 8, 40)], num_blocks=4)
    [finish] = [e for e in run_log.events if e.kind == "finish"]
    # 16 slots hold all but the last token that is sampled.
    assert finish.count == 9


def test_all_blocks_are_free_or_cached_at_the_end():
    trace = sharegpt_like(40, request_rate=5.0, seed=0, max_model_len=256)
    for options in ({}, {"enable_prefix_caching": False}):
        figures, run_log = run(
            trace, FAST, max_model_len=256, num_blocks=80, decode_steps=8, **options
        )
        last = run_log.events[-1].data
        assert last["num_free"] + last["num_cached"] == 80
        assert last["num_running"] == last["num_waiting"] == 0
        assert figures["output_tokens"] == sum(r.output_tokens for r in trace)


def test_a_replay_is_the_same():
    trace = sharegpt_like(40, request_rate=5.0, seed=0, max_model_len=256)
    options = {"max_model_len": 256, "num_blocks": 80, "decode_steps": 8}
    first, second = run(trace, FAST, **options), run(trace, FAST, **options)
    assert first[0] == second[0]
    assert first[1].events == second[1].events


def test_waste_is_below_four_percent_at_blocks_of_sixteen():
    trace = sharegpt_like(100, request_rate=10.0, seed=0, max_model_len=2048)
    options = {"max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    options["decode_steps"] = 8
    waste = {
        size: run(trace, FAST, block_size=size, num_blocks=16000 // size, **options)[0]
        for size in (16, 64)
    }
    assert waste[16]["kv_waste_fraction"] < 0.04 < waste[64]["kv_waste_fraction"]
    assert waste[16]["contiguous_waste_fraction"] > 0.6


def test_the_mixed_trace_is_what_its_script_writes():
    assert mixed_trace.PATH.read_text(encoding="utf-8") == mixed_trace.lines()


def test_priority_saves_the_chat_of_the_mixed_trace_from_its_batch_work():
    trace = read_trace(mixed_trace.PATH)
    options = {"max_model_len": 2048, "block_size": 16, "num_blocks": 600, "decode_steps": 8}
    options |= {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    cost = DispatchCost(step_seconds=0.02, token_seconds=1e-4)
    fcfs, _ = run(trace, cost, **options)
    by_priority, _ = run(trace, cost, scheduling_policy="priority", **options)
    assert by_priority["urgent_ttft_p99_s"] < fcfs["urgent_ttft_p99_s"] / 4
    assert fcfs["prefix_hit_fraction"] > 0.3


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        ([request(0.0, 60, 5)], r"request 0 of the trace \(65 tokens\)"),
        ([request(0.0, 1, 1), request(0.0, 40, 1)], r"the prompt of request 1 .* \(10 blocks\)"),
    ],
)
def test_a_request_that_can_never_run_is_refused(trace, reason):
    with pytest.raises(ValueError, match=reason):
        run(trace, num_blocks=8)


def test_all_may_arrive_at_once():
    trace = sharegpt_like(10, request_rate=math.inf, seed=0, max_model_len=64)
    figures, _ = run(trace, FAST)
    assert figures["num_requests"] == 10
