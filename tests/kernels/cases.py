"""The one table of attention cases, the arrays of a case, and what must come out.

Block ids are shuffled. Whatever no query may read holds poison: the null block, free blocks, slots
past the length of a row, every other layer, and the blocks that table entries past the length name.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.core import KVCache
from pallas_kernels.reference import attention_reference

LAYERS, LAYER = 2, 1
PADDING_TOKENS = 3
SM_SCALE = 0.3

TOLERANCES = {
    # Sums of up to 300 products in another order than the oracle's: tens of units of 2^-24.
    "float32": {"rtol": 1e-5, "atol": 1e-5},
    # The output is rounded to 8 bits of mantissa (2^-9), and a kernel may round probabilities so.
    "bfloat16": {"rtol": 8e-3, "atol": 8e-3},
    # The same with 11 bits of mantissa (2^-12), where no exponent is too large.
    "float16": {"rtol": 1e-3, "atol": 1e-3},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes and lengths; the rows of `query_lens` are the last positions of `context_lens`."""

    name: str
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    table_width: int
    dtype: str = "float32"
    """Of queries, and of the pool unless `kv_dtype` says otherwise."""
    kv_dtype: str | None = None
    layout: str = "split"
    is_for_tpu: bool = False
    """Rows of a split pool are padded to whole registers, scales to 2, 4 or a multiple of 8."""
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    def with_lens(self, context_lens: tuple[int, ...], query_lens: tuple[int, ...]) -> "Case":
        """Other lengths in the same shapes: nothing compiles again if the tokens are as many."""
        return dataclasses.replace(self, context_lens=context_lens, query_lens=query_lens)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arrays of a case. Queries of rows without tokens and of padding are NaN."""

    decode_q: np.ndarray  # [R, H, D]
    prefill_q: np.ndarray  # [T + PADDING_TOKENS, H, D]
    cache: KVCache
    sinks: np.ndarray | None  # f32[H]
    split_kv: np.ndarray  # [L, N+1, 2K, P, C], what the pool holds: row 2h keys, 2h+1 values of h
    scales: np.ndarray | None  # f32[L, N+1, 2K, P] of an 8-bit pool
    block_tables: np.ndarray  # i32[R, M]
    context_lens: np.ndarray  # i32[R]
    query_starts: np.ndarray  # i32[R+1]


BASE = Case(
    name="block4_group2",
    block_size=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context_lens=(1, 3, 4, 5, 13),
    query_lens=(1, 2, 4, 1, 6),
    table_width=6,
)

CASES = (
    BASE,
    Case(
        name="block1_group1",
        block_size=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        context_lens=(1, 2, 9, 3),
        query_lens=(1, 2, 4, 1),
        table_width=10,
    ),
    Case(
        name="block2_group3_d40",
        block_size=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=40,
        context_lens=(3, 1, 2, 17),
        query_lens=(2, 1, 2, 6),
        table_width=9,
    ),
    # 20 blocks a row, where the chunks of the CPU path hold 8: three chunks, the last one partial.
    Case(
        name="block16_group7_d64_long",
        block_size=16,
        num_heads=7,
        num_kv_heads=1,
        head_dim=64,
        context_lens=(15, 300, 16, 17, 1),
        query_lens=(15, 20, 3, 2, 1),
        table_width=20,
    ),
    Case(
        name="block16_group8_d64_bf16",
        block_size=16,
        num_heads=8,
        num_kv_heads=1,
        head_dim=64,
        context_lens=(17, 140, 15, 1, 16),
        query_lens=(2, 10, 15, 1, 9),
        table_width=9,
        dtype="bfloat16",
    ),
    # Prefill tiles of 64 queries: 70 and 66 take two, with a row of no tokens between them. Context
    # lengths stand at a chunk of 128 tokens and one to each side.
    Case(
        name="block4_group4_tiles",
        block_size=4,
        num_heads=4,
        num_kv_heads=1,
        head_dim=8,
        context_lens=(127, 150, 0, 129, 128),
        query_lens=(2, 70, 0, 66, 64),
        table_width=39,
    ),
    # Two heads a row, of which the last has one; a length of more than one chunk of 128 tokens.
    Case(
        name="packed_block16_group2_d64",
        layout="packed",
        block_size=16,
        num_heads=6,
        num_kv_heads=3,
        head_dim=64,
        context_lens=(15, 130, 16, 17, 1),
        query_lens=(15, 9, 3, 2, 1),
        table_width=9,
    ),
    # Four heads a row, of which the last has one.
    Case(
        name="packed_block4_group1_d32_bf16",
        layout="packed",
        block_size=4,
        num_heads=5,
        num_kv_heads=5,
        head_dim=32,
        context_lens=(3, 4, 0, 5, 21),
        query_lens=(3, 1, 0, 2, 6),
        table_width=6,
        dtype="bfloat16",
    ),
    # A window smaller than a chunk, and rows shorter and longer than it.
    Case(
        name="window4_block4_group3",
        block_size=4,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        context_lens=(1, 3, 4, 5, 13, 140),
        query_lens=(1, 3, 2, 5, 9, 6),
        table_width=36,
        sliding_window=4,
    ),
    # A window that starts in the second chunk; a cap low enough to matter.
    Case(
        name="window100_cap_block16_group24_d80",
        block_size=16,
        num_heads=24,
        num_kv_heads=1,
        head_dim=80,
        context_lens=(300, 99, 100, 101, 1),
        query_lens=(70, 3, 1, 2, 1),
        table_width=19,
        sliding_window=100,
        soft_cap=2.0,
    ),
    Case(
        name="sinks_block8_group4_d96",
        block_size=8,
        num_heads=8,
        num_kv_heads=2,
        head_dim=96,
        context_lens=(7, 8, 0, 9, 30),
        query_lens=(7, 1, 0, 4, 6),
        table_width=5,
        has_sinks=True,
    ),
    Case(
        name="sinks_window_cap_bf16_packed_d64",
        layout="packed",
        block_size=16,
        num_heads=8,
        num_kv_heads=1,
        head_dim=64,
        context_lens=(17, 40, 15, 1, 16),
        query_lens=(2, 10, 15, 1, 9),
        table_width=3,
        dtype="bfloat16",
        sliding_window=9,
        soft_cap=5.0,
        has_sinks=True,
    ),
    Case(
        name="int8_block16_group2_d128",
        block_size=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        context_lens=(15, 140, 16, 17, 1),
        query_lens=(15, 9, 3, 2, 1),
        table_width=9,
        kv_dtype="int8",
    ),
    Case(
        name="fp8_e4m3_window_packed_d64",
        layout="packed",
        block_size=4,
        num_heads=6,
        num_kv_heads=3,
        head_dim=64,
        context_lens=(3, 4, 0, 5, 21),
        query_lens=(3, 1, 0, 2, 6),
        table_width=6,
        kv_dtype="float8_e4m3fn",
        sliding_window=5,
    ),
    Case(
        name="fp8_e5m2_cap_sinks_block1_group1_d256",
        block_size=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=256,
        context_lens=(1, 2, 9, 3),
        query_lens=(1, 2, 4, 1),
        table_width=10,
        kv_dtype="float8_e5m2",
        soft_cap=3.0,
        has_sinks=True,
    ),
)


def build(case: Case, poison: float = np.nan, seed: int = 0) -> Inputs:
    """Random arrays of a case; the same seed gives the same live values under any poison."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)
    kv_dtype = jnp.dtype(case.kv_dtype or case.dtype)
    rows, size = len(case.context_lens), case.block_size
    num_blocks = rows * case.table_width
    # Every table entry has its own block, so those past the length name poisoned ones.
    tables = 1 + rng.permutation(num_blocks).reshape(rows, case.table_width)
    heads_per_row = 128 // case.head_dim if case.layout == "packed" else 1
    # Heads and lanes that fill up a row are zero where a token was written.
    kv_rows, missing = 2 * case.num_kv_heads, 2 * (-case.num_kv_heads % heads_per_row)
    lanes = -case.head_dim % 128 if case.is_for_tpu and case.layout == "split" else 0
    kv = np.full((LAYERS, num_blocks + 1, kv_rows + missing, size, case.head_dim + lanes), poison)
    for row, length in enumerate(case.context_lens):
        live = rng.standard_normal((case.table_width * size, kv_rows, case.head_dim))
        live = np.pad(live, [(0, 0), (0, missing), (0, lanes)])
        for t in range(length):
            kv[LAYER, tables[row, t // size], :, t % size] = live[t]
    scales = None
    if kv_dtype.itemsize == 1:
        scales = np.full((LAYERS, num_blocks + 1, kv_rows, size), poison, np.float32)
        for row, length in enumerate(case.context_lens):
            factors = rng.uniform(0.01, 0.03, (case.table_width * size, kv_rows))
            for t in range(length):
                scales[LAYER, tables[row, t // size], :, t % size] = factors[t]
        # Numbers of the whole range; int8 has no poison but garbage.
        largest = 127 if kv_dtype == jnp.int8 else 100.0
        kv = np.clip(kv * (largest / 3), -largest, largest)
        kv = np.where(np.isnan(kv), largest, kv) if kv_dtype == jnp.int8 else kv
    kv = kv.astype(kv_dtype)
    tokens = sum(case.query_lens)
    width = (case.num_heads, case.head_dim)
    prefill_q = rng.standard_normal((tokens + PADDING_TOKENS, *width))
    prefill_q[tokens:] = np.nan
    decode_q = rng.standard_normal((rows, *width))
    decode_q[np.array(case.context_lens) == 0] = np.nan
    return Inputs(
        decode_q=decode_q.astype(dtype),
        prefill_q=prefill_q.astype(dtype),
        sinks=rng.standard_normal(case.num_heads, np.float32) if case.has_sinks else None,
        split_kv=kv[:, :, :kv_rows],
        scales=scales,
        cache=KVCache(
            kv=jnp.asarray(side_by_side(kv, heads_per_row)),
            scales=pool_scales(scales, case, poison),
            layout=case.layout,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
        ),
        block_tables=tables.astype(np.int32),
        context_lens=np.array(case.context_lens, np.int32),
        query_starts=np.array([0, *np.cumsum(case.query_lens)], np.int32),
    )


def pool_scales(scales: np.ndarray | None, case: Case, poison: float) -> jax.Array:
    """The scales as a pool has them; no one reads the rows that are added."""
    if scales is None:
        return jnp.zeros(0, jnp.float32)
    rows = scales.shape[2]
    added = -rows % 8 if case.is_for_tpu and rows > 4 else 0
    padding = [(0, 0), (0, 0), (0, added), (0, 0)]
    return jnp.asarray(np.pad(scales, padding, constant_values=poison))


def side_by_side(kv: np.ndarray, heads_per_row: int) -> np.ndarray:
    """[L, N+1, 2K, P, D] with the keys, and then the values, of several heads in one row."""
    layers, blocks, kv_rows, size, width = kv.shape
    rows = kv.reshape(layers, blocks, -1, heads_per_row, 2, size, width)
    rows = rows.transpose(0, 1, 2, 4, 5, 3, 6)  # [L, N+1, row, half, P, lane, D]
    return rows.reshape(layers, blocks, kv_rows // heads_per_row, size, heads_per_row * width)


def expected_decode(inputs: Inputs, case: Case = BASE) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [R, H, D] and log-sum-exp [R, H] of the oracle."""
    has_token = inputs.context_lens > 0
    starts = np.array([0, *np.cumsum(has_token)])
    out = np.zeros(inputs.decode_q.shape, np.float32)
    lse = np.full(out.shape[:2], -np.inf, np.float32)
    if inputs.sinks is not None:
        lse[:] = inputs.sinks  # a row without tokens still sees the sink
    out[has_token], lse[has_token] = reference(inputs.decode_q[has_token], inputs, starts, case)
    return out, lse


def expected_prefill(inputs: Inputs, case: Case = BASE) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [T + PADDING_TOKENS, H, D] and log-sum-exp of the oracle."""
    return reference(inputs.prefill_q, inputs, inputs.query_starts, case)


def reference(
    q: np.ndarray, inputs: Inputs, query_starts: np.ndarray, case: Case
) -> tuple[np.ndarray, np.ndarray]:
    out, lse = attention_reference(
        jnp.asarray(q),
        jnp.asarray(inputs.split_kv),
        LAYER,
        inputs.block_tables,
        inputs.context_lens,
        query_starts,
        SM_SCALE,
        scales=None if inputs.scales is None else jnp.asarray(inputs.scales),
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        sinks=inputs.sinks,
    )
    return np.asarray(out), np.asarray(lse)


def assert_close(out: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(
        out.astype(np.float32), expected, **TOLERANCES[out.dtype.name], strict=True
    )
