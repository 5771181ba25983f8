"""Sampling over a vocabulary that is divided among ranks: the same tokens as over a whole one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from paged_jax import ops
from paged_jax.bitmask import pack_mask

ROWS, VOCAB = 6, 700


def on_ranks(num_ranks: int, run, logits, *arguments):
    """`run(logits of a rank, *arguments)` on each rank; its results, one after the other."""
    return divided(num_ranks, run, len(arguments))(logits, *arguments)


def divided(num_ranks: int, run, num_arguments: int):
    """The same for several calls; the vocabulary is padded with -inf."""
    own = -(-VOCAB // num_ranks // 256) * 256
    mesh = Mesh(np.array(jax.devices()[:num_ranks]), ("tp",))
    whole = PartitionSpec()
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(PartitionSpec(None, "tp"), *[whole] * num_arguments),
        # Every rank's result is looked at.
        out_specs=PartitionSpec("tp"),
        check_vma=False,
    )
    compiled = jax.jit(mapped)

    def call(logits, *arguments):
        padded = np.full((logits.shape[0], num_ranks * own), -np.inf, np.float32)
        padded[:, :VOCAB] = logits
        found = compiled(padded, *arguments)
        return jax.tree.map(lambda x: np.asarray(x).reshape(num_ranks, -1, *x.shape[1:]), found)

    return call


def fields(rng, **given):
    """Of six rows with different options."""
    found = {
        "temperature": np.array([0, 0.3, 1, 1, 2, 1], np.float32),
        "top_k": np.array([0, 0, 5, 1, 690, 0], np.int32),
        "top_p": np.array([1, 0.9, 1, 1, 0.5, 1e-9], np.float32),
        "min_p": np.array([0, 0, 0.01, 0, 0, 0], np.float32),
        "seeds": rng.integers(0, 2**32, (ROWS, 3), np.uint32),
        "positions": rng.integers(0, 99, ROWS, np.int32),
    }
    return found | given


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_draws_are_those_of_the_whole(num_ranks, scale, rng):
    logits = scale * rng.standard_normal((ROWS, VOCAB)).astype(np.float32)
    names = list(fields(rng))

    def run(x, *values):
        return ops.sample(x, axis_name="tp", **dict(zip(names, values, strict=True)))

    draw, whole = divided(num_ranks, run, len(names)), jax.jit(ops.sample)
    for _ in range(20):
        given = fields(rng)
        found = draw(logits, *given.values())
        expected = np.asarray(whole(logits, **given))
        assert (found == expected).all(), (found, expected)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ties_go_to_the_lowest_id_on_whichever_rank(num_ranks, rng):
    logits = np.zeros((ROWS, VOCAB), np.float32)
    for row, tied in enumerate([(0, 699), (300, 301), (255, 256), (699,), (256, 512), (3,)]):
        logits[row, list(tied)] = 5.0
    given = fields(rng, temperature=np.zeros(ROWS, np.float32))

    def run(x, *values):
        return ops.sample(x, axis_name="tp", **dict(zip(given, values, strict=True)))

    found = on_ranks(num_ranks, run, logits, *given.values())
    assert (found == [0, 300, 255, 699, 256, 3]).all()


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 20])
def test_log_probabilities_are_those_of_the_whole(num_ranks, count, rng):
    logits = 4 * rng.standard_normal((ROWS, VOCAB)).astype(np.float32)
    logits[0, 100:500] = 7.0  # ties across ranks
    logits[1, 1:] = -np.inf
    chosen = np.array([499, 0, 0, 699, 256, 255], np.int32)

    def run(x, chosen):
        return ops.top_logprobs(x, chosen, count, "tp")

    found = on_ranks(num_ranks, run, logits, chosen)
    expected = ops.top_logprobs(jnp.asarray(logits), jnp.asarray(chosen), count)
    for of_ranks, want in zip(found, expected, strict=True):
        want = np.asarray(want)
        for got in of_ranks:
            if want.dtype == np.int32:
                # Of -inf there are many, and none is better than another.
                is_finite = np.asarray(expected[2]) > -np.inf
                same = got == want if want.ndim == 1 else (got == want) | ~is_finite
                assert same.all()
            else:
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_options_act_on_the_tokens_of_the_whole(num_ranks, rng):
    logits = rng.standard_normal((ROWS, VOCAB)).astype(np.float32)
    options = ops.create_logit_options(ROWS, 12, VOCAB, 4)
    arrays = {name: np.array(value) for name, value in vars(options).items()}
    arrays["tokens"] = rng.integers(0, VOCAB, (ROWS, 12), np.int32)
    arrays["num_prompt"][:] = 4
    arrays["bias_ids"][:, :3] = [0, 256, VOCAB - 1]
    arrays["biases"][:, :3] = [2.0, -3.0, 4.0]
    arrays["allowed"] = np.stack([pack_mask(rng.random(VOCAB) < 0.7) for _ in range(ROWS)])
    arrays["deferred"] = np.stack([pack_mask(rng.random(VOCAB) < 0.1) for _ in range(ROWS)])
    arrays["min_length"][::2] = 9
    arrays["presence"][:] = 0.5
    arrays["frequency"][:] = 0.25
    arrays["repetition"][:] = 1.3
    options = type(options)(**arrays)
    lengths = np.array([8, 8, 3, 12, 10, 5], np.int32)

    def run(x, options, lengths):
        return ops.adjust_logits(x, options, lengths, "tp")

    found = on_ranks(num_ranks, run, logits, options, lengths)
    whole = np.concatenate(list(found), axis=1)[:, :VOCAB]
    expected = np.asarray(ops.adjust_logits(jnp.asarray(logits), options, jnp.asarray(lengths)))
    np.testing.assert_array_equal(whole, expected)
