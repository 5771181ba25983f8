"""Writes benchmarks/traces/mixed.jsonl: a minute of chat and batch work, made up but shaped so.

Two thirds are chat (priority 0): one of two system prompts, then a short question, a short answer,
Poisson arrivals at 2/s, and at second 20 forty of them at once. One third is batch work (priority
1): documents of up to 1500 tokens with short summaries, in bundles of six every five seconds.

    python benchmarks/mixed_trace.py
    paged-jax bench --simulate benchmarks/traces/mixed.jsonl --policies fcfs,priority \\
        --pool-sizes 600,1200
"""

import json
import random
from pathlib import Path

PATH = Path(__file__).parent / "traces" / "mixed.jsonl"
SYSTEM_PROMPTS = {"assistant": 200, "coder": 600}


def mixed_trace() -> list[dict]:
    """The requests by arrival, as the lines of the file."""
    draw = random.Random(0)
    requests = []
    arrival = 0.0
    arrivals = [20 + i / 100 for i in range(40)]
    while (arrival := arrival + draw.expovariate(2.0)) < 60:
        arrivals.append(arrival)
    for time in arrivals:
        group = draw.choice(sorted(SYSTEM_PROMPTS))
        prefix = SYSTEM_PROMPTS[group]
        requests.append(
            {
                "arrival": round(time, 3),
                "prompt_tokens": prefix + draw.randint(10, 120),
                "output_tokens": draw.randint(20, 300),
                "prefix_group": group,
                "prefix_tokens": prefix,
            }
        )
    for bundle in range(12):
        requests += [
            {
                "arrival": 5.0 * bundle,
                "prompt_tokens": draw.randint(600, 1500),
                "output_tokens": draw.randint(100, 400),
                "priority": 1,
            }
            for _ in range(6)
        ]
    return sorted(requests, key=lambda request: request["arrival"])


def lines() -> str:
    """The text of the file."""
    return "".join(json.dumps(request) + "\n" for request in mixed_trace())


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(lines(), encoding="utf-8")
