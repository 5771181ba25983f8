"""The engine's step of Llama 3 8B as a program to compile; nothing is allocated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax import core
from paged_jax.decode import create_row_state
from paged_jax.engine import logit_options
from paged_jax.engine.step import Sizes, StepInputs, make_step
from paged_jax.models.decoder import Decoder
from paged_jax.models.spec import RopeSpec, uniform_spec
from tests.aot.programs import Program

NUM_ROWS = 64
CONTEXT_LEN = 8192
SIZES = Sizes(decode_steps=8, num_listed=20)  # as of an engine of default options
POOL_TOKENS = 65536  # with all 32 layers and the weights 25 of v6e's 32 GB


def llama_step(
    num_tokens: int, block_size: int, num_layers: int, platform: str | None = None
) -> Program:
    """Builds the step of T tokens and R rows; T = R is a decode step.

    Args:
      platform: Whose pool it takes, as in `create_kv_cache`.
    """
    spec = uniform_spec(
        vocab_size=128256,
        hidden_size=4096,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_size=14336,
        norm_eps=1e-5,
        rope=RopeSpec(theta=500000.0),
        max_position_embeddings=CONTEXT_LEN,
    )
    model = nnx.eval_shape(lambda: Decoder(spec, dtype="bfloat16", rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    num_blocks = POOL_TOKENS // block_size
    kv = jax.eval_shape(
        lambda: core.create_kv_cache(
            model.cache_spec(), num_blocks, block_size, jnp.bfloat16, platform=platform
        )
    )
    blocks = jax.eval_shape(
        lambda: core.create_block_state(num_blocks, block_size, NUM_ROWS, CONTEXT_LEN // block_size)
    )
    rows = jax.eval_shape(lambda: create_row_state(NUM_ROWS))
    options = jax.eval_shape(lambda: logit_options.create(NUM_ROWS, CONTEXT_LEN, spec.vocab_size))
    return Program(
        fn=make_step(graphdef, treedef, SIZES),
        args=(tuple(leaves), kv, blocks, rows, inputs(num_tokens), options),
        donate=(1, 5),
        pools=(kv.kv,),
    )


def inputs(num_tokens: int) -> StepInputs:
    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    i32, flag = functools.partial(array, jnp.int32), functools.partial(array, jnp.bool_)
    return StepInputs(
        free_rows=flag(NUM_ROWS),
        retain_ids=i32(64),
        tokens=i32(num_tokens),
        row_ids=i32(NUM_ROWS),
        query_lens=i32(NUM_ROWS),
        sources=i32(NUM_ROWS),
        num_decode=i32(),
        num_steps=i32(),
        is_given=flag(NUM_ROWS),
        is_sampled=flag(NUM_ROWS),
        is_admission=flag(NUM_ROWS),
        has_logprobs=flag(NUM_ROWS),
        owners=i32(NUM_ROWS),
        next_tokens=i32(num_tokens),
        admitted=jax.eval_shape(lambda: create_row_state(NUM_ROWS)),
    )
