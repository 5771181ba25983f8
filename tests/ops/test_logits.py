"""Bans, biases and penalties against a plain loop in numpy."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import ops
from paged_jax.bitmask import pack_mask

V, L, B, R = 70, 12, 6, 8  # V is not a multiple of the 32 tokens of a word

adjust = jax.jit(ops.adjust_logits)


def row(
    prompt=(),
    output=(),
    *,
    allowed=None,
    deferred=(),
    min_tokens=0,
    bias=(),
    presence=0.0,
    frequency=0.0,
    repetition=1.0,
) -> dict:
    return locals()


def plain(logits: np.ndarray, asked: dict) -> np.ndarray:
    """Token after token, in float32."""
    found = logits.astype(np.float32).copy()
    prompt, output = list(asked["prompt"]), list(asked["output"])
    for token in range(V):
        is_deferred = len(output) < asked["min_tokens"] and token in asked["deferred"]
        if (asked["allowed"] is not None and token not in asked["allowed"]) or is_deferred:
            found[token] = -np.inf
        found[token] += np.float32(dict(asked["bias"]).get(token, 0.0))
        if token in prompt + output:
            factor = np.float32(asked["repetition"])
            found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
        count = output.count(token)
        found[token] -= np.float32(asked["frequency"]) * np.float32(count)
        found[token] -= np.float32(asked["presence"]) if count else np.float32(0)
    return found


def pack(rows: list[dict]) -> tuple[ops.LogitOptions, np.ndarray]:
    """Options of R rows, and lengths; what is past a row's tokens is a token that many have."""
    state = jax.tree.map(np.array, ops.create_logit_options(R, L, V, B))
    state = dataclasses.replace(state, tokens=np.full((R, L), 5, np.int32))
    lengths = np.zeros(R, np.int32)
    for i, asked in enumerate(rows):
        tokens = [*asked["prompt"], *asked["output"]]
        state.tokens[i, : len(tokens)] = tokens
        lengths[i] = len(tokens)
        state.num_prompt[i] = len(asked["prompt"])
        is_allowed = np.ones(V, bool)
        if asked["allowed"] is not None:
            is_allowed[:] = False
            is_allowed[list(asked["allowed"])] = True
        is_deferred = np.zeros(V, bool)
        is_deferred[list(asked["deferred"])] = True
        state.allowed[i], state.deferred[i] = pack_mask(is_allowed), pack_mask(is_deferred)
        state.min_length[i] = len(asked["prompt"]) + asked["min_tokens"]
        for j, (token, bias) in enumerate(dict(asked["bias"]).items()):
            state.bias_ids[i, j], state.biases[i, j] = token, bias
        for name in ("presence", "frequency", "repetition"):
            getattr(state, name)[i] = asked[name]
    return state, lengths


def run(logits: np.ndarray, rows: list[dict]) -> np.ndarray:
    rows = [*rows, *[row()] * (R - len(rows))]
    state, lengths = pack(rows)
    return np.asarray(adjust(logits, state, lengths))


OPTIONS = {
    "allowed": [{0, 5, 31, 32, 63, 64, 69}, None],
    "deferred": [{5, 64}, ()],
    "bias": [{5: 2.5, 69: -100.0, 33: 100.0}, ()],
    "presence": [1.5, -2.0, 0.0],
    "frequency": [0.75, 0.0],
    "repetition": [1.5, 0.5, 1.0],
}
COMBINED = [
    dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())
]


@pytest.mark.parametrize("start", range(0, len(COMBINED), R))
def test_every_combination_equals_a_plain_loop(start, rng):
    rows = [
        row(
            prompt=rng.integers(0, V, 4).tolist(),
            output=[5, *rng.integers(0, V, rng.integers(0, 7)).tolist(), 5][: rng.integers(0, 9)],
            min_tokens=3,
            **options,
        )
        for options in COMBINED[start : start + R]
    ]
    logits = rng.standard_normal((R, V), dtype=np.float32) * 3
    got = run(logits, rows)
    for i, asked in enumerate(rows):
        np.testing.assert_allclose(got[i], plain(logits[i], asked), rtol=1e-6, atol=1e-6)


def test_a_row_that_asks_for_nothing_keeps_its_bits(rng):
    logits = rng.standard_normal((R, V), dtype=np.float32)
    got = run(logits, [row([1], [2], repetition=2.0, presence=1.0), row([3, 4], [5, 5])])
    np.testing.assert_array_equal(got[1:], logits[1:])
    assert not np.array_equal(got[0], logits[0])


def test_penalties_of_the_output_do_not_see_the_prompt(rng):
    """At the first token presence and frequency change nothing, repetition divides or multiplies
    the tokens of the prompt, once, however often they stand there."""
    logits = rng.standard_normal((R, V), dtype=np.float32)
    logits[:, 5], logits[:, 7] = 3.0, -3.0
    prompt = [5, 5, 5, 7]
    got = run(
        logits,
        [row(prompt, presence=1.0), row(prompt, frequency=1.0), row(prompt, repetition=2.0)],
    )
    np.testing.assert_array_equal(got[:2], logits[:2])
    assert got[2, 5] == 1.5
    assert got[2, 7] == -6.0
    others = [token for token in range(V) if token not in (5, 7)]
    np.testing.assert_array_equal(got[2, others], logits[2, others])


def test_padding_is_no_token(rng):
    """Rows are padded with token 5, which nobody has said."""
    logits = np.ones((R, V), np.float32)
    got = run(logits, [row([1, 2], [3], presence=1.0, frequency=1.0, repetition=2.0)])
    assert got[0, 5] == 1.0


def test_stops_are_banned_until_there_are_enough_tokens():
    logits = np.zeros((R, V), np.float32)
    outputs = [[1] * count for count in range(4)]
    got = run(logits, [row([9], output, deferred={7}, min_tokens=2) for output in outputs])
    assert (got[:4, 7] == -np.inf).tolist() == [True, True, False, False]


@pytest.mark.parametrize("penalty", [-2.0, 2.0])
def test_banned_tokens_stay_banned_and_nothing_is_nan(penalty):
    asked = row(
        [1],
        [2, 2],
        allowed={3},
        bias={1: 100.0, 2: 100.0},
        presence=penalty,
        frequency=penalty,
        repetition=0.5,
    )
    got = run(np.full((R, V), -50.0, np.float32), [asked])
    assert np.flatnonzero(got[0] > -np.inf).tolist() == [3]
    assert not np.isnan(got).any()


def test_a_mask_is_packed_as_it_is_read(rng):
    is_set = rng.random(V) < 0.5
    words = pack_mask(is_set)
    assert words.dtype == np.uint32
    assert [bool(words[t // 32] >> np.uint32(t % 32) & 1) for t in range(V)] == is_set.tolist()


def test_options_are_a_tree_of_rows():
    state = ops.create_logit_options(3, L, V, B)
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(state))
    assert state.tokens.dtype == jnp.int32
