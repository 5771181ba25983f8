"""What the prefix cache saves where prompts begin alike, and what it costs where none do.

    python benchmarks/prefix_cache.py [--requests 50] [--repeats 10]

Shared: requests with one system prompt of 2000 tokens and a question of their own, one after the
other and then all at once. Zero hits: prompts that have nothing in common, cache on and off in
turns; medians of throughput and of its ratios. SmolLM2 135M, float32.
"""

import argparse
import statistics
import time

import numpy as np

from paged_jax import LLM, SamplingParams

SYSTEM_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 2000, 20, 8
OPTIONS = {"max_model_len": 2048, "max_num_seqs": 32, "num_blocks": 1024, "block_size": 16}


def prompts(count: int, num_shared: int, num_own: int, seed: int) -> list[dict]:
    """Token ids that begin alike."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 40_000, num_shared).tolist()
    # The first of their own tokens differ, lest two begin alike by chance.
    return [
        {"prompt_token_ids": [*shared, seed * count + i, *rng.integers(0, 40_000, num_own - 1)]}
        for i in range(count)
    ]


def shared(count: int) -> None:
    """Time to first token of each request, hits, and blocks held while all run."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    with LLM(**OPTIONS, warmup="all") as llm:
        first = []
        for prompt in prompts(count, SYSTEM_TOKENS, QUESTION_TOKENS, seed=1):
            metrics = llm.generate([prompt], params, use_tqdm=False)[0].metrics
            assert metrics.first_token_time is not None
            first.append(metrics.first_token_time - metrics.arrival_time)
        stats = llm.stats()
        hits, asked = stats["prefix_hits_tokens"], stats["prefix_queries_tokens"]
        print(f"{count} requests of {SYSTEM_TOKENS} shared and {QUESTION_TOKENS} own tokens")
        print(f"time to first token: first {first[0]:.2f} s, second {first[1]:.3f} s, ", end="")
        print(f"median of the rest {statistics.median(first[1:]):.3f} s: ", end="")
        print(f"{first[0] / first[1]:.1f} times less for the second")
        print(f"hits: {hits} of {asked} prompt tokens ({hits / asked:.1%})")
        most = 0
        for i, prompt in enumerate(prompts(count, SYSTEM_TOKENS, QUESTION_TOKENS, seed=1)):
            llm.engine.add_request(f"r{i}", prompt, params)
        while llm.engine.has_unfinished():
            llm.engine.step()
            most = max(most, llm.stats()["num_used"])
        whole = count * -(-(SYSTEM_TOKENS + QUESTION_TOKENS + OUTPUT_TOKENS) // 16)
        print(f"all at once: {most} blocks in use at most; without sharing {whole} for all")


def zero_hits(count: int, repeats: int) -> None:
    """Output tokens per second with the cache on and off, in turns."""
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    llms = {on: LLM(**OPTIONS, warmup="all", enable_prefix_caching=on) for on in (True, False)}
    rates: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(repeats):
        batch = prompts(count, 0, 100, seed=100 + repeat)
        # Whoever comes second may find the machine warmer, or busier.
        for on in (True, False) if repeat % 2 else (False, True):
            start = time.perf_counter()
            llms[on].generate(batch, params, use_tqdm=False)
            rates[on].append(count * 32 / (time.perf_counter() - start))
    assert llms[True].stats()["prefix_hits_tokens"] == 0
    on, off = (statistics.median(rates[is_on]) for is_on in (True, False))
    ratios = sorted(x / y for x, y in zip(rates[True], rates[False], strict=True))
    print(f"zero hits: {on:.1f} output tokens/s with the cache, {off:.1f} without; with / without ")
    print(f"in pairs: median {statistics.median(ratios):.4f}, {ratios[0]:.3f} to {ratios[-1]:.3f}")


def main() -> None:
    """Runs both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    shared(given.requests)
    zero_hits(32, given.repeats)


if __name__ == "__main__":
    main()
