"""A load of streaming clients on any server with OpenAI's /v1/completions, and what it measures."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from paged_jax.engine.report import percentile
from paged_jax.engine.trace import TraceRequest

# Every vocabulary has so many tokens.
_VOCABULARY = 200


@dataclass(kw_only=True)
class Sample:
    """What one client saw; times in seconds from the start of the load."""

    arrival: float
    """When the request was due."""
    prompt_tokens: int
    output_tokens: int = 0
    chunks: list[float] = field(default_factory=list)
    """When text or the end of a choice came."""
    end: float | None = None
    error: str | None = None


def prompts(trace: Sequence[TraceRequest], seed: int) -> list[list[int]]:
    """Random token ids; equal within the prefix of a group."""
    draw = random.Random(seed)
    made, prefixes = [], {}
    for request in trace:
        ids = [draw.randrange(_VOCABULARY) for _ in range(request.prompt_tokens)]
        if request.prefix_group is not None:
            prefix = prefixes.setdefault(request.prefix_group, [])
            while len(prefix) < request.prefix_tokens:
                prefix.append(draw.randrange(_VOCABULARY))
            ids[: request.prefix_tokens] = prefix[: request.prefix_tokens]
        made.append(ids)
    return made


async def run_load(
    url: str,
    model: str | None,
    trace: Sequence[TraceRequest],
    *,
    seed: int = 0,
    max_concurrency: int | None = None,
    api_key: str | None = None,
) -> list[Sample]:
    """Sends each request when it is due and reads its stream to the end.

    Args:
      url: Of the server, without /v1.
      model: Its name; None: the first of /v1/models.
      max_concurrency: Most requests at once; others wait for a place, which counts as their time.
    Raises: httpx.HTTPError when there is no such server. What fails later is in the samples.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    places = asyncio.Semaphore(max_concurrency or len(trace))
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=None
    ) as client:
        if model is None:
            found = await client.get("/v1/models")
            found.raise_for_status()
            model = str(found.json()["data"][0]["id"])
        start = time.monotonic()

        async def send(request: TraceRequest, ids: list[int]) -> Sample:
            sample = Sample(arrival=request.arrival, prompt_tokens=len(ids))
            await asyncio.sleep(max(0.0, start + request.arrival - time.monotonic()))
            body = {
                "model": model,
                "prompt": ids,
                "max_tokens": request.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            if request.priority:
                body["priority"] = request.priority
            async with places:
                try:
                    await _read(client, body, sample, start)
                except (httpx.HTTPError, ValueError) as error:
                    sample.error = f"{type(error).__name__}: {error}"
            return sample

        pairs = zip(trace, prompts(trace, seed), strict=True)
        return await asyncio.gather(*(send(request, ids) for request, ids in pairs))


async def _read(
    client: httpx.AsyncClient, body: dict[str, object], sample: Sample, start: float
) -> None:
    """Fills a sample from a stream. Raises: ValueError for one that ends too soon."""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise ValueError(f"{response.status_code}: {response.text[:200]}")
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                sample.end = time.monotonic() - start
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                if event["choices"]:
                    sample.chunks.append(time.monotonic() - start)
                elif event.get("usage"):
                    sample.output_tokens = event["usage"]["completion_tokens"]
    if sample.end is None:
        raise ValueError("the stream ended without [DONE]")


def figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Rates and percentiles of a load; times in seconds.

    Times between chunks are what a reader sees: a chunk may hold several tokens. Time per output
    token is that from the first chunk to the end, by the tokens after the first.
    """
    good = [sample for sample in samples if sample.error is None and sample.end is not None]
    first = [sample.chunks[0] - sample.arrival for sample in good if sample.chunks]
    total = [sample.end - sample.arrival for sample in good if sample.end is not None]
    gaps = [
        later - sooner
        for sample in good
        for sooner, later in zip(sample.chunks, sample.chunks[1:], strict=False)
    ]
    per_token = [
        (sample.chunks[-1] - sample.chunks[0]) / (sample.output_tokens - 1)
        for sample in good
        if sample.output_tokens > 1 and sample.chunks
    ]
    seconds = max((sample.end or 0.0 for sample in good), default=0.0)
    output = sum(sample.output_tokens for sample in good)
    found: dict[str, float] = {
        "num_requests": len(samples),
        "num_failed": len(samples) - len(good),
        "seconds": seconds,
        "prompt_tokens": sum(sample.prompt_tokens for sample in good),
        "output_tokens": output,
        "requests_per_s": len(good) / seconds if seconds else 0.0,
        "output_tokens_per_s": output / seconds if seconds else 0.0,
    }
    for name, values in (
        ("ttft", first),
        ("itl", gaps),
        ("tpot", per_token),
        ("latency", total),
    ):
        for percent in (50, 99):
            found[f"{name}_p{percent}_s"] = percentile(values, percent)
    return found
