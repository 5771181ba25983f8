"""What the loop over blocks computes itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.models.decoder import Decoder
from paged_jax.models.registry import read_spec
from paged_jax.models.spec import uniform_spec
from tests.models.modules import filled

SIZE = 24


@pytest.mark.parametrize("name", ["Gemma", "Gemma2", "Gemma3"])
def test_the_scale_of_an_embedding_is_rounded_as_in_transformers(name):
    """In bfloat16 the root of 24 is 4.90625, not 4.898979; the product is rounded too."""
    config = {
        "architectures": [f"{name}ForCausalLM"],
        "vocab_size": SIZE,
        "hidden_size": SIZE,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 2.0**40,  # so large that the last norm is a product with 2 ** -20
    }
    spec = read_spec(config)
    # Zeros but for the embedding, to which 1 is added in the norms.
    model = filled(lambda: Decoder(spec, dtype="bfloat16", rngs=nnx.Rngs(0)), scale=0.0)
    values = (1 + np.arange(SIZE) / 128).astype(jnp.bfloat16)
    model.embed.weight[...] = jnp.asarray(np.diag(values))
    logits = jax.jit(lambda tokens: model(tokens))(jnp.arange(SIZE)[None])[0]

    scaled = values * np.asarray(4.90625, jnp.bfloat16)
    assert scaled.dtype == jnp.bfloat16
    want = scaled.astype(np.float32) * values.astype(np.float32) * 2.0**-20
    np.testing.assert_array_equal(np.diag(logits), want)
    unrounded = (values.astype(np.float32) * SIZE**0.5).astype(jnp.bfloat16)
    assert np.mean(scaled != unrounded) > 0.2


def test_logits_are_capped_at_the_end():
    """Whatever the model: hidden states come from all its forms, and logits from here."""
    spec = uniform_spec(
        vocab_size=9,
        hidden_size=SIZE,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        mlp_size=8,
        max_position_embeddings=8,
        is_tied=True,
        logit_scale=0.5,
        logit_cap=2.0,
    )
    model = filled(lambda: Decoder(spec, rngs=nnx.Rngs(0)))
    hidden = np.random.default_rng(1).standard_normal((4, SIZE), dtype=np.float32)
    plain = hidden @ np.asarray(model.embed.weight[...]).T / 2
    assert np.max(np.abs(plain)) > 2.0
    got = model.logits(jnp.asarray(hidden))
    np.testing.assert_allclose(got, 2 * np.tanh(plain / 2), atol=1e-5, rtol=0)
