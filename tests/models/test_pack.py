"""Fused parameters as a training tree, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paged_jax.models.attention import SelfAttention
from paged_jax.models.mlp import MLP
from paged_jax.models.moe import MoE
from paged_jax.models.pack import pack, unpack
from paged_jax.models.spec import AttentionSpec, MLPSpec, MoESpec, NormSpec
from tests.models.modules import filled
from tests.models.tiny import NAMES, model


def host(module: nnx.Module) -> dict:
    """Its parameters as numpy arrays, which compile nothing."""
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module)))


def named(tree) -> dict[str, jax.Array]:
    """Leaves by their path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def assert_same(got, want) -> None:
    got, want = named(got), named(want)
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        assert got[name].dtype == leaf.dtype
        np.testing.assert_array_equal(got[name], leaf)


@pytest.mark.parametrize("name", NAMES)
def test_the_round_trip_is_exact(name):
    params = host(model(name))
    tree = unpack(params)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(pack(tree)))
    assert not {"qkv", "gate_up"} & {part for path in named(tree) for part in path.split("'")}
    assert_same(pack(tree), params)
    assert_same(unpack(pack(tree)), tree)


def test_what_is_fused_comes_apart():
    def make(kind, *sizes):
        return filled(lambda: kind(*sizes, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)))

    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=2, rope=None, has_qkv_bias=True)
    layer = make(SelfAttention, spec, 6, NormSpec())
    tree = unpack(host(layer))
    weight, bias = np.asarray(layer.qkv.weight[...]), np.asarray(layer.qkv.bias[...])
    assert tree.keys() == {"q", "k", "v", "out"}
    for name, rows in {"q": slice(0, 8), "k": slice(8, 12), "v": slice(12, 16)}.items():
        np.testing.assert_array_equal(tree[name]["weight"], weight[rows])
        np.testing.assert_array_equal(tree[name]["bias"], bias[rows])

    layer = make(MLP, MLPSpec(size=5, has_bias=True), 6)
    tree = unpack(host(layer))
    assert {name: part["weight"].shape for name, part in tree.items()} == {
        "gate": (5, 6),
        "up": (5, 6),
        "down": (6, 5),
    }
    np.testing.assert_array_equal(tree["up"]["weight"], np.asarray(layer.gate_up.weight[...])[5:])
    layer = make(MLP, MLPSpec(size=5, is_gated=False, has_bias=True), 6)
    assert unpack(host(layer)).keys() == {"up", "down"}

    spec = MoESpec(num_experts=3, num_chosen=2, size=5, has_bias=True, shared_size=4)
    layer = make(MoE, spec, 6)
    tree = unpack(host(layer))
    assert tree.keys() == {"router", "gate", "up", "down", "shared"}
    assert tree["shared"].keys() == {"gate", "up", "down"}
    np.testing.assert_array_equal(
        tree["gate"]["weight"], np.asarray(layer.gate_up.weight[...])[:, :, :5]
    )
    np.testing.assert_array_equal(
        tree["up"]["weight"], np.asarray(layer.gate_up.weight[...])[:, :, 5:]
    )
    assert tree["up"]["bias"].shape == (3, 5)


def test_what_is_not_fused_stays():
    latent = host(model("deepseek_v3"))["blocks"][0]["attention"]
    assert {"down", "up"} <= latent["q"].keys()
    assert_same(unpack(latent), latent)
    assert_same(pack(latent), latent)


@pytest.mark.parametrize(
    ("name", "kind", "is_by_columns"),
    [
        ("gpt_oss", AxisType.Auto, False),
        pytest.param("gpt_oss", AxisType.Auto, True, marks=pytest.mark.exhaustive),
        pytest.param("llama_tied_bias", AxisType.Explicit, False, marks=pytest.mark.exhaustive),
        ("llama_tied_bias", AxisType.Explicit, True),
    ],
)
def test_shardings_are_kept_under_jit(name, kind, is_by_columns):
    """Matrices over their rows or their columns, on one axis of a mesh of 8."""
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("data", "tp"), axis_types=(kind,) * 2)

    def place(path, leaf):
        is_vector = leaf.ndim == 1 or path[-1].key == "bias"
        axis = leaf.ndim - (1 if is_vector or is_by_columns else 2)
        spec = [None] * leaf.ndim
        spec[axis] = "tp"
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    params = nnx.to_pure_dict(nnx.state(model(name)))
    params = jax.tree_util.tree_map_with_path(place, params)
    tree = jax.jit(unpack)(params)
    assert_same(tree, unpack(jax.tree.map(np.asarray, params)))
    again = jax.jit(pack)(tree)
    assert_same(again, params)
    original = named(params)
    for path, leaf in named(tree).items():
        assert not leaf.sharding.is_fully_replicated, path
    for path, leaf in named(again).items():
        assert not leaf.sharding.is_fully_replicated, path
        assert leaf.sharding.is_equivalent_to(original[path].sharding, leaf.ndim), path
