"""GPU kernels compile for every GPU that is served, take what they may, and move no pool.

Without the compiler these tests fail: they run only where someone asked for them. Where JAX cannot
run Mosaic's kernels there are no tests of them.
"""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from tests.aot.gpu_compile import Result, compile_all, faults
from tests.aot.gpu_cover import covering_entries
from tests.aot.gpu_shapes import HAS_MOSAIC
from tests.aot.shapes import Entry
from tests.aot.targets import GPU_TARGETS, compile_for, report

pytestmark = [pytest.mark.aot, pytest.mark.aot_gpu]


NUM_PROCESSES = 2

# The oldest JAX compiles for what came first and for what most have.
TARGETS = tuple(GPU_TARGETS) if HAS_MOSAIC else ("a100", "h100")
ENTRIES = [entry for entry in covering_entries() if entry.target in TARGETS]


@functools.cache
def _results() -> dict[Entry, Result]:
    """What the compiler made of all entries; run this file in one process (`-n 0`)."""

    def of(target: str) -> list[tuple[Entry, Result]]:
        return list(compile_all(target, [e for e in ENTRIES if e.target == target]))

    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        return dict(itertools.chain.from_iterable(pool.map(of, TARGETS)))


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_kernel_compiles_within_bounds_and_moves_no_pool(entry):
    assert faults(entry, _results()[entry]) == []


POOL = (2, 1031, 16, 64, 128)


def _slice_layer(pool, layer):
    return jnp.sum(jax.lax.optimization_barrier(pool[layer]).astype(jnp.float32))


def _transpose(pool, layer):
    return jax.lax.optimization_barrier(jnp.swapaxes(pool, 2, 3))[layer, 0]


def _update(pool, layer):
    return pool.at[layer, 3].set(jnp.ones((), pool.dtype))


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("target", "fn", "donate", "is_fault"),
    [
        (target, *case)
        for target in TARGETS
        for case in (
            (_slice_layer, (), True),
            (_transpose, (), True),
            (_update, (), True),
            (_update, (0,), False),
        )
    ],
)
def test_planted_copy_is_found(target, fn, donate, is_fault):
    args = (jax.ShapeDtypeStruct(POOL, jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32))
    found = report(compile_for(target, fn, args, donate), [POOL])
    assert bool(found.faults) == is_fault
