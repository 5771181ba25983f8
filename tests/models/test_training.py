"""The dense form's gradients against those of transformers (tests/data/make_oracles.py)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.models.pack import pack, unpack
from paged_jax.models.registry import architecture, read_spec
from paged_jax.models.weights import sources
from tests.conftest import DATA
from tests.models.tiny import config, expected, model

TOLERANCE = 1e-4
"""Relative to the largest magnitude of a tensor's gradient; seen are 6e-6."""


def shortened(gradient: np.ndarray) -> np.ndarray:
    """A small gradient itself; of a large one its products with eight random vectors."""
    if gradient.size <= 512:
        return gradient
    vectors = np.random.default_rng(gradient.size).standard_normal((8, gradient.size))
    return vectors @ gradient.reshape(-1).astype(np.float64)


@functools.cache
def gradients(name: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss, and gradients by the tensor's name in the checkpoint, by way of the training tree."""
    graphdef, state = nnx.split(model(name))
    tokens = jnp.asarray(expected(name)["prompt_40"])[None]

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        """Mean cross entropy of the next token."""
        logits = nnx.merge(graphdef, pack(params))(tokens)[:, :-1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
        return -jnp.mean(chosen)

    value, found = loss(jax.jit(unpack)(state))
    found = pack(jax.tree.map(np.asarray, found))
    spec, names = read_spec(config(name)), architecture(config(name)).names
    by_parameter, by_tensor = sources(spec, names), {}
    for path, leaf in nnx.traversals.flatten_mapping(found).items():
        source = by_parameter[".".join(map(str, path))]
        parts = source.split(leaf)
        by_tensor |= {tensor.name: part for tensor, part in zip(source.tensors, parts, strict=True)}
    return float(value), by_tensor


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt_oss",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("gemma3", "qwen3_moe")),
    ],
)
def test_gradients_of_every_parameter_are_those_of_transformers(name):
    """Experts and their biases, sinks, norms, tied embeddings and all."""
    with np.load(DATA / "gradients.npz") as stored:
        own = [key for key in stored.files if key.startswith(f"{name}/")]
        want = {key.removeprefix(f"{name}/"): stored[key] for key in own}
    value, got = gradients(name)
    assert value == pytest.approx(float(want.pop("loss")), rel=1e-5)
    assert got.keys() == want.keys()
    for key, gradient in want.items():
        largest = np.max(np.abs(gradient))
        assert largest > 0, key
        error = np.max(np.abs(shortened(got[key]) - gradient)) / largest
        assert error < TOLERANCE, f"{key}: {error:.1e}"
