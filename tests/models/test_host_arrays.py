import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.models.host_arrays import aligned_empty, to_device


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (300, 1000)])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_aligned_arrays_are_taken_over(shape, dtype):
    array = aligned_empty(shape, np.dtype(dtype))
    assert (array.shape, array.dtype) == (shape, dtype)
    assert array.flags.writeable
    assert array.flags.c_contiguous
    array[...] = 1
    placed = to_device(array, dtype)
    assert (placed.shape, placed.dtype) == (shape, dtype)
    np.testing.assert_array_equal(placed, array)
    if jax.default_backend() == "cpu" and array.size > 1:
        assert placed.addressable_shards[0].data.unsafe_buffer_pointer() == array.ctypes.data


def test_others_are_copied_once_and_cast():
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    odd = aligned_empty((25,), np.dtype(np.float32))[1:].reshape(4, 6)
    odd[...] = values
    for array, dtype in ((values.T, np.float32), (odd, np.float32), (values, jnp.bfloat16)):
        placed = to_device(array, dtype)
        assert placed.dtype == dtype
        np.testing.assert_array_equal(placed, array.astype(dtype))
    odd[...] = 0
    np.testing.assert_array_equal(to_device(values, np.float32), values)
