"""Sliding windows and soft caps: every way to run a prompt gives what the dense form gives."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import core
from paged_jax.models.attention import PagedAttention
from paged_jax.models.decoder import Decoder
from paged_jax.models.registry import read_spec
from tests.models.modules import filled

WINDOW, CAP = 4, 2.0
PROMPT, NEW = 9, 5
TOTAL = PROMPT + NEW
T = 10
"""Tokens of the program with prefill; that of decode steps has 2."""

SPLITS = {
    "whole": [9],
    "3, then the rest": [3, 6],
    "3, then one by one": [3],
    "chunks of 2": [2, 2, 2, 2, 1],
    "chunks of 4": [4, 4, 1],
}
COMMON = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "mistral": COMMON | {"architectures": ["MistralForCausalLM"]},
    "gemma2": COMMON
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": CAP,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 3,
    },
}


@functools.cache
def decoder(name: str) -> Decoder:
    """Random weights, so large that a cap matters."""
    return filled(lambda: Decoder(read_spec(CONFIGS[name]), rngs=nnx.Rngs(0)))


def stepper(run: Callable[..., Any]) -> Callable[..., Any]:
    """A jitted step of `run(batch, cache, *inputs)` for row 1 of two."""

    @functools.partial(jax.jit, static_argnames="is_decode_only")
    def step(cache, count, num_decode, tokens, *inputs, is_decode_only):
        blocks, _ = core.allocate(cache.blocks, count * jnp.asarray([0, 1], jnp.int32))
        batch = core.make_batch(
            blocks,
            tokens=tokens,
            row_ids=jnp.asarray([1, 2], jnp.int32),
            query_lens=count * jnp.asarray([1, 0], jnp.int32),
            num_decode=None if is_decode_only else num_decode,
        )
        return run(batch, core.PagedCache(blocks=blocks, kv=cache.kv), *inputs)

    return step


def paged(
    step, spec: core.CacheSpec, split: list[int], *inputs: np.ndarray, has_decode_program: bool
) -> np.ndarray:
    """The outputs of all positions: a prompt in pieces, then decode steps.

    Args:
      inputs: Tokens, then what else a step takes; rows are positions.
      has_decode_program: Every other decode step runs in a program that has no prefill.
    """
    blocks = core.create_block_state(12, 2, 2, 8)
    # The other row has blocks too, so that ours are not those of the same number.
    blocks, _ = core.allocate(blocks, jnp.asarray([3, 0], jnp.int32))
    kv = core.create_kv_cache(spec, 12, 2, jnp.float32)
    kv = dataclasses.replace(kv, kv=jnp.full_like(kv.kv, jnp.nan))
    cache, outs, start = core.PagedCache(blocks=blocks, kv=kv), [], 0
    for index, count in enumerate([*split, *[1] * (TOTAL - sum(split))]):
        is_decode = index >= len(split)
        is_alone = has_decode_program and is_decode and index % 2 == 0
        room = (2 if is_alone else T) - count
        rows = (x[start : start + count] for x in inputs)
        padded = (np.pad(x, [(0, room), *[(0, 0)] * (x.ndim - 1)]) for x in rows)
        out, cache = step(
            cache, np.int32(count), np.int32(is_decode), *padded, is_decode_only=is_alone
        )
        outs.append(np.asarray(out[:count]))
        start += count
    return np.concatenate(outs)


@functools.cache
def model_step(name: str):
    model = decoder(name)

    def run(batch, cache):
        hidden, cache = model(batch, cache)
        return model.logits(hidden), cache

    return stepper(run)


@functools.cache
def dense_logits(name: str, tokens: tuple[int, ...]) -> np.ndarray:
    return np.asarray(jax.jit(lambda t: decoder(name)(t))(jnp.asarray([tokens]))[0])


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["gemma2", pytest.param("mistral", marks=pytest.mark.exhaustive)])
def test_every_split_of_a_prompt_gives_the_dense_logits(name, split):
    """Gemma 2 has a window in its first layer and none in its second, and caps in both."""
    tokens = np.random.default_rng(0).integers(0, 24, TOTAL).astype(np.int32)
    spec = decoder(name).cache_spec()
    got = paged(model_step(name), spec, SPLITS[split], tokens, has_decode_program=False)
    want = dense_logits(name, tuple(tokens.tolist()))
    np.testing.assert_allclose(got, want, atol=2e-5 * np.max(np.abs(want)), rtol=0)


@functools.cache
def attention_step(attend: PagedAttention):
    def run(batch, cache, q, k, v):
        return attend(q, k, v, layer=0, batch=batch, cache=cache)

    return stepper(run)


@functools.cache
def attention(has_cap: bool) -> PagedAttention:
    """Of Gemma 2's layers: the first has the window, the second only the cap."""
    if not has_cap:
        return PagedAttention(2, 1, 16, sliding_window=WINDOW)
    return decoder("gemma2").blocks[1].attention.attend


def paged_attention(attend: PagedAttention, split: list[int], q, k, v) -> np.ndarray:
    spec = core.CacheSpec(num_layers=1, num_kv_heads=k.shape[1], head_dim=k.shape[2])
    tokens = np.zeros(TOTAL, np.int32)
    return paged(attention_step(attend), spec, split, tokens, q, k, v, has_decode_program=True)


@pytest.mark.parametrize("way", [*SPLITS, "dense"])
def test_a_window_counts_the_token_itself(way):
    """Equal logits make each output the mean of the values it sees, which name their position."""
    attend = attention(False)
    q = np.zeros((TOTAL, 2, 16), np.float32)
    k = np.zeros((TOTAL, 1, 16), np.float32)
    v = np.eye(TOTAL, 16, dtype=np.float32)[:, None]
    if way == "dense":
        out = np.asarray(attend(*(jnp.asarray(x[None]) for x in (q, k, v)), layer=0)[0][0])
    else:
        out = paged_attention(attend, SPLITS[way], q, k, v)
    for position in range(TOTAL):
        seen = np.zeros(16)
        seen[max(0, position - WINDOW + 1) : position + 1] = 1.0
        assert seen.sum() == min(position + 1, WINDOW)
        np.testing.assert_allclose(out[position], [seen / seen.sum()] * 2, atol=1e-6)


def reference(q, k, v, *, sm_scale: float, soft_cap: float) -> np.ndarray:
    """One query at a time in float64: scale, cap, mask, softmax."""
    out = np.zeros(q.shape)
    for position, head in np.ndindex(*q.shape[:2]):
        own = head // (q.shape[1] // k.shape[1])
        logits = k[: position + 1, own].astype(np.float64) @ q[position, head] * sm_scale
        weights = np.exp(soft_cap * np.tanh(logits / soft_cap))
        out[position, head] = weights @ v[: position + 1, own] / weights.sum()
    return out


@pytest.mark.parametrize("way", [*SPLITS, "dense"])
def test_a_cap_comes_after_the_scale_and_before_the_mask(way, rng):
    attend = attention(True)
    assert attend.sm_scale == 3**-0.5  # query_pre_attn_scalar, not the size of a head
    q = 3 * rng.standard_normal((TOTAL, 4, 8), dtype=np.float32)
    k = 3 * rng.standard_normal((TOTAL, 2, 8), dtype=np.float32)
    v = rng.standard_normal((TOTAL, 2, 8), dtype=np.float32)
    want = reference(q, k, v, sm_scale=3**-0.5, soft_cap=CAP)
    uncapped = reference(q, k, v, sm_scale=3**-0.5, soft_cap=1e6)
    assert np.max(np.abs(want - uncapped)) > 0.5
    if way == "dense":
        out = np.asarray(attend(*(jnp.asarray(x[None]) for x in (q, k, v)), layer=0)[0][0])
    else:
        out = paged_attention(attend, SPLITS[way], q, k, v)
    np.testing.assert_allclose(out, want, atol=2e-5, rtol=0)
