"""Rotary frequencies and tables against those of transformers (tests/data/make_oracles.py)."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.engine.pool import resolve
from paged_jax.models.decoder import cache_spec
from paged_jax.models.registry import read_spec
from paged_jax.models.rope import inverse_frequencies, rope_spec, rotate, rotation
from paged_jax.models.spec import RopeSpec
from tests.conftest import DATA

HEAD_DIM = 32
CASES = json.loads((DATA / "rope.json").read_text())
SCALED = [name for name in CASES if "rope_type" in CASES[name]["parameters"]]
tables = jax.jit(rotation, static_argnums=(0, 1, 3))


def config(name: str, *, key: str = "rope_parameters", kind: str = "rope_type") -> dict[str, Any]:
    """A config, in today's spelling or an older one."""
    case = CASES[name]
    parameters = dict(case["parameters"])
    found = {"max_position_embeddings": case["max_position_embeddings"]}
    if "rope_type" in parameters:
        parameters[kind] = parameters.pop("rope_type")
    if key == "rope_scaling":
        found["rope_theta"] = parameters.pop("rope_theta")
    return found | {key: parameters}


def expected(name: str) -> list[tuple[dict[str, Any], int]]:
    """What a case should give, and for which length of context."""
    case, original = CASES[name], rope_spec(config(name)).original_max_position
    if "short" not in case:
        return [(case, 0)]
    return [(case["short"], original), (case | case["long"], original + 1)]


@functools.cache
def found_tables() -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Of every case, in one program."""

    def compute():
        return {
            name: [
                rotation(
                    rope_spec(config(name)),
                    HEAD_DIM,
                    jnp.asarray(want["positions"], jnp.int32),
                    length,
                )
                for want, length in expected(name)
            ]
            for name in CASES
        }

    return jax.tree.map(np.asarray, jax.jit(compute)())


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("dynamic")])
def test_frequencies_are_those_of_transformers(name):
    spec = rope_spec(config(name))
    for want, length in expected(name):
        got = inverse_frequencies(spec, HEAD_DIM, length)
        assert got.dtype == np.float32
        # To the bit: a last place is an angle of 1e-3 at the far positions below.
        np.testing.assert_array_equal(got, np.float32(want["inv_freq"]))
        assert spec.attention_factor == pytest.approx(want["attention_factor"], rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_tables_are_those_of_transformers(name):
    """Dynamic too: there transformers ran each position as the last one of its sequence."""
    spec = rope_spec(config(name))
    for (want, _), (cos, sin) in zip(expected(name), found_tables()[name], strict=True):
        positions = np.asarray(want["positions"])
        most = 1e-6 * spec.attention_factor
        if spec.kind == "dynamic":
            # The device computes these, to some units in the last place of a frequency.
            is_grown = positions >= spec.original_max_position
            most = np.where(is_grown, 1e-6 + 2e-7 * positions, most)[:, None]
        assert np.all(np.abs(cos - np.float32(want["cos"])) <= most)
        assert np.all(np.abs(sin - np.float32(want["sin"])) <= most)


def test_dynamic_tables_do_not_depend_on_the_batch():
    """A token has its frequencies alone and in the middle of a prompt."""
    spec = rope_spec(config("dynamic"))
    positions = np.asarray([5000, 3, 2047, 2048], np.int32)
    together = tables(spec, HEAD_DIM, positions, 0)
    for i in range(len(positions)):
        alone = tables(spec, HEAD_DIM, np.repeat(positions[i], 4), 0)
        np.testing.assert_array_equal(together[0][i], alone[0][0])
        np.testing.assert_array_equal(together[1][i], alone[1][0])


@pytest.mark.parametrize("name", SCALED)
def test_old_spellings_mean_the_same(name):
    today = rope_spec(config(name))
    for key in ("rope_scaling", "rope_parameters"):
        for kind in ("type", "rope_type"):
            assert rope_spec(config(name, key=key, kind=kind)) == today
    if today.kind == "longrope":
        old = config(name, key="rope_scaling", kind="type")
        old["rope_scaling"]["type"] = "su"
        assert rope_spec(old) == today


def test_the_original_length_may_stand_beside_the_parameters():
    """Phi-3 has it there, and transformers prefers it to the other place."""
    today = rope_spec(config("longrope"))
    old = config("longrope")
    original = old["rope_parameters"].pop("original_max_position_embeddings")
    old["original_max_position_embeddings"] = original
    assert rope_spec(old) == today
    old["rope_parameters"]["original_max_position_embeddings"] = 7
    assert rope_spec(old) == today


def test_a_part_of_a_head_may_stand_beside_the_parameters():
    old = config("linear_part_of_a_head")
    fraction = old["rope_parameters"].pop("partial_rotary_factor")
    got = rope_spec(old | {"partial_rotary_factor": fraction})
    assert got == rope_spec(config("linear_part_of_a_head"))
    assert got.fraction == 0.5


def test_what_is_past_the_rotated_part_passes(rng):
    spec = rope_spec(config("default_part_of_a_head"))
    x = rng.standard_normal((2, 3, HEAD_DIM), dtype=np.float32)
    positions = jnp.asarray([9, 4], jnp.int32)
    got = rotate(jnp.asarray(x), tables(spec, HEAD_DIM, positions, 0), spec)
    np.testing.assert_array_equal(got[..., 16:], x[..., 16:])
    assert not np.any(np.isclose(got[..., :16], x[..., :16], atol=1e-7).all(axis=-1))


def test_neighbours_may_be_pairs(rng):
    """The products of queries and keys are those of the other order with its features moved."""
    halves, neighbours = RopeSpec(), RopeSpec(is_interleaved=True)
    q, k = rng.standard_normal((2, 2, 1, HEAD_DIM), dtype=np.float32)
    moved = np.concatenate([np.arange(0, HEAD_DIM, 2), np.arange(1, HEAD_DIM, 2)])
    found = tables(halves, HEAD_DIM, np.asarray([9, 4], np.int32), 0)

    def products(spec, q, k):
        q, k = (rotate(jnp.asarray(x), found, spec) for x in (q, k))
        return np.einsum("thd,shd->ts", q, k)

    got, want = products(neighbours, q, k), products(halves, q[..., moved], k[..., moved])
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("kind", ["spiral", "proportional", "DYNAMIC"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_an_unknown_type_lists_what_is_supported(key, kind):
    with pytest.raises(ValueError, match=f"'{kind}' is not supported; supported: default, linear"):
        rope_spec({"rope_scaling": {key: kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("llama3_factor_8", "factor"),
        ("longrope", "short_factor"),
        ("longrope", "long_factor"),
    ],
)
def test_a_missing_parameter_is_named(name, key):
    found = config(name)
    del found["rope_parameters"][key]
    with pytest.raises(ValueError, match=rf"needs rope_parameters\.{key}"):
        rope_spec(found)


def test_divisors_must_be_one_per_pair():
    parameters = CASES["longrope"]["parameters"] | {"long_factor": [1.0, 2.0]}
    with pytest.raises(ValueError, match=r"long_divisors \(2 values\) must have one per rotated"):
        read_spec(_llama(rope_parameters=parameters))


@pytest.mark.parametrize("name", SCALED)
def test_the_length_limit_is_not_scaled_again(name):
    """`max_position_embeddings` is what the model can do after it was stretched."""
    spec = read_spec(_llama(**config(name), head_dim=HEAD_DIM))
    assert spec.max_position_embeddings == CASES[name]["max_position_embeddings"]
    config_of_engine = EngineConfig(num_blocks=4, block_size=16, max_num_seqs=2)
    for positions, want in ((512, 512), (spec.max_position_embeddings, None)):
        found = resolve(config_of_engine, cache_spec(spec), np.float32, positions)
        assert found.max_model_len == (want or min(2048, spec.max_position_embeddings))


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("mscale", "in_scale", "in_tables"),
    [
        # 0.1 * mscale_all_dim * ln(40) + 1, and its ratio to that of mscale.
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.3688879, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.707}, 1.2608038, 1.0857264),
        ({}, 1.0, 1.3688879),
    ],
)
def test_the_scale_of_latent_attention_has_mscale_too(key, mscale, in_scale, in_tables):
    """Of queries and of keys, and only once in the tables, which some of the features pass."""
    found = json.loads((DATA / "tiny" / "deepseek_v3" / "config.json").read_text())
    del found["rope_parameters"]
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    attention = read_spec(found | {key: yarn | mscale}).layers[0].attention
    assert attention.sm_scale == pytest.approx(24**-0.5 * in_scale**2, rel=1e-6)
    assert attention.rope.attention_factor == pytest.approx(in_tables, rel=1e-6)


def _llama(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        **more,
    }
