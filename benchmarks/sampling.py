"""What does choosing a token cost beside the model's step?

    python benchmarks/sampling.py [--rows 32] [--context 256] [--repeats 20]

Times a decode step of SmolLM2 135M in float32, up to the logits, and `ops.sample` and
`ops.adjust_logits` on such logits with one option at a time, in turns in one process. Medians in
milliseconds, and their share of the model's step.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from timing import interleave

from paged_jax import core, ops
from paged_jax.core import PagedCache
from paged_jax.engine import logit_options
from paged_jax.engine.compile_cache import use_compilation_cache
from paged_jax.models.hub import cache_dir, resolve_model
from paged_jax.models.load import load_model, open_checkpoint

BLOCK_SIZE = 16


def model_step(rows: int, context: int):
    """A callable that returns logits [R, V] of one decode step, and those logits."""
    model = load_model(open_checkpoint(resolve_model("smollm2-135m-instruct")), "float32")
    per_row = -(-context // BLOCK_SIZE)
    blocks = core.create_block_state(rows * per_row, BLOCK_SIZE, rows, per_row)
    tokens = jnp.full(rows, context, jnp.int32)
    blocks, _ = core.allocate(blocks, tokens, max_new_blocks=rows * per_row)
    kv = core.create_kv_cache(model.cache_spec(), rows * per_row, BLOCK_SIZE, jnp.float32)
    batch = core.make_decode_batch(
        blocks,
        tokens=jnp.arange(rows, dtype=jnp.int32) + 100,
        positions=tokens - 1,
        runs=jnp.ones(rows, bool),
    )
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)

    @jax.jit
    def step(leaves, kv):
        model = nnx.merge(graphdef, treedef.unflatten(leaves))
        hidden, _ = model(batch, PagedCache(blocks=blocks, kv=kv))
        return model.logits(hidden)

    return lambda _: jax.block_until_ready(step(leaves, kv)), step(leaves, kv)


def sampler(logits, **more):
    """A callable that samples as these fields say."""
    rows = logits.shape[0]
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | more
    dtypes = {"top_k": jnp.int32}
    arrays = {
        name: jnp.full(rows, value, dtypes.get(name, jnp.float32)) for name, value in fields.items()
    }
    arrays |= {"seeds": jnp.ones((rows, 3), jnp.uint32), "positions": jnp.arange(rows)}
    run = jax.jit(lambda logits, arrays: ops.sample(logits, **arrays))
    return lambda _: jax.block_until_ready(run(logits, arrays))


def adjuster(logits, context: int, **more):
    """A callable that adjusts logits as these fields of `LogitOptions` say."""
    rows, vocab_size = logits.shape
    options = logit_options.create(rows, 2048, vocab_size)
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, 2048)).astype(np.int32)
    arrays = {name: jnp.full(rows, value, jnp.float32) for name, value in more.items()}
    options = dataclasses.replace(options, tokens=jnp.asarray(tokens), **arrays)
    lengths = jnp.full(rows, context, jnp.int32)
    run = jax.jit(ops.adjust_logits)
    return lambda _: jax.block_until_ready(run(logits, options, lengths))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    use_compilation_cache(cache_dir())
    step, logits = model_step(given.rows, given.context)
    calls = {
        "model step": step,
        "greedy": sampler(logits, temperature=0.0),
        "temperature": sampler(logits),
        "min_p": sampler(logits, min_p=0.05),
        "top_k": sampler(logits, top_k=50),
        "top_p": sampler(logits, top_p=0.9),
        "top_k and top_p": sampler(logits, top_k=50, top_p=0.9),
        "bans and biases": adjuster(logits, given.context),
        "penalties": adjuster(logits, given.context, presence=0.5, repetition=1.1),
    }
    times = interleave({name: (lambda: None, run) for name, run in calls.items()}, given.repeats)
    whole = np.median(times["model step"])
    print(f"{logits.shape[0]} x {logits.shape[1]} logits, {given.context} tokens a row")
    print("| | ms, median (minimum) | of the model's step |")
    print("|---|---|---|")
    for name, found in times.items():
        middle = np.median(found)
        cell = f"{middle / 1000:.1f} ({np.min(found) / 1000:.1f})"
        print(f"| {name} | {cell} | {middle / whole:.1%} |")


if __name__ == "__main__":
    main()
