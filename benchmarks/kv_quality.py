"""What a KV cache of fewer bits costs in quality: perplexity of a text with each KV dtype.

    python benchmarks/kv_quality.py [--tokens 1000] [--dtypes float32 int8]

The text goes through the paged cache as a prompt does: in chunks, each of which writes its keys and
values and then attends to all that the pool holds of the row, so that every token is predicted from
what the pool made of those before it. SmolLM2 135M, computed in float32 everywhere; the text is
`benchmarks/data/prose.txt`.
"""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax import core
from paged_jax.config import EngineConfig
from paged_jax.core import BlockState, KVCache, PagedCache
from paged_jax.engine.compile_cache import use_compilation_cache
from paged_jax.models.hub import cache_dir, resolve_model
from paged_jax.models.load import load_model, open_checkpoint
from paged_jax.models.protocol import PagedModel

PROSE = Path(__file__).parent / "data" / "prose.txt"
DTYPES = ("float32", "int8", "fp8_e4m3", "fp8_e5m2")
BLOCK_SIZE, CHUNK = 16, 128


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How well a text was predicted."""

    losses: np.ndarray  # f32[T-1], minus the log-probability of each token but the first
    choices: np.ndarray  # i32[T-1], the likeliest token in its place
    token_bytes: int
    """Of the pool, scales included."""

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss."""
        return float(np.exp(np.mean(self.losses, dtype=np.float64)))


def measure(model: PagedModel, tokens: Sequence[int], kv_cache_dtype: str) -> Quality:
    """Predicts each token of a text from those before it, which it reads from a paged cache.

    Args:
      tokens: At least two.
      kv_cache_dtype: As in `EngineConfig`, but not "auto".
    """
    dtype = EngineConfig(kv_cache_dtype=kv_cache_dtype).kv_dtype
    assert dtype is not None
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    blocks = core.create_block_state(num_blocks, BLOCK_SIZE, 1, num_blocks)
    kv = core.create_kv_cache(model.cache_spec(), num_blocks, BLOCK_SIZE, dtype)
    graphdef, state = nnx.split(model)
    losses, choices = [], []
    inputs, targets = np.int32(tokens[:-1]), np.int32(tokens[1:])
    for start in range(0, len(inputs), CHUNK):
        count = len(inputs[start : start + CHUNK])
        padded = np.zeros((2, CHUNK), np.int32)
        padded[:, :count] = inputs[start : start + CHUNK], targets[start : start + CHUNK]
        kv, blocks, loss, choice = _run_chunk(graphdef, state, kv, blocks, *padded, np.int32(count))
        losses.append(np.asarray(loss)[:count])
        choices.append(np.asarray(choice)[:count])
    return Quality(
        losses=np.concatenate(losses),
        choices=np.concatenate(choices),
        token_bytes=kv.token_bytes,
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _run_chunk(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    kv: KVCache,
    blocks: BlockState,
    tokens: jax.Array,
    targets: jax.Array,
    count: jax.Array,
) -> tuple[KVCache, BlockState, jax.Array, jax.Array]:
    """Appends `count` tokens to row 0; losses of their targets and likeliest tokens, each [T]."""
    model = nnx.merge(graphdef, state)
    blocks, _ = core.allocate(blocks, count[None], max_new_blocks=CHUNK // BLOCK_SIZE + 1)
    batch = core.make_batch(
        blocks, tokens=tokens, row_ids=np.zeros(1, np.int32), query_lens=count[None], num_decode=0
    )
    hidden, cache = model(batch, PagedCache(blocks=blocks, kv=kv))
    logits = model.logits(hidden).astype(jnp.float32)
    loss = jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(CHUNK), targets]
    return cache.kv, blocks, loss, jnp.argmax(logits, axis=-1)


def main() -> None:
    """Prints a table with a line per dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, help="of the text; default: all of them")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), metavar="X")
    arguments = parser.parse_args()
    use_compilation_cache(cache_dir())
    checkpoint = open_checkpoint(resolve_model("smollm2-135m-instruct"))
    model, tokenizer = load_model(checkpoint, "float32"), checkpoint.tokenizer()
    assert tokenizer is not None
    tokens = tokenizer.encode(PROSE.read_text("utf-8"))[: arguments.tokens]
    print(f"{len(tokens)} tokens, JAX {jax.__version__}, {jax.default_backend()}")
    print("| KV dtype | perplexity | ratio | same argmax | bytes per token |")
    print("|---|---|---|---|---|")
    first: Quality | None = None
    for name in arguments.dtypes:
        quality = measure(model, tokens, name)
        first = first or quality
        ratio = quality.perplexity / first.perplexity
        same = np.mean(quality.choices == first.choices)
        print(
            f"| {name} | {quality.perplexity:.4f} | {ratio:.5f} | {same:.2%} | "
            f"{quality.token_bytes} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
