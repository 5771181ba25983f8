"""The router against numpy, and experts token by token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.models.moe import MoE, Router
from paged_jax.models.spec import MoESpec
from tests.models.modules import filled

SIZE, EXPERTS, CHOSEN = 12, 8, 3
ROUTERS = {
    "softmax": {},
    "softmax as it is": {"is_renormalised": False},
    "softmax with a bias and a scale": {"has_router_bias": True, "scale": 2.5},
    "sigmoid": {"scoring": "sigmoid"},
    "sigmoid as it is, scaled": {"scoring": "sigmoid", "is_renormalised": False, "scale": 0.5},
    "corrected": {"scoring": "sigmoid", "has_correction": True},
    "in groups": {"num_groups": 4, "num_chosen_groups": 2},
    "one group of pairs": {"num_groups": 2, "num_chosen_groups": 1},
    "groups of one": {"num_groups": 8, "num_chosen_groups": 4},
    "all groups": {"num_groups": 4, "num_chosen_groups": 4},
    "as DeepSeek-V3": {
        "scoring": "sigmoid",
        "has_correction": True,
        "num_groups": 4,
        "num_chosen_groups": 2,
        "scale": 2.5,
    },
}


def moe_spec(**more) -> MoESpec:
    return MoESpec(num_experts=EXPERTS, num_chosen=CHOSEN, size=5, **more)


def random_router(dtype=jnp.float32, **more) -> Router:
    spec = moe_spec(**more)
    return filled(lambda: Router(spec, SIZE, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))


def routed(router: Router, x: np.ndarray) -> tuple[list[set[int]], np.ndarray]:
    """Experts of each token, and the weight [T, X] of every expert; float64."""
    spec = router.spec
    logits = x.astype(np.float64) @ np.asarray(router.gate.weight[...]).T
    if router.gate.bias is not None:
        logits = logits + np.asarray(router.gate.bias[...])
    exp = np.exp(logits)
    scores = exp / exp.sum(-1, keepdims=True) if spec.scoring == "softmax" else exp / (1 + exp)
    correction = 0.0 if router.correction is None else np.asarray(router.correction[...])
    chosen, weights = [], np.zeros_like(scores)
    for token, ranking in enumerate(scores + correction):
        per_group = EXPERTS // spec.num_groups
        groups = ranking.reshape(spec.num_groups, per_group)
        worth = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        best = set(np.argsort(-worth)[: spec.num_chosen_groups].tolist())
        allowed = [e for e in np.argsort(-ranking).tolist() if e // per_group in best]
        own = allowed[:CHOSEN]
        total = scores[token, own].sum() if spec.is_renormalised else 1.0
        weights[token, own] = scores[token, own] / total * spec.scale
        chosen.append(set(own))
    return chosen, weights


@pytest.mark.parametrize("name", ROUTERS)
def test_the_router_chooses_and_weighs_as_numpy_does(name, rng):
    router = random_router(**ROUTERS[name])
    x = rng.standard_normal((24, SIZE), dtype=np.float32)
    experts, weights = (np.asarray(a) for a in jax.jit(lambda x: router(x))(x))
    chosen, want = routed(router, x)
    assert [set(row) for row in experts.tolist()] == chosen
    got = np.zeros_like(want)
    np.put_along_axis(got, experts, weights, axis=1)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_correction_chooses_and_does_not_weigh():
    router = random_router(scoring="sigmoid", has_correction=True, is_renormalised=False)
    router.correction[...] = jnp.asarray([9.0, 0, 0, 0, 0, 8.0, 7.0, 0])
    experts, weights = router(jnp.zeros((1, SIZE)))
    assert experts.tolist() == [[0, 5, 6]]
    np.testing.assert_array_equal(weights, [[0.5, 0.5, 0.5]])


def test_weights_of_a_bfloat16_router_are_float32():
    """As transformers computes the softmax; in bfloat16 close experts would tie."""
    router = random_router(jnp.bfloat16)
    _, weights = jax.jit(lambda x: router(x))(jnp.ones((2, SIZE), jnp.bfloat16))
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(np.sum(weights, axis=1), 1.0, atol=1e-6)


def test_scores_that_underflow_give_numbers():
    router = random_router(scoring="sigmoid")
    router.gate.weight[...] = jnp.full((EXPERTS, SIZE), -100.0)
    _, weights = router(jnp.ones((1, SIZE)))
    assert np.all(np.isfinite(weights))


MIXTURES = {
    "plain": {},
    "shared expert": {"shared_size": 7, "scoring": "sigmoid"},
    "clamped, with biases": {
        "activation": "clamped_swiglu",
        "activation_limit": 0.5,
        "has_bias": True,
        "has_router_bias": True,
    },
}


@functools.cache
def mixture(name: str, dtype: str = "float32") -> MoE:
    spec = moe_spec(**MIXTURES[name])
    return filled(lambda: MoE(spec, SIZE, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def mixed(moe: MoE, x: np.ndarray) -> np.ndarray:
    """Token by token and expert by expert, in float64."""
    spec, out = moe.spec, np.zeros(x.shape)
    chosen, weights = routed(moe.router, x)
    for token, expert in ((t, e) for t, own in enumerate(chosen) for e in own):
        gate_up = x[token] @ np.asarray(moe.gate_up.weight[...][expert], np.float64)
        if spec.has_bias:
            gate_up += np.asarray(moe.gate_up.bias[...][expert])
        gate, up = np.split(gate_up, 2)
        if spec.activation == "silu":
            inner = silu(gate) * up
        else:
            gate = np.minimum(gate, spec.activation_limit)
            up = np.clip(up, -spec.activation_limit, spec.activation_limit)
            inner = gate / (1 + np.exp(-spec.activation_alpha * gate)) * (up + 1)
        own = inner @ np.asarray(moe.down.weight[...][expert], np.float64)
        if spec.has_bias:
            own += np.asarray(moe.down.bias[...][expert])
        out[token] += weights[token, expert] * own
    if moe.shared is not None:
        gate, up = np.split(x @ np.asarray(moe.shared.gate_up.weight[...], np.float64).T, 2, 1)
        out += (silu(gate) * up) @ np.asarray(moe.shared.down.weight[...]).T
    return out


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_summed_by_their_weights(name, rng):
    moe = mixture(name)
    x = rng.standard_normal((2, 9, SIZE), dtype=np.float32)
    got = jax.jit(lambda x: moe(x))(x)
    want = mixed(moe, x.reshape(18, SIZE)).reshape(x.shape)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.max(np.abs(want)), rtol=0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("plain", "float32"),
        pytest.param("clamped, with biases", "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_a_token_does_not_depend_on_its_company(name, dtype, rng):
    """Bit for bit, whoever else is there and whichever experts they visit."""
    moe = mixture(name, dtype)
    run = jax.jit(lambda x: moe(x))
    token = rng.standard_normal(SIZE, dtype=np.float32).astype(jnp.dtype(dtype))
    seen = set()
    for count in (2, 3, 8, 33):
        for place in (0, count - 1):
            x = rng.standard_normal((count, SIZE), dtype=np.float32).astype(token.dtype)
            x[place] = token
            seen.add(np.asarray(run(x))[place].tobytes())
            # All the others at the same experts.
            x[:] = token
            seen.add(np.asarray(run(x))[place].tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_chosen": 9}, r"num_chosen \(9\) must be at most num_experts \(8\)"),
        ({"num_groups": 3}, r"num_experts \(8\) must be a multiple of num_groups \(3\)"),
        ({"num_groups": 2, "num_chosen_groups": 3}, r"num_chosen_groups \(3\) must be in 1\.\.2"),
        ({"num_groups": 4}, r"num_chosen \(3\) exceeds the experts of 1 groups"),
        ({"size": 0}, r"size \(0\) must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(moe_spec(), **fields)
