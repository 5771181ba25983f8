"""A whole engine step of Llama 3 8B compiles for TPU: kernels in place, pool untouched.

Nothing is allocated. Two of the 32 layers are compiled; all 32 were by hand, in one minute for
decode and in three with prefill, with the same outcome.
"""

import collections
import re
from dataclasses import dataclass

import jax
import pytest

from tests.aot.step import NUM_ROWS, llama_step
from tests.aot.targets import Report, compile_for, report

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.usefixtures("optimized")]

NUM_LAYERS = 2  # enough to see what is made per layer and what once; 32 take three minutes


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A step's HLO and what it says about the pool."""

    hlo: str
    report: Report
    pool: jax.ShapeDtypeStruct


def compile_step(num_tokens: int, block_size: int, num_layers: int = NUM_LAYERS) -> Compiled:
    """Compiles the step of T tokens and R rows for v6e; T = R is a decode step."""
    made = llama_step(num_tokens, block_size, num_layers)
    (pool,) = made.pools
    compiled = compile_for("v6e", made.fn, made.args, made.donate)
    hlo = compiled.as_text()
    assert hlo is not None
    return Compiled(hlo=hlo, report=report(compiled, [pool.shape]), pool=pool)


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
