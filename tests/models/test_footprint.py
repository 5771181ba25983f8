"""What a model takes by arithmetic is what its arrays take."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from paged_jax import core
from paged_jax.models.decoder import Decoder
from paged_jax.models.footprint import kv_bytes_per_token, parameters_per_rank
from paged_jax.models.parallel import Share
from paged_jax.models.registry import read_spec
from tests.models.tiny import NAMES, config


@pytest.mark.parametrize("num_ranks", [None, 1, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_kv_of_a_rank(name, num_ranks):
    spec = read_spec(config(name))
    share = None if num_ranks is None else Share(axis="tp", num_ranks=num_ranks)
    model = nnx.eval_shape(lambda: Decoder(spec, share=share, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert parameters_per_rank(spec, share) == sum(leaf.size for leaf in leaves)
    kv = jax.eval_shape(
        lambda: core.create_kv_cache(model.cache_spec(), 7, 4, jnp.bfloat16, platform="cpu")
    )
    tokens = kv.kv.shape[1] * kv.kv.shape[3]
    assert kv_bytes_per_token(spec, 2, share) * tokens == kv.kv.size * 2
