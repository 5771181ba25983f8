"""What `compat` bridges works under the installed JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat


def run(body, x, interpret):
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(),
    )(x)


def test_reciprocal_divides_inside_a_kernel():
    def body(x_ref, out_ref):
        out_ref[...] = compat.reciprocal(x_ref[...])

    x = jnp.arange(1, 1025, dtype=jnp.float32).reshape(8, 128)
    got = run(body, x, compat.tpu_interpret_params())
    np.testing.assert_allclose(got, 1 / np.asarray(x), rtol=1e-6)


def test_interpret_mode_shows_memory_that_was_not_written():
    def body(x_ref, out_ref):
        out_ref[:4] = x_ref[:4]

    got = run(body, jnp.ones((8, 128)), compat.tpu_interpret_params())
    assert np.all(np.asarray(got[:4]) == 1)
    assert np.all(np.isnan(got[4:]))


def test_interpret_mode_raises_on_reads_out_of_bounds():
    def body(x_ref, out_ref):
        row = 8 + pl.program_id(0)
        out_ref[...] = jnp.broadcast_to(x_ref[pl.ds(row, 1)], out_ref.shape)

    call = pl.pallas_call(
        body,
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        interpret=compat.tpu_interpret_params(),
    )
    with pytest.raises(Exception, match=r"(?i)out[- ]of[- ]bounds"):
        jax.block_until_ready(call(jnp.ones((8, 128))))
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_the_triton_call_target_is_the_one_that_lowering_writes():
    from jax.experimental.pallas import triton as plt
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

    def double(x):
        def body(x_ref, out_ref):
            out_ref[...] = x_ref[...] * 2

        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        )(x)

    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    with use_abstract_mesh(mesh):
        text = jax.jit(double).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert compat.TRITON_CUSTOM_CALL in text
