"""Metrics, keys, origins, request ids, logs and the description of the API."""

import asyncio
import json
import logging
import threading
from collections import Counter

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from prometheus_client.parser import text_string_to_metric_families

from paged_jax.server.logs import JsonFormatter
from tests.server.harness import serving, toy_llm, wait_for

NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_success_total",
    "paged_jax:compiles_total",
}


def samples(server) -> dict[str, float]:
    """Values of all samples that are of the model, without labels but for a reason."""
    found = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("model_name", None) == "toy" and "le" not in labels:
                reason = labels.get("finished_reason")
                found[sample.name + (f" {reason}" if reason else "")] = sample.value
    return found


def test_metrics_have_vllms_names_and_count(toy):
    with serving(toy_llm(toy)) as server:
        before = samples(server)
        server.complete(prompt="hello", max_tokens=7, temperature=0)
        server.complete(prompt="hello", max_tokens=3, temperature=0, n=2)
        server.settle()
        after = samples(server)
        assert {name.split()[0] for name in after} >= NAMES
        grown = {name: value - before.get(name, 0) for name, value in after.items()}
        assert grown["vllm:prompt_tokens_total"] == 10
        assert grown["vllm:generation_tokens_total"] == 13
        assert grown["vllm:request_success_total length"] == 3
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert grown[f"vllm:{name}_count"] == 2
            assert grown[f"vllm:{name}_sum"] > 0
        assert grown["vllm:inter_token_latency_seconds_count"] > 0
        # Of the second prompt all but one token; the first had nothing to find.
        assert grown["vllm:prefix_cache_hits_total"] == 4
        assert grown["vllm:prefix_cache_queries_total"] >= 10
        assert after["vllm:num_requests_running"] == 0
        assert 0 <= after["vllm:kv_cache_usage_perc"] <= 1
        assert after["paged_jax:compiles_total"] > 0
        openmetrics = server.client.get(
            "/metrics", headers={"Accept": "application/openmetrics-text"}
        )
        assert openmetrics.text.endswith("# EOF\n")


def test_counters_never_fall_under_preemption_and_cache_changes(toy):
    with serving(toy_llm(toy, num_blocks=14)) as server:
        last: dict[str, float] = {}
        for i in range(12):
            prompts = [f"{j}" * (1 + 5 * j) for j in range(4)]
            server.complete(prompt=prompts, max_tokens=25, seed=i)
            if i % 4 == 3:
                asyncio.run(server.llm.call(lambda engine: engine.reset_prefix_cache()))
            found = samples(server)
            for name, value in last.items():
                if name.endswith(("_total", "_count", "_sum")):
                    assert found[name] >= value, name
            queries = found["vllm:prefix_cache_queries_total"]
            assert queries >= found["vllm:prefix_cache_hits_total"] >= 0
            last = found
        assert last["vllm:num_preemptions_total"] > 0


def test_metrics_that_fail_end_no_request(toy, monkeypatch):
    llm = toy_llm(toy)
    with serving(llm) as server:

        def fail(outputs):
            raise ZeroDivisionError

        llm.observer = fail
        assert server.complete(prompt="a", max_tokens=4)["usage"]["completion_tokens"] == 4
        assert llm.observer is None
        assert server.client.get("/health").status_code == 200


def test_a_key_opens_what_is_not_open(toy):
    with serving(toy_llm(toy), api_key="sesame") as server:
        for path in ("/", "/health", "/version", "/metrics", "/docs", "/openapi.json"):
            assert server.client.get(path).status_code == 200, path
        body = {"prompt": "a", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "sesame"}):
            for path in ("/v1/models", "/dashboard/state"):
                assert server.client.get(path, headers=headers).status_code == 401
            response = server.post("/v1/completions", body, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["WWW-Authenticate"] == "Bearer"
        headers = {"Authorization": "Bearer sesame"}
        assert server.post("/v1/completions", body, headers=headers).status_code == 200


def test_pages_of_allowed_origins_may_call(toy):
    with serving(toy_llm(toy), allowed_origins=("https://a.example",), api_key="k") as server:
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        for origin, status in (("https://a.example", 200), ("https://b.example", 400)):
            headers = {"Origin": origin, **asked}
            response = server.client.options("/v1/completions", headers=headers)
            assert response.status_code == status
            allowed = response.headers.get("Access-Control-Allow-Origin")
            assert allowed == (origin if status == 200 else None)
        response = server.client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert response.status_code == 401
        # Scripts may read why.
        assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"


def test_each_request_has_a_name_and_a_line_in_the_log(server):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(JsonFormatter().format(record))
    logger = logging.getLogger("paged_jax.access")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        named = {"X-Request-Id": "my-request.7"}
        body = {"prompt": "hello", "max_tokens": 3}
        response = server.post("/v1/completions", body, headers=named)
        assert response.headers["X-Request-Id"] == "my-request.7"
        wait_for(lambda: len(lines) == 1)  # it is written after the answer
        server.events("/v1/completions", body, headers=named)
        wait_for(lambda: len(lines) == 2)
        bad = server.post("/v1/completions", {}, headers={"X-Request-Id": "no spaces\tplease"})
        assert len(bad.headers["X-Request-Id"]) == 32
        wait_for(lambda: len(lines) == 3)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    first, second, third = map(json.loads, lines)
    for line in (first, second):
        assert (line["request_id"], line["status"], line["path"]) == (
            "my-request.7",
            200,
            "/v1/completions",
        )
        assert (line["prompt_tokens"], line["completion_tokens"]) == (5, 3)
        assert line["finish_reasons"] == ["length"]
        assert line["complete"] is True
        assert line["duration_s"] > 0
    assert third["status"] == 400


def test_two_requests_of_one_name_run_beside_each_other(server):
    found = []
    headers = {"X-Request-Id": "same"}

    def ask():
        body = {"prompt": "abc", "temperature": 0, "max_tokens": 9}
        found.append(server.post("/v1/completions", body, headers=headers).json()["choices"])

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(choices == found[0] for choices in found)


def test_tokens_there_and_back(server):
    found = server.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == 3
    assert found["max_model_len"] == 64
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "hé"}
    assert server.post("/tokenize", {"prompt": "a", "model": "toy"}).json()["token_strs"] is None


def test_the_description_names_every_body_and_no_error_of_the_framework(server):
    document = server.client.get("/openapi.json").json()
    assert "422" not in json.dumps(document)
    schemas = document["components"]["schemas"]
    assert {"CompletionBody", "ChatBody", "TokenizeBody", "ErrorBody"} <= set(schemas)
    assert server.client.get("/docs").status_code == 200
    assert server.client.get("/version").json()["version"]


@pytest.mark.parametrize("seed", [1, 2])
def test_schemathesis_finds_no_failure_of_the_server(server, seed):
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses = Counter()
    for result in document.get_all_operations():

        @hypothesis.seed(seed)
        @settings(
            max_examples=40,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @given(case=result.ok().as_strategy())
        def send(case):
            response = case.call(timeout=60)
            statuses[response.status_code] += 1
            assert response.status_code < 500 or response.status_code == 501, response.text
            assert response.status_code != 422
            if response.status_code >= 400:
                assert set(response.json()) == {"error"}

        send()
    assert statuses[200] > 10
    assert statuses[400] > 50
    server.settle()
