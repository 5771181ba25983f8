"""TPU kernels compile for every TPU that is served, and leave the pool where it is.

Without the compiler these tests fail: they run only where someone asked for them.
"""

import jax
import jax.numpy as jnp
import pytest

from tests.aot.cover import covering_entries
from tests.aot.programs import program
from tests.aot.targets import TARGETS, compile_for, report

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("optimized")]


@pytest.mark.parametrize("entry", covering_entries(), ids=str)
def test_kernel_compiles_and_moves_no_pool(entry):
    made = program(entry)
    compiled = compile_for(entry.target, made.fn, made.args, made.donate)
    found = report(compiled, [pool.shape for pool in made.pools])
    assert found.faults == ()
    assert found.alias_bytes >= made.donated_bytes
    assert found.temp_bytes < made.most_temp_bytes


POOL = (2, 1031, 16, 64, 128)


def _slice_layer(pool, layer):
    return jnp.sum(jax.lax.optimization_barrier(pool[layer]).astype(jnp.float32))


def _transpose(pool, layer):
    return jax.lax.optimization_barrier(jnp.swapaxes(pool, 2, 3))[layer, 0]


def _update(pool, layer):
    return pool.at[layer, 3].set(jnp.ones((), pool.dtype))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("fn", "donate", "is_fault"),
    [(_slice_layer, (), True), (_transpose, (), True), (_update, (), True), (_update, (0,), False)],
    ids=["layer sliced out", "pool transposed", "pool not donated", "update in place"],
)
def test_planted_copy_is_found(target, fn, donate, is_fault):
    args = (jax.ShapeDtypeStruct(POOL, jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32))
    found = report(compile_for(target, fn, args, donate), [POOL])
    assert bool(found.faults) == is_fault
