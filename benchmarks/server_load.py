"""200 streaming clients on one server, many of whom leave in the middle: is anything lost or mixed?

Every client asks again and again for a random one of a few dozen requests and compares each delta
that it reads with the text that the same request gives alone; some hang up after a few events, some
close the socket without reading. At the end all blocks must be back, memory must not have grown,
and /health must have been green throughout. Prints time to first token and between
chunks of a choice.

    python benchmarks/server_load.py --clients 200 --seconds 60
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from paged_jax.engine.report import percentile


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request and the texts of its choices when it runs alone."""

    body: Mapping[str, Any]
    texts: Sequence[str]


@dataclass(kw_only=True)
class Tally:
    """What the clients saw; times in seconds."""

    num_whole: int = 0
    num_left: int = 0
    num_busy: int = 0
    """Refused with 429."""
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_healthy: int = 0
    wrong: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Counts and percentiles."""
        return {
            "whole_streams": self.num_whole,
            "left_in_the_middle": self.num_left,
            "refused_with_429": self.num_busy,
            "wrong": len(self.wrong),
            "ttft_p50_s": percentile(self.first, 50),
            "ttft_p99_s": percentile(self.first, 99),
            "itl_p50_s": percentile(self.gaps, 50),
            "itl_p99_s": percentile(self.gaps, 99),
        }


async def run_clients(
    url: str, cases: Sequence[Case], *, clients: int, seconds: float, seed: int = 0
) -> Tally:
    """Lets so many clients ask for so many seconds; the last streams are read to their end."""
    tally, end = Tally(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:

        async def ask(number: int) -> None:
            draw = random.Random(1000 * seed + number)
            while time.monotonic() < end:
                case = draw.choice(cases)
                leaves_after = draw.randrange(8) if draw.random() < 0.3 else None
                await _read(client, case, leaves_after, tally)

        async def watch() -> None:
            while True:
                response = await client.get("/health")
                if response.status_code == 200:
                    tally.num_healthy += 1
                else:
                    tally.wrong.append(f"/health says {response.status_code}")
                await asyncio.sleep(0.25)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(ask(i) for i in range(clients)))
        watching.cancel()
    return tally


async def _read(
    client: httpx.AsyncClient, case: Case, leaves_after: int | None, tally: Tally
) -> None:
    start = time.monotonic()
    body = {**case.body, "stream": True}
    texts, ended = [""] * len(case.texts), set()
    last: dict[int, float] = {}  # when each choice came last
    num_events, is_done = 0, False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code == 429:
            tally.num_busy += 1
            await asyncio.sleep(float(response.headers["Retry-After"]))
            return
        if response.status_code != 200:
            await response.aread()
            tally.wrong.append(f"{response.status_code}: {response.text}")
            return
        if leaves_after == 0:
            tally.num_left += 1
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            now = time.monotonic()
            if line == "data: [DONE]":
                is_done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                tally.wrong.append(f"{case.body}: {event}")
                return
            if not last:
                tally.first.append(now - start)
            for choice in event["choices"]:
                i = choice["index"]
                if i in last:
                    tally.gaps.append(now - last[i])
                last[i] = now
                texts[i] += choice["text"]
                if choice["finish_reason"]:
                    ended.add(i)
                if not case.texts[i].startswith(texts[i]):
                    tally.wrong.append(f"{case.body}: {texts[i]!r} is not {case.texts[i]!r}")
                    return
            num_events += 1
            if num_events == leaves_after:
                tally.num_left += 1
                return
    if not is_done or texts != list(case.texts) or len(ended) != len(texts):
        tally.wrong.append(f"{case.body}: ended as {texts!r}, not {list(case.texts)!r}")
    else:
        tally.num_whole += 1


def resident_bytes() -> int:
    """Memory of this process (Linux)."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return 4096 * int(statm.read().split()[1])


def make_bodies(draw: random.Random, prompts: Sequence[Any], longest: int) -> list[dict[str, Any]]:
    """A request of each prompt: greedy or seeded, with a stop string, several choices, ..."""
    bodies = []
    for i, prompt in enumerate(prompts):
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": draw.randrange(1, longest + 1)}
        body |= {"temperature": 0} if i % 3 == 0 else {"temperature": 0.9, "seed": i}
        if i % 4 == 1:
            body["n"] = 2
        if i % 5 == 2:
            body["stop"] = ["e", "zz"]
        if i % 5 == 3:
            body |= {"repetition_penalty": 1.3, "top_p": 0.9}
        bodies.append(body)
    return bodies


def alone(url: str, bodies: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Each request by itself, without streaming, on an idle server."""
    with httpx.Client(base_url=url, timeout=300) as client:
        found = []
        for body in bodies:
            response = client.post("/v1/completions", json=dict(body))
            response.raise_for_status()
            found.append(Case(body=body, texts=[c["text"] for c in response.json()["choices"]]))
        return found


def main() -> None:
    """Serves SmolLM2 in this process and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    from serving import serving

    draw = random.Random(arguments.seed)
    words = ["the", "king", "river", "said", "once", "bread", "under", "seven", "light", "and"]
    prompts = [" ".join(draw.choices(words, k=draw.randrange(1, 40))) for _ in range(30)]
    sizes = {"max_num_seqs": 32, "max_model_len": 512, "num_blocks": 512}
    with serving("smollm2-135m-instruct", warmup="all", **sizes) as (llm, url):
        cases = alone(url, make_bodies(draw, prompts, 24))
        options = {"clients": arguments.clients, "seed": arguments.seed}
        asyncio.run(run_clients(url, cases, seconds=5.0, **options))
        before = resident_bytes()
        tally = asyncio.run(run_clients(url, cases, seconds=arguments.seconds, **options))
        grown = resident_bytes() - before
        while llm.stats()["num_running"] or llm.stats()["num_used"]:
            time.sleep(0.05)
        stats = llm.stats()
    print(json.dumps({**tally.figures(), "grown_bytes": grown, "stats": stats}, indent=1))
    for line in tally.wrong[:5]:
        print(line)


if __name__ == "__main__":
    main()
