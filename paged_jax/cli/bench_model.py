"""`paged-jax bench` with a model: random prompts, exact output lengths, arrivals at a rate."""

import argparse
import dataclasses
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paged_jax.cli import options
from paged_jax.cli.bench import run_log
from paged_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paged_jax.engine import Engine
    from paged_jax.engine.events import Event
    from paged_jax.engine.report import RunLog


def run_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """Loads the model, compiles its programs, runs the load, and returns its figures.

    Raises: ValueError for sizes that make no load, or that the model refuses.
    """
    for name in ("num_requests", "prompt_len", "output_len"):
        if getattr(arguments, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} ({getattr(arguments, name)}) must be at least 1")
    if not 0 <= arguments.prefix_len <= arguments.prompt_len:
        raise ValueError(
            f"--prefix-len ({arguments.prefix_len}) must be in 0..{arguments.prompt_len}, "
            "the prompt's length"
        )
    engine_options = {
        "max_num_seqs": min(256, arguments.num_requests),
        "warmup": "all",  # no program compiles while the clock runs
        **options.engine_options(arguments),
    }
    from paged_jax.cli.status import startup_status

    with startup_status():
        from paged_jax.llm import LLM

        llm = LLM(arguments.model, **engine_options)
        warm_up(llm.engine, arguments.prompt_len)
    with llm, run_log(arguments, llm.engine.config.max_model_len) as made:
        figures = run_load(llm.engine, _load(llm.engine, arguments), made)
        return {**figures, "stats": llm.stats()}


def warm_up(engine: "Engine", prompt_len: int) -> None:
    """Runs one prompt twice: what shares and releases blocks is compiled at its first use."""
    prompt = [0] * min(prompt_len, 2 * engine.config.block_size + 1)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for name in ("first", "second"):
        engine.add_request(name, prompt, params)
        while engine.has_unfinished():
            engine.step()
    engine.reset_prefix_cache()


def _load(engine: "Engine", arguments: argparse.Namespace) -> list[tuple[float, list[int], int]]:
    """Random prompts, by arrival."""
    draw = random.Random(arguments.seed or 0)
    prefix = [draw.randrange(engine.vocab_size) for _ in range(arguments.prefix_len)]
    rest = arguments.prompt_len - len(prefix)
    prompts = [
        prefix + [draw.randrange(engine.vocab_size) for _ in range(rest)]
        for _ in range(arguments.num_requests)
    ]
    due, load = 0.0, []
    for prompt in prompts:
        load.append((due, prompt, arguments.output_len))
        due += draw.expovariate(arguments.request_rate) if arguments.request_rate else 0.0
    return load


def run_load(
    engine: "Engine", load: Sequence[tuple[float, list[int], int]], made: "RunLog"
) -> dict[str, Any]:
    """Submits every request when it is due and steps the engine until all have ended.

    Args:
      load: Arrival in seconds, prompt and output tokens of each, by arrival.
    Returns: The figures of the log, and `prefix_hit_fraction`.
    """
    before, start = engine.stats(), time.monotonic()
    pending = deque(
        (start + due, str(i), prompt, length) for i, (due, prompt, length) in enumerate(load)
    )
    arrivals: dict[str | None, float] = {name: at for at, name, *_ in pending}

    def tell(event: "Event") -> None:
        # A request that had to wait for a step to end before it was taken in has arrived before.
        if event.kind == "add":
            event = dataclasses.replace(event, time=arrivals[event.request_id])
        made(event)

    engine.events = tell
    while pending or engine.has_unfinished():
        while pending and pending[0][0] <= time.monotonic():
            _, name, prompt, length = pending.popleft()
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            engine.add_request(name, prompt, params)
        if engine.has_unfinished():
            engine.step()
            made.look(engine.state.ledger, lambda: _names(engine))
        else:
            time.sleep(max(0.0, pending[0][0] - time.monotonic()))
    stats = engine.stats()
    queries, hits = (
        stats[name] - before[name] for name in ("prefix_queries_tokens", "prefix_hits_tokens")
    )
    return {**made.figures(), "prefix_hit_fraction": hits / queries if queries else 0.0}


def _names(engine: "Engine") -> dict[int, str]:
    running = engine.state.running
    return {s.row: s.request.request_id for s in running if s.row is not None}
