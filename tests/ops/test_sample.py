"""Sampling: kept sets against a sorting oracle, distributions, and what a draw may depend on.

Rows serve as draws: a batch of equal rows at different positions is a sample of one distribution.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import ops

module = importlib.import_module("paged_jax.ops.sample")  # `ops.sample` is the function

R = 512
V = 300  # not a multiple of the group of 256 tokens

compiled_sample = jax.jit(ops.sample)
compiled_kept = jax.jit(module._kept)
compiled_top = jax.jit(ops.top_logprobs, static_argnames="count")


def sample(
    logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, choice=0, positions=None
):
    """Draws one token per row; scalars stand for all rows."""
    logits = np.asarray(logits, np.float32)
    rows = logits.shape[0]
    seed, choice = np.broadcast_to(np.asarray(seed, np.uint64), rows), np.broadcast_to(choice, rows)
    seeds = np.stack([seed & 0xFFFFFFFF, seed >> np.uint64(32), choice], axis=1).astype(np.uint32)
    positions = np.arange(rows) if positions is None else np.broadcast_to(positions, rows)
    tokens = compiled_sample(
        logits,
        temperature=np.broadcast_to(np.float32(temperature), rows),
        top_k=np.broadcast_to(np.int32(top_k), rows),
        top_p=np.broadcast_to(np.float32(top_p), rows),
        seeds=seeds,
        positions=positions.astype(np.int32),
        min_p=np.broadcast_to(np.float32(min_p), rows),
    )
    assert tokens.dtype == jnp.int32
    return np.asarray(tokens)


def draws(logits, times: int = 40, **options) -> np.ndarray:
    """Counts per token over `times` batches of one row of logits, padded with banned tokens."""
    padded = np.full(V, -np.inf, np.float32)
    padded[: len(logits)] = logits
    batch = np.broadcast_to(padded, (R, V))
    tokens = [sample(batch, positions=R * i + np.arange(R), **options) for i in range(times)]
    return np.bincount(np.concatenate(tokens), minlength=len(logits))


def oracle(logits, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """Probabilities after the filters by sorting, in float64; 0 for rejected tokens."""
    scaled = (np.float32(logits) - np.float32(max(logits))) / np.float32(temperature)
    weights = np.exp(scaled.astype(np.float64))
    weights[weights < np.float32(min_p)] = 0.0
    if 0 < top_k < len(logits):
        weights[scaled < np.sort(scaled)[-top_k]] = 0.0  # those that min-p left are the greatest
    if top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order]) / weights.sum()
        last = order[np.argmax(mass >= np.float32(top_p))]
        weights[scaled < scaled[last]] = 0.0
    return weights / weights.sum()


def assert_distributed(counts: np.ndarray, probabilities: np.ndarray) -> None:
    kept = probabilities > 0
    assert not counts[~kept].any(), "a rejected token was drawn"
    expected = counts.sum() * probabilities[kept]
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    # Mean dof, deviation sqrt(2 dof): four deviations and a little for small dof.
    dof = kept.sum() - 1
    assert chi_square < dof + 4 * np.sqrt(2 * dof) + 4


FILTERS = [
    (temperature, top_k, top_p, min_p)
    for temperature in (0.5, 1.0, 2.0)
    for top_k in (0, 1, 3, 40, V, 1000)
    for top_p in (0.05, 0.6, 0.95, 1.0)
    for min_p in (0.0, 0.2, 1.0)
]


@pytest.mark.parametrize("kind", ["steps", "normal", "flat", "ties", "banned"])
def test_kept_set_equals_the_sorting_oracle(kind, rng):
    logits = {
        "steps": np.arange(V)[::-1] * 0.5,
        "normal": rng.standard_normal(V) * 3,
        "flat": np.zeros(V),
        "ties": rng.integers(-3, 3, V).astype(float),
        "banned": np.where(rng.random(V) < 0.9, -np.inf, rng.standard_normal(V)),
    }[kind].astype(np.float32)
    temperatures, top_ks, top_ps, min_ps = (
        np.array(column) for column in zip(*FILTERS, strict=True)
    )
    scaled = (logits - logits.max())[None, :] / temperatures.astype(np.float32)[:, None]
    kept = np.asarray(
        compiled_kept(
            scaled.astype(np.float32),
            np.ones(len(FILTERS), bool),
            top_ks.astype(np.int32),
            top_ps.astype(np.float32),
            min_ps.astype(np.float32),
        )
    )
    for row, filters in enumerate(FILTERS):
        expected = oracle(logits, *filters) > 0
        # A banned token may be kept with weight 0 when fewer than k are allowed.
        assert (kept[row] & (logits > -np.inf)).tolist() == expected.tolist(), FILTERS[row]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.5, 0, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (2.0, 0, 0.6, 0.0),
        (1.0, 4, 0.9, 0.0),
        (2.0, 2, 0.99, 0.0),
        (2.0, 0, 1.0, 0.2),
        (1.0, 0, 0.9, 0.1),
        (2.0, 3, 0.9, 0.2),
    ],
)
def test_draws_follow_the_filtered_distribution(temperature, top_k, top_p, min_p):
    logits = [4.0, 3.0, 2.0, 1.0, 0.0, 3.0, -1.0, 2.5]
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    assert_distributed(draws(logits, **options), oracle(logits, **options))


def test_draws_follow_the_distribution_over_several_groups(rng):
    logits = rng.standard_normal(V)
    options = {"temperature": 1.5, "top_k": 120, "top_p": 0.9}
    assert_distributed(draws(logits, **options), oracle(logits, **options))


def test_top_p_renormalises_after_top_k():
    # The first three tokens have 1/2, 1/4, 1/4 of what top-k keeps, but 0.24, 0.12, 0.12 of all.
    logits = np.log([2.0, 1.0, 1.0, 0.9, 0.9, 0.9, 0.9, 0.9])
    counts = draws(logits, top_k=3, top_p=0.49)
    assert np.flatnonzero(counts).tolist() == [0]
    counts = draws(logits, top_k=3, top_p=0.51)
    assert np.flatnonzero(counts).tolist() == [0, 1, 2]


@pytest.mark.parametrize("top_k", [0, -1, 8, 100])
def test_top_k_that_is_off_reaches_every_token(top_k):
    counts = draws(np.zeros(8), top_k=top_k)
    assert_distributed(counts, np.full(8, 1 / 8))
    assert counts.all()


def test_ties_with_the_last_kept_token_are_kept():
    # Zeros of both signs are one value.
    counts = draws([-1.0, 0.0, -0.0, -5.0, 0.0, -9.0, -9.0, -9.0], times=1, top_k=1)
    assert np.flatnonzero(counts).tolist() == [1, 2, 4]


@pytest.mark.parametrize("top_p", [1e-6, 1e-30, 1e-45])
def test_tiny_top_p_keeps_the_most_likely_token(top_p):
    counts = draws([0.0, 0.1, 0.2, 3.0, 0.1, 0.0, 0.0, 0.0], times=1, top_p=top_p)
    assert counts.tolist() == [0, 0, 0, R, 0, 0, 0, 0]


def test_banned_tokens_are_never_drawn():
    logits = np.full(V, -np.inf)
    logits[[3, 257, 299]] = 0.0, 0.5, -0.5
    counts = draws(logits, temperature=2.0)
    assert_distributed(counts, oracle(logits, 2.0, 0, 1.0))
    assert np.flatnonzero(draws(logits, times=1, top_k=50)).tolist() == [3, 257, 299]


def test_rounding_of_the_cumulative_sum_draws_no_rejected_token(rng):
    """The sum of many groups may rise by an ulp at a group whose tokens are all rejected."""
    rows, groups = 16, 512
    group_weights = rng.random((rows, groups), np.float32) * (rng.random((rows, groups)) < 0.3)
    weights = np.zeros((rows, groups, 256), np.float32)
    weights[:, :, 7] = group_weights
    ends = np.asarray(jax.jit(lambda w: jnp.cumsum(w, axis=-1))(weights[:, :, 7]))
    inverse_cdf = jax.jit(module._inverse_cdf)
    rises = (np.diff(ends, axis=1) > 0) & (weights[:, 1:, 7] == 0)
    # A row without such a rise is drawn at the first rejected group: nothing special.
    at = np.argmax(np.where(rises.any(1, keepdims=True), rises, weights[:, 1:, 7] == 0), axis=1)
    uniform = ends[np.arange(rows), at] / ends[:, -1]
    for ulps in range(-3, 4):
        drawn = np.asarray(
            inverse_cdf(weights.reshape(rows, -1), uniform + np.float32(ulps * 2**-25))
        )
        assert weights.reshape(rows, -1)[np.arange(rows), drawn].all()


@pytest.mark.parametrize("temperature", [0.0, 1e-10, 1e-6, 1e-4, 0.01])
def test_tiny_temperatures_are_the_argmax(temperature, rng):
    logits = rng.uniform(-50, 50, (R, V)).astype(jnp.bfloat16).astype(np.float32)
    best = rng.integers(0, V, R)
    # The maximum is unique by one step of bfloat16.
    logits = np.minimum(logits, 49.75)
    logits[np.arange(R), best] = 50.0
    np.testing.assert_array_equal(sample(logits, temperature=temperature), best)
    np.testing.assert_array_equal(sample(logits, temperature=temperature, top_k=5, top_p=0.9), best)
    log_probability, rank, values, ids = compiled_top(logits, best.astype(np.int32), count=3)
    assert np.isfinite(log_probability).all()
    assert np.isfinite(values).all()
    assert (rank == 1).all()
    np.testing.assert_array_equal(ids[:, 0], best)


def test_greedy_ties_go_to_the_lowest_id():
    logits = np.zeros((R, V))
    logits[:, [5, 260]] = 1.0
    assert (sample(logits, temperature=0.0) == 5).all()
    # The same among random rows.
    temperature = np.where(np.arange(R) % 2, 1.0, 0.0)
    assert (sample(logits, temperature=temperature)[::2] == 5).all()


def test_greedy_and_random_rows_do_not_disturb_each_other(rng):
    logits = rng.standard_normal((R, V)).astype(np.float32)
    is_greedy = np.arange(R) % 2 == 0
    temperature = np.where(is_greedy, 0.0, 1.0)
    alone = sample(logits, temperature=1.0)
    # Greedy rows with most tokens banned, one of them with all but the last.
    banned = np.where(rng.random((R, V)) < 0.95, -np.inf, logits)
    banned[:, V - 1] = -100.0
    banned[0, : V - 1] = -np.inf
    mixed = np.where(is_greedy[:, None], banned, logits)
    tokens = sample(mixed, temperature=temperature)
    np.testing.assert_array_equal(tokens[is_greedy], banned.argmax(axis=1)[is_greedy])
    assert tokens[0] == V - 1
    np.testing.assert_array_equal(tokens[~is_greedy], alone[~is_greedy])
    np.testing.assert_array_equal(sample(banned, temperature=0.0), banned.argmax(axis=1))


def test_draw_depends_on_neither_row_nor_batch(rng):
    logits = rng.standard_normal((R, V)).astype(np.float32)
    seed, positions = rng.integers(0, 2**63, R), rng.integers(0, 2000, R)
    options = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
    tokens = sample(logits, seed=seed, positions=positions, **options)
    order = rng.permutation(R)
    moved = sample(logits[order], seed=seed[order], positions=positions[order], **options)
    np.testing.assert_array_equal(moved, tokens[order])
    few = sample(logits[:3], seed=seed[:3], positions=positions[:3], **options)
    np.testing.assert_array_equal(few, tokens[:3])


def test_every_word_of_the_key_changes_the_draw():
    flat, seed = np.zeros((R, V)), 5 + (7 << 32)
    tokens = sample(flat, seed=seed)
    np.testing.assert_array_equal(sample(flat, seed=seed), tokens)
    others = [
        {"seed": 6 + (7 << 32)},
        {"seed": 5 + (8 << 32)},
        {"seed": 5},
        {"seed": seed, "choice": 1},
        {"seed": seed, "positions": np.arange(R) + R},
    ]
    for options in others:
        # By chance one in V agrees: 2 of 512.
        assert (sample(flat, **options) == tokens).sum() < 10, options
    # Positions and words are told apart, not added up.
    assert len(set(sample(flat, seed=seed, positions=3))) == 1


def test_top_logprobs_are_those_of_log_softmax(rng):
    logits = rng.standard_normal((R, V)).astype(np.float32) * 5
    chosen = rng.integers(0, V, R).astype(np.int32)
    log_probability, rank, values, ids = map(np.asarray, compiled_top(logits, chosen, count=3))
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    rows = np.arange(R)
    np.testing.assert_allclose(log_probability, expected[rows, chosen], rtol=1e-5, atol=1e-5)
    order = np.argsort(-wide, axis=1, kind="stable")
    np.testing.assert_array_equal(rank, 1 + np.argmax(order == chosen[:, None], axis=1))
    np.testing.assert_array_equal(ids, order[:, :3])
    np.testing.assert_allclose(values, -np.sort(-expected, axis=1)[:, :3], rtol=1e-5, atol=1e-5)


def test_tied_tokens_share_their_rank_and_are_listed_by_id():
    logits = np.zeros((R, V), np.float32)
    logits[:, 100] = 2.0
    chosen = np.full(R, 250, np.int32)
    _, rank, _, ids = compiled_top(logits, chosen, count=3)
    assert (rank == 2).all()
    np.testing.assert_array_equal(ids, np.broadcast_to([100, 0, 1], (R, 3)))
