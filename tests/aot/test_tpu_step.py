"""A whole engine step of Llama 3 8B compiles for TPU: kernels in place, pool untouched.

Nothing is allocated. Four of the 32 layers are compiled, which takes a minute for decode and two
with prefill. All 32 were compiled by hand, in one minute and in three, with the same outcome.
"""

import collections
import functools
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from paged_jax import core
from paged_jax.decode import create_row_state
from paged_jax.engine.step import StepInputs, make_step
from paged_jax.models.decoder import Decoder
from paged_jax.models.spec import DecoderSpec, RopeSpec
from tests.aot.targets import Report, compile_for, report

pytestmark = [pytest.mark.aot, pytest.mark.slow]

NUM_LAYERS = 2  # enough to see what is made per layer and what once; 32 take three minutes
NUM_ROWS = 64
CONTEXT_LEN = 8192
POOL_TOKENS = 65536  # with all 32 layers and the weights 25 of v6e's 32 GB


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A step's HLO and what it says about the pool."""

    hlo: str
    report: Report
    pool: jax.ShapeDtypeStruct


@pytest.fixture(autouse=True)
def optimized():
    """The programs that are served; tests/conftest.py turns this on for all other tests."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def compile_step(num_tokens: int, block_size: int, num_layers: int = NUM_LAYERS) -> Compiled:
    """Compiles the step of T tokens and R rows for v6e; T = R is a decode step."""
    spec = DecoderSpec(
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
        lambda: core.create_kv_cache(model.cache_spec(), num_blocks, block_size, jnp.bfloat16)
    )
    blocks = jax.eval_shape(
        lambda: core.create_block_state(num_blocks, block_size, NUM_ROWS, CONTEXT_LEN // block_size)
    )
    rows = jax.eval_shape(lambda: create_row_state(NUM_ROWS))
    step = make_step(graphdef, treedef)
    args = (tuple(leaves), kv, blocks, rows, _inputs(num_tokens))
    compiled = compile_for("v6e", step, args, donate=(1,))
    hlo = compiled.as_text()
    assert hlo is not None
    return Compiled(hlo=hlo, report=report(compiled, [kv.kv.shape]), pool=kv.kv)


def _inputs(num_tokens: int) -> StepInputs:
    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    i32, flag = functools.partial(array, jnp.int32), functools.partial(array, jnp.bool_)
    return StepInputs(
        free_rows=flag(NUM_ROWS),
        tokens=i32(num_tokens),
        row_ids=i32(NUM_ROWS),
        query_lens=i32(NUM_ROWS),
        num_decode=i32(),
        is_sampled=flag(NUM_ROWS),
        is_admission=flag(NUM_ROWS),
        has_logprobs=flag(NUM_ROWS),
        owners=i32(NUM_ROWS),
        admitted=jax.eval_shape(lambda: create_row_state(NUM_ROWS)),
    )


@pytest.mark.parametrize(
    ("num_tokens", "block_size"), [(64, 128), (512, 128)], ids=["decode", "with prefill"]
)
def test_step_moves_no_pool_and_makes_work_lists_once(num_tokens, block_size):
    made = compile_step(num_tokens, block_size)
    pool_bytes = made.pool.size * made.pool.dtype.itemsize
    assert made.report.faults == ()
    assert made.report.alias_bytes >= pool_bytes
    assert made.report.temp_bytes < pool_bytes // NUM_LAYERS

    calls = {"copy_blocks": 1, "paged_write": NUM_LAYERS, "paged_decode": NUM_LAYERS}
    lists = {"copy_kv": 2, "write_kv": 3, "paged_decode": 1}
    if num_tokens > NUM_ROWS:
        calls["paged_prefill"], lists["paged_prefill"] = NUM_LAYERS, 1
    assert _calls(made.hlo) == calls
    found = _scatters(made.hlo)
    assert {name: found[name] for name in lists} == lists


def _calls(hlo: str) -> collections.Counter[str]:
    """Kernels in a program, by name."""
    lines = [line for line in hlo.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    return collections.Counter(re.findall(r"/(\w+)/pallas_call", "\n".join(lines)))


def _scatters(hlo: str) -> collections.Counter[str]:
    """Scatters by the operation that they are in: a work list is made by one or two.

    Every layer asks for the same lists, of which the compiler leaves one.
    """
    return collections.Counter(re.findall(r" scatter\(.*?op_name=\"[^\"]*/jit\((\w+)\)/", hlo))
