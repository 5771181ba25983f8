"""GPU attention compiled for and run on the GPU that is here, through `paged_jax.ops`.

What other files interpret on CPU. One process at a time has the device's memory:

    python -m pytest -n 0 -m gpu tests/kernels/test_gpu_device.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import ops
from pallas_kernels import compat
from pallas_kernels.gpu import device
from tests.kernels.cases import (
    CASES,
    LAYER,
    SM_SCALE,
    TOLERANCES,
    Case,
    build,
    expected_decode,
    expected_prefill,
)
from tests.kernels.triton_cases import TABLE

if jax.default_backend() != "gpu":
    # Not a mark on each of hundreds of tests.
    pytest.skip(
        f"needs an NVIDIA GPU, and JAX found {jax.default_backend()}", allow_module_level=True
    )

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

BACKENDS = (None, "pallas_triton", "mosaic_gpu")
HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def optimized():
    """The programs that are served; tests/conftest.py turns this on for all other tests."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def run(op: str, backend: str | None, case: Case) -> None:
    """Compares outputs and log-sum-exp of one case with the oracle's."""
    capability = device.capability()
    if backend == "mosaic_gpu" and capability is not None and capability < HOPPER:
        pytest.skip("Mosaic GPU kernels need Hopper; the compiler would end the process")
    inputs = build(case)
    program = functools.partial(
        getattr(ops, op),
        sm_scale=SM_SCALE,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        return_lse=True,
        backend=backend,
    )
    arrays = (inputs.cache, jnp.int32(LAYER), inputs.block_tables, inputs.context_lens)
    if op == "paged_decode":
        arrays, expected = (inputs.decode_q, *arrays), expected_decode
    else:
        arrays = (inputs.prefill_q, *arrays, inputs.query_starts)
        expected = expected_prefill
    try:
        out, lse = jax.jit(program)(*arrays, sinks=inputs.sinks)
    except NotImplementedError as error:
        if backend is None:  # which chooses what serves
            raise
        pytest.skip(f"refused: {error}")
    # Float16 beside an 8-bit pool: a kernel multiplies values in bfloat16.
    is_rounded = case.dtype == "float16" and case.kv_dtype is not None
    out_tolerance = TOLERANCES["bfloat16" if is_rounded else case.dtype]
    want_out, want_lse = expected(inputs, case)
    np.testing.assert_allclose(np.asarray(out, np.float32), want_out, **out_tolerance, strict=True)
    np.testing.assert_allclose(np.asarray(lse), want_lse, **TOLERANCES["float32"], strict=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_the_table_of_cases_on_the_device(backend, op, case):
    run(op, backend, case)


@pytest.mark.parametrize("entry", TABLE.entries, ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_every_two_options_meet_on_the_device(backend, entry):
    run(f"paged_{entry.kernel}", backend, entry.case)


@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
def test_none_means_triton(op):
    case = next(case for case in CASES if case.name == "int8_block16_group2_d128")
    inputs = build(case)
    arrays = (inputs.cache, jnp.int32(LAYER), inputs.block_tables, inputs.context_lens)
    if op == "paged_decode":
        arrays = inputs.decode_q, *arrays
    else:
        arrays = inputs.prefill_q, *arrays, inputs.query_starts
    program = functools.partial(getattr(ops, op), sm_scale=SM_SCALE)
    counts = [
        _triton_calls(jax.jit(functools.partial(program, backend=backend)), arrays)
        for backend in (None, "pallas_triton")
    ]
    assert counts[0] == counts[1] > 0


def _triton_calls(program, arrays) -> int:
    return program.lower(*arrays).compile().as_text().count(compat.TRITON_CUSTOM_CALL)


def test_blocks_are_copied_on_the_device():
    inputs = build(CASES[0])
    src, dst = jnp.array([3, 5, 0], jnp.int32), jnp.array([7, 9, 0], jnp.int32)
    copied = {
        backend: jax.jit(functools.partial(ops.copy_kv, backend=backend))(inputs.cache, src, dst).kv
        for backend in ("xla", None)
    }
    np.testing.assert_array_equal(np.asarray(copied["xla"]), np.asarray(copied[None]))
