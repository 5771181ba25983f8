"""What is read through block tables is what a contiguous cache would hold, token by token.

Every step is followed by the audit, by `gather`, and by attention over the pool; blocks that
nobody owns hold NaN, and so does the null block.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.core import CacheSpec, PagedCache
from paged_jax.ops import paged_decode
from tests.core.transitions import padded
from tests.kernels.cases import TOLERANCES

N, P, S, M = 9, 2, 4, 5
SPEC = CacheSpec(num_layers=2, num_kv_heads=2, head_dim=4)
LAYER, HEADS, SM_SCALE = 1, 4, 0.5
TOKENS = 20  # per step; padded with row S


@jax.jit
def append(cache: PagedCache, new_tokens, rows, positions, keys, values):
    blocks, allocation = core.allocate(cache.blocks, new_tokens)
    kv = core.copy_blocks(cache.kv, allocation.copy_src, allocation.copy_dst)
    kv = core.write(kv, LAYER, keys, values, core.slot_mapping(blocks, rows, positions))
    return PagedCache(blocks=blocks, kv=kv), allocation


@jax.jit
def move(cache: PagedCache, freed, parents, children, rows, sources, lengths):
    """Drops, forks, reindexes and shortens rows, and poisons what nobody owns then."""
    blocks = core.fork(core.free(cache.blocks, freed), parents, children)
    blocks = core.truncate(core.reindex(blocks, rows, sources), lengths)
    is_owned = (blocks.refcounts > 0)[None, :, None, None, None]
    kv = dataclasses.replace(cache.kv, kv=jnp.where(is_owned, cache.kv.kv, jnp.nan))
    return PagedCache(blocks=blocks, kv=kv)


@jax.jit
def read(cache: PagedCache, q):
    tables, lengths = cache.blocks.block_tables, cache.blocks.lengths
    dense = jax.vmap(core.gather, (None, None, 0, 0))(cache.kv, LAYER, tables, lengths)
    return dense, paged_decode(q, cache.kv, LAYER, tables, lengths, sm_scale=SM_SCALE)


class Requests:
    """A paged cache, and beside it a contiguous one: the keys and values of each row as a list."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        blocks = core.create_block_state(N, P, S, M)
        # Blocks are handed out in no order, so that neighbours in a row are none in the pool.
        stack = jnp.asarray(padded(rng.permutation(np.arange(1, N + 1)), N + 1, 0))
        kv = core.create_kv_cache(SPEC, N, P, "float32", "split")
        self.cache = PagedCache(
            blocks=dataclasses.replace(blocks, free_blocks=stack),
            kv=dataclasses.replace(kv, kv=jnp.full_like(kv.kv, jnp.nan)),
        )
        self.contiguous = [[] for _ in range(S)]  # per row, one [2, K, D] a token

    def append(self, counts: dict[int, int], fill=None):
        """Appends random tokens, or `fill(row, position)` in every element."""
        cache, allocation, tokens = self.try_append(counts, fill)
        assert allocation.ok
        for row, token in tokens:
            self.contiguous[row].append(token)
        self.cache = cache
        self.move()
        return allocation

    def try_append(self, counts: dict[int, int], fill=None):
        new_tokens = padded([counts.get(row, 0) for row in range(S)], S, 0)
        tokens = []
        for row, count in counts.items():
            for position in range(len(self.contiguous[row]), len(self.contiguous[row]) + count):
                token = self.rng.standard_normal((2, 2, 4), np.float32)
                if fill is not None:
                    token[:] = fill(row, position)
                tokens.append((row, position, token))
        tokens = tokens[:TOKENS]  # a call that must fail may ask for more
        rows = padded([row for row, _, _ in tokens], TOKENS, S)
        positions = padded([position for _, position, _ in tokens], TOKENS, 0)
        data = np.zeros((2, TOKENS, 2, 4), np.float32)
        for i, (_, _, token) in enumerate(tokens):
            data[:, i] = token
        cache, allocation = append(self.cache, new_tokens, rows, positions, *data)
        return cache, allocation, [(row, token) for row, _, token in tokens]

    def move(self, *, free=(), fork=(S, S), reindex=(), truncate=()):
        rows, sources = np.array([*reindex, *[(S, S)] * (S - len(reindex))], np.int32).T
        lengths = np.full(S, 1000, np.int32)
        for row, length in truncate:
            lengths[row] = length
            self.contiguous[row] = self.contiguous[row][:length]
        freed = np.isin(np.arange(S), free)
        parent, child = np.array(fork, np.int32)[:, None]
        self.cache = move(self.cache, freed, parent, child, rows, sources, lengths)
        for row in free:
            self.contiguous[row] = []
        if fork != (S, S):
            self.contiguous[fork[1]] = list(self.contiguous[fork[0]])
        before = list(self.contiguous)
        for row, source in reindex:
            self.contiguous[row] = list(before[source])
        self.check()

    def refuse(self, counts: dict[int, int], reason: int):
        """A call that finds no room changes neither the blocks nor what any of them holds."""
        before = jax.device_get(self.cache)
        cache, allocation, _ = self.try_append(counts)
        assert (bool(allocation.ok), int(allocation.reason)) == (False, reason)
        assert not allocation.copy_dst.any()
        jax.tree.map(np.testing.assert_array_equal, cache.blocks, before.blocks)
        np.testing.assert_array_equal(cache.kv.kv[:, 1:], before.kv.kv[:, 1:])
        self.cache = cache
        self.check()

    def check(self):
        blocks = jax.device_get(self.cache.blocks)
        core.audit(blocks)
        assert blocks.lengths.tolist() == [len(tokens) for tokens in self.contiguous]
        q = self.rng.standard_normal((S, HEADS, 4), np.float32)
        dense, out = jax.device_get(read(self.cache, q))
        expected = np.zeros((2, S, M * P, 2, 4), np.float32)
        attended = np.zeros(q.shape)
        for row, tokens in enumerate(self.contiguous):
            for position, token in enumerate(tokens):
                expected[:, row, position] = token
            attended[row] = attention(q[row], *expected[:, row, : len(tokens)])
        np.testing.assert_array_equal(dense, expected)
        np.testing.assert_allclose(out, attended, **TOLERANCES["float32"])

    def table(self, row: int) -> list[int]:
        return [block for block in self.cache.blocks.block_tables[row].tolist() if block]

    @property
    def num_free(self) -> int:
        return int(self.cache.blocks.num_free)


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One query [H, D] over contiguous keys and values [n, K, D]; heads 0, 1 read KV head 0."""
    out = np.zeros(q.shape)
    if not len(keys):
        return out
    for head in range(HEADS):
        logits = keys[:, head // 2].astype(float) @ q[head] * SM_SCALE
        weights = np.exp(logits - logits.max())
        out[head] = weights @ values[:, head // 2] / weights.sum()
    return out


def test_one_request_reads_the_same_as_a_contiguous_cache_at_every_length(rng):
    requests = Requests(rng)
    for length in range(1, 10):
        requests.append({0: 1})
        assert len(requests.table(0)) == (length + 1) // 2
        assert requests.num_free == N - (length + 1) // 2
    assert requests.table(0) != sorted(requests.table(0)), "the blocks lie in no order"
    requests.move(free=(0,))
    assert requests.num_free == N


def test_two_requests_that_grow_in_turn_keep_to_themselves(rng):
    requests = Requests(rng)

    def sentinel(row, position):
        return 100 * (row + 1) + position

    order = []
    for _ in range(4):
        for row, count in [(0, 1), (2, 2)]:
            requests.append({row: count}, sentinel)
            order += [block for block in requests.table(row) if block not in order]
    # 4 and 8 tokens: row 0 took a block at its tokens 0 and 2, row 2 at every turn.
    first, second = requests.table(0), requests.table(2)
    assert order == [first[0], second[0], second[1], first[1], second[2], second[3]]
    pool = np.asarray(requests.cache.kv.kv)[LAYER]  # [N+1, 2K, P, D]
    for row, table in [(0, first), (2, second)]:
        for logical, block in enumerate(table):
            for offset in range(P):
                assert (pool[block, :, offset] == sentinel(row, logical * P + offset)).all()
    requests.move(free=(0,))
    requests.move(free=(2,))
    assert requests.num_free == N


@pytest.mark.parametrize("writers", [(0, 1), (0,), (1,)])
def test_beams_share_until_one_writes_and_then_hold_their_own(writers, rng):
    requests = Requests(rng)
    requests.append({0: 3})
    requests.move(fork=(0, 1))
    shared = requests.table(0)
    assert requests.table(1) == shared, "both name the same blocks before the write"
    assert requests.num_free == N - 2, "and no block was taken for it"
    requests.append(dict.fromkeys(writers, 1))
    first, second = requests.table(0), requests.table(1)
    assert first[0] == second[0] == shared[0], "the full block is still shared"
    assert first[1] != second[1], "the block that was written into is not"
    assert shared[1] in (first[1], second[1])
    # Each step checked the contents of both; they stay apart when both write on.
    requests.append({0: 2, 1: 3})
    assert set(requests.table(0)) & set(requests.table(1)) == {shared[0]}
    requests.move(free=(0,))
    requests.move(free=(1,))
    assert requests.num_free == N


def test_row_that_found_no_block_goes_on_when_another_is_cancelled(rng):
    requests = Requests(rng)
    requests.append({0: 10, 1: 7})  # 5 and 4 blocks: none is left
    requests.append({1: 1})  # in place
    requests.refuse({1: 1}, core.REASON_OUT_OF_BLOCKS)
    requests.move(free=(0,))
    requests.append({1: 1})
    requests.append({3: 6})
    assert requests.num_free == 1


# Growth, sharing, divergence and shrinking; after the sixth step no block is free.
SCRIPT = [
    lambda requests: requests.append({0: 5}),
    lambda requests: requests.append({0: 1, 1: 3}),
    lambda requests: requests.move(fork=(1, 2)),
    lambda requests: requests.append({0: 1, 1: 1, 2: 2}),
    lambda requests: requests.move(reindex=((1, 2), (2, 1))),
    lambda requests: requests.append({1: 1, 2: 1}),
    lambda requests: requests.move(truncate=((0, 3),)),
    lambda requests: requests.move(fork=(0, 3)),
    lambda requests: requests.append({0: 1, 3: 1}),
    lambda requests: requests.move(free=(1,), reindex=((2, 0),)),
    lambda requests: requests.append({0: 1, 2: 2, 3: 3}),
    lambda requests: requests.move(free=(0,)),
    lambda requests: requests.move(free=(1, 2, 3)),
]


def exhaust(requests):
    """Every row asks for all that its table can hold."""
    counts = {row: M * P - len(tokens) for row, tokens in enumerate(requests.contiguous)}
    requests.refuse(counts, core.REASON_OUT_OF_BLOCKS)


def overrun(requests):
    """One row asks for more than its table can hold, and another for a token that would fit."""
    requests.refuse({1: 1, 2: M * P + 1}, core.REASON_ROW_TOO_LONG)


def cancel(row):
    def injected(requests):
        requests.move(free=(row,))

    return injected


INJECTED = {
    "exhaustion": exhaust,
    "failure": overrun,
    **{f"cancellation of row {row}": cancel(row) for row in range(S)},
}


@pytest.mark.parametrize("name", INJECTED)
def test_history_survives_what_is_injected_at_any_point(name):
    for point in range(len(SCRIPT) + 1):
        requests = Requests(np.random.default_rng(point))
        for i, step in enumerate(SCRIPT):
            if i == point:
                INJECTED[name](requests)
            # A cancelled row starts anew with the tokens that the script still gives it.
            step(requests)
        if point == len(SCRIPT):
            INJECTED[name](requests)
        assert requests.num_free == N
        assert not np.asarray(requests.cache.blocks.refcounts).any()
