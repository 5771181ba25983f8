"""Prometheus metrics under vLLM's names, so that dashboards made for it work."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as _OPENMETRICS
from prometheus_client.registry import Collector

from paged_jax.async_llm import AsyncLLM
from paged_jax.outputs import RequestOutput

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

OPENMETRICS = _OPENMETRICS
"""Media type of the newer text format."""


@dataclass
class _Seen:
    """What has been counted of a request."""

    num_tokens: dict[int, int] = field(default_factory=dict)
    """Per choice."""
    last: float | None = None
    """When tokens came last."""


class Metrics(Collector):
    """Counts and times of one `AsyncLLM`, in a registry of its own."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        """Begins to observe."""
        self._llm, self._model = llm, model
        self.registry = CollectorRegistry()
        self._seen: dict[str, _Seen] = {}

        def histogram(name: str, what: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(name, what, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(model)

        self._first = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS
        )
        self._between = histogram(
            "vllm:inter_token_latency_seconds",
            "Between tokens of a choice; those of one dispatch count once, with their mean.",
            _SECONDS,
        )
        self._total = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", _SECONDS
        )
        self._prompt = histogram("vllm:request_prompt_tokens", "Tokens per prompt.", _TOKENS)
        self._output = histogram(
            "vllm:request_generation_tokens", "Output tokens per choice.", _TOKENS
        )
        self._ends = Counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        llm.observer = self.observe

    @property
    def num_tracked(self) -> int:
        """Unfinished requests that are known."""
        return len(self._seen)

    def observe(self, outputs: Sequence[RequestOutput]) -> None:
        """Counts what a dispatch has brought; in the engine thread."""
        now = time.monotonic()
        for output in outputs:
            times = output.metrics
            seen = self._seen.setdefault(output.request_id, _Seen())
            if seen.last is None and times.first_token_time is not None:
                self._first.observe(times.first_token_time - times.arrival_time)
                seen.last = times.first_token_time
            is_news = False
            for choice in output.outputs:
                before = seen.num_tokens.get(choice.index, 0)
                count = len(choice.token_ids) - before
                if count > 0 and seen.last is not None:
                    is_news = True
                    # The first token of a choice follows none.
                    if before or count > 1:
                        self._between.observe((now - seen.last) / (count if before else count - 1))
                    seen.num_tokens[choice.index] = len(choice.token_ids)
            if is_news:
                seen.last = now
            if output.finished:
                del self._seen[output.request_id]
                end = now if times.finished_time is None else times.finished_time
                self._total.observe(end - times.arrival_time)
                self._prompt.observe(len(output.prompt_token_ids))
                for choice in output.outputs:
                    self._output.observe(len(choice.token_ids))
                    self._ends.labels(self._model, choice.finish_reason or "abort").inc()

    def collect(self) -> Iterator[Metric]:
        """What the engine counts itself."""
        stats = self._llm.stats()
        used = stats["num_used"] / stats["num_blocks"]
        for name, what, value in (
            ("vllm:num_requests_running", "Sequences that run.", stats["num_running"]),
            ("vllm:num_requests_waiting", "Sequences that wait.", stats["num_waiting"]),
            ("vllm:num_requests_swapped", "Sequences kept on the host.", stats["num_swapped"]),
            ("vllm:kv_cache_usage_perc", "Used part of the KV blocks; 1 is all.", used),
        ):
            gauge = GaugeMetricFamily(name, what, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, what, key in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", "prefix_queries_tokens"),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", "prefix_hits_tokens"),
            ("vllm:num_preemptions", "Preemptions.", "num_preemptions"),
            ("vllm:prompt_tokens", "Prompt tokens taken in.", "prompt_tokens"),
            ("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
            ("paged_jax:compiles", "Programs compiled or loaded.", "compiles"),
        ):
            counter = CounterMetricFamily(name, what, labels=["model_name"])
            counter.add_metric([self._model], stats[key])
            yield counter
