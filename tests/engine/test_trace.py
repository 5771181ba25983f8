import json
import math
import statistics

import pytest

from paged_jax.engine.trace import TraceRequest, read_trace, sharegpt_like, token_ids


def write(path, *requests):
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def test_a_trace_is_read_in_order_of_arrival(tmp_path):
    path = write(
        tmp_path / "trace.jsonl",
        {"arrival": 2.5, "prompt_tokens": 3, "output_tokens": 4, "priority": -1},
        {
            "arrival": 0,
            "prompt_tokens": 9,
            "output_tokens": 1,
            "prefix_group": "system",
            "prefix_tokens": 8,
        },
    )
    assert read_trace(path) == [
        TraceRequest(
            arrival=0, prompt_tokens=9, output_tokens=1, prefix_group="system", prefix_tokens=8
        ),
        TraceRequest(arrival=2.5, prompt_tokens=3, output_tokens=4, priority=-1),
    ]


GOOD = {"arrival": 0.0, "prompt_tokens": 2, "output_tokens": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arrival": -1}, r"arrival \(-1\)"),
        ({"arrival": "soon"}, r"arrival \('soon'\)"),
        ({"prompt_tokens": 0}, r"prompt_tokens \(0\)"),
        ({"output_tokens": 1.5}, r"output_tokens \(1.5\)"),
        ({"priority": "high"}, r"priority \('high'\)"),
        ({"prefix_group": "a", "prefix_tokens": 3}, r"prefix_tokens \(3\) must be at most"),
        ({"prefix_tokens": 1}, "needs a prefix_group"),
        ({"colour": "red"}, "must be an object of arrival, output_tokens"),
    ],
)
def test_a_wrong_request_is_named(tmp_path, change, reason):
    path = write(tmp_path / "trace.jsonl", GOOD, {**GOOD, **change})
    with pytest.raises(ValueError, match=f"line 2 is no request: .*{reason}"):
        read_trace(path)


@pytest.mark.parametrize(("text", "reason"), [("{\n", "line 1"), ("\n", "holds no requests")])
def test_a_file_that_is_no_trace_is_refused(tmp_path, text, reason):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_trace(path)


def test_missing_fields_are_named(tmp_path):
    with pytest.raises(ValueError, match="output_tokens"):
        read_trace(write(tmp_path / "trace.jsonl", {"arrival": 0, "prompt_tokens": 2}))


def test_drawn_lengths_have_the_means_of_sharegpt():
    trace = sharegpt_like(20000, request_rate=10.0, seed=0, max_model_len=8192)
    assert statistics.mean(r.prompt_tokens for r in trace) == pytest.approx(161, rel=0.05)
    assert statistics.mean(r.output_tokens for r in trace) == pytest.approx(338, rel=0.05)
    assert trace[-1].arrival == pytest.approx(2000, rel=0.05)
    assert [r.arrival for r in trace] == sorted(r.arrival for r in trace)


def test_drawing_is_seeded_and_fits_the_model():
    trace = sharegpt_like(500, request_rate=math.inf, seed=1, max_model_len=256)
    assert trace == sharegpt_like(500, request_rate=math.inf, seed=1, max_model_len=256)
    assert trace != sharegpt_like(500, request_rate=math.inf, seed=2, max_model_len=256)
    assert {r.arrival for r in trace} == {0.0}
    assert max(r.prompt_tokens + r.output_tokens for r in trace) == 256
    assert min(min(r.prompt_tokens, r.output_tokens) for r in trace) >= 1


def test_tokens_are_equal_within_the_prefix_of_a_group_and_nowhere_else():
    def request(group, prefix):
        return TraceRequest(
            arrival=0, prompt_tokens=6, output_tokens=2, prefix_group=group, prefix_tokens=prefix
        )

    made = token_ids([request("a", 4), request("a", 3), request("b", 4), request(None, 0)])
    prompts = [prompt for prompt, _ in made]
    assert prompts[0][:3] == prompts[1][:3]
    others = [prompts[0], prompts[1][3:], prompts[2], prompts[3], *(output for _, output in made)]
    flat = [token for part in others for token in part]
    assert len(set(flat)) == len(flat)
    assert [(len(prompt), len(output)) for prompt, output in made] == [(6, 2)] * 4
    assert max(flat) < 2**31
