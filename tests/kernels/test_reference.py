"""The oracle itself: three cases worked by hand, then dense softmax in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.reference import attention_reference


def pool(num_blocks: int, kv_rows: int, block_size: int, width: int) -> np.ndarray:
    """One layer of NaN, the null block included."""
    return np.full((1, num_blocks + 1, kv_rows, block_size, width), np.nan, np.float32)


def reference_with_lse(q, kv, tables, context_lens, query_starts, sm_scale=1.0, **options):
    out, lse = attention_reference(
        jnp.asarray(q, jnp.float32),
        jnp.asarray(kv),
        0,
        np.array(tables, np.int32),
        np.array(context_lens, np.int32),
        np.array(query_starts, np.int32),
        sm_scale,
        **options,
    )
    return np.asarray(out), np.asarray(lse)


def reference(*args, **options):
    return reference_with_lse(*args, **options)[0]


def test_one_query_over_two_blocks_by_hand():
    # Table [2, 1], block size 2, 3 tokens: position 0 is (2, 0), 1 is (2, 1), 2 is (1, 0).
    kv = pool(2, 2, 2, 1)
    kv[0, 2, 0, 0], kv[0, 2, 0, 1], kv[0, 1, 0, 0] = 0.0, np.log(2.0), np.log(5.0)  # keys
    kv[0, 2, 1, 0], kv[0, 2, 1, 1], kv[0, 1, 1, 0] = 8.0, 16.0, 32.0  # values
    # q = 1, so the weights are 1, 2 and 5 of 8: (8 + 32 + 160) / 8 = 25.
    out = reference([[[1.0]]], kv, [[2, 1]], [3], [0, 1])
    np.testing.assert_allclose(out, [[[25.0]]], rtol=1e-6)
    # Twice the scale squares the weights, 1, 4 and 25 of 30: (8 + 64 + 800) / 30 = 29.0666...
    out = reference([[[1.0]]], kv, [[2, 1]], [3], [0, 1], sm_scale=2.0)
    np.testing.assert_allclose(out, [[[872 / 30]]], rtol=1e-6)


def test_chunk_is_causal_by_hand():
    # Block size 1, table [3, 1, 2]; the last 2 of 3 tokens are queries. Keys are 0: plain means.
    kv = pool(3, 2, 1, 1)
    kv[0, 3, :, 0, 0], kv[0, 1, :, 0, 0], kv[0, 2, :, 0, 0] = (0, 3), (0, 5), (0, 10)
    out = reference([[[1.0]], [[1.0]], [[9.0]]], kv, [[3, 1, 2]], [3], [0, 2])
    # Position 1 sees 3 and 5: 4. Position 2 sees 3, 5 and 10: 6. The third token is padding: 0.
    np.testing.assert_allclose(out[:, 0, 0], [4.0, 6.0, 0.0], rtol=1e-6)


def test_heads_share_their_group_by_hand():
    # H = 4 query heads on K = 2 heads: 0, 1 read pair (0, 1), 2, 3 read pair (2, 3) of the pool.
    # One row of two tokens in block 1, and a row of none before it.
    kv = pool(1, 4, 2, 2)
    kv[0, 1, 0] = [[0, 0], [1, 0]]  # keys of head 0
    kv[0, 1, 1] = [[4, 0], [0, 8]]  # values of head 0
    kv[0, 1, 2] = [[0, 0], [0, 1]]  # keys of head 1
    kv[0, 1, 3] = [[1, 1], [5, 9]]  # values of head 1
    ln3 = np.log(3.0)
    q = [[[0, 0], [ln3, 0], [0, ln3], [ln3, 0]]]
    out = reference(q, kv, [[0], [1]], [0, 2], [0, 0, 1])
    # Head 0: weights 1/2, 1/2. Head 1: the second key gives ln 3, weights 1/4, 3/4.
    # Head 2: weights 1/4, 3/4 over head 1's values. Head 3: its key row has 0 there, so 1/2, 1/2.
    np.testing.assert_allclose(out, [[[2, 4], [1, 6], [4, 7], [3, 5]]], rtol=1e-6)


def test_options_by_hand():
    # Three tokens of keys 0, ln 2, ln 5 and values 8, 16, 32, as above; q = 1.
    kv = pool(3, 2, 1, 1)
    kv[0, 1:, 0, 0, 0], kv[0, 1:, 1, 0, 0] = np.log([1.0, 2.0, 5.0]), (8.0, 16.0, 32.0)
    query = [[[1.0]]], kv, [[1, 2, 3]], [3], [0, 1]
    out, lse = reference_with_lse(*query)
    np.testing.assert_allclose([out.item(), lse.item()], [25.0, np.log(8.0)], rtol=1e-6)
    # A window of 2 sees the last two: (32 + 160) / 7.
    out, lse = reference_with_lse(*query, sliding_window=2)
    np.testing.assert_allclose([out.item(), lse.item()], [192 / 7, np.log(7.0)], rtol=1e-6)
    # A sink of ln 2 takes 2 of 10 with a value of zero.
    out, lse = reference_with_lse(*query, sinks=np.log([2.0]))
    np.testing.assert_allclose([out.item(), lse.item()], [20.0, np.log(10.0)], rtol=1e-6)
    # A cap far below the logits makes two of them equal to it: 1, e^c, e^c.
    weights = np.exp(0.01 * np.tanh(np.log([1.0, 2.0, 5.0]) / 0.01))
    out = reference(*query, soft_cap=0.01)
    np.testing.assert_allclose(out.item(), weights @ [8, 16, 32] / weights.sum(), rtol=1e-6)
    # Keys and values halved in the pool, and scales of two.
    halves = pool(3, 2, 1, 1)
    halves[0, 1:] = kv[0, 1:] / 2
    scales = jnp.full((1, 4, 2, 1), 2.0)
    out = reference([[[1.0]]], halves, [[1, 2, 3]], [3], [0, 1], scales=scales)
    np.testing.assert_allclose(out.item(), 25.0, rtol=1e-6)


@pytest.mark.parametrize(("block_size", "lanes"), [(1, 0), (3, 0), (4, 5)])
def test_equals_dense_causal_softmax(block_size, lanes, rng):
    """Lengths 7 and 4 with 3 and 4 queries; the pool may be wider than D."""
    heads, kv_heads, width = 6, 2, 5
    lengths, counts = [7, 4], [3, 4]
    dense = rng.standard_normal((2, 7, 2 * kv_heads, width)).astype(np.float32)
    blocks = -(-7 // block_size)
    tables = 1 + rng.permutation(2 * blocks).reshape(2, blocks)
    kv = pool(2 * blocks, 2 * kv_heads, block_size, width + lanes)
    for row, length in enumerate(lengths):
        for t in range(length):
            kv[0, tables[row, t // block_size], :, t % block_size, :width] = dense[row, t]
    q = rng.standard_normal((7, heads, width)).astype(np.float32)
    out = reference(q, kv, tables, lengths, [0, 3, 7], sm_scale=0.7)

    for row, (length, count, start) in enumerate(zip(lengths, counts, [0, 3], strict=True)):
        keys = np.repeat(dense[row, :length, 0::2], heads // kv_heads, axis=1)
        values = np.repeat(dense[row, :length, 1::2], heads // kv_heads, axis=1)
        logits = 0.7 * np.einsum("qhd,khd->hqk", q[start : start + count], keys)
        is_later = np.arange(length)[None, :] > np.arange(length - count, length)[:, None]
        weights = np.where(is_later, 0.0, np.exp(logits))
        weights /= weights.sum(axis=-1, keepdims=True)
        expected = np.einsum("hqk,khd->qhd", weights, values)
        np.testing.assert_allclose(out[start : start + count], expected, rtol=1e-5, atol=1e-6)
