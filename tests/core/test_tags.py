"""Shadow tags: what each slot must hold, and what is said when it holds something else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core
from paged_jax.core import AuditError, CacheSpec
from paged_jax.ledger import Ledger
from tests.core.transitions import padded, state_of

N, P, S, M = 8, 4, 3, 3
TOKENS = 12  # per write; padded with slot 0

write_tags = jax.jit(core.write_tags)
copy_blocks = jax.jit(core.copy_blocks)


def tag_of(owner: int, position: int) -> int:
    """The hash in Python's integers."""
    mixed = owner * 2654435761 ^ (position * 2246822519 + 1)
    mixed &= 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 16) | 1
    return mixed - 2**32 if mixed >= 2**31 else mixed


class TaggedPool:
    """Rows that grow beside a ledger; everything a test breaks is a public field.

    Each row writes under the number of `owners`. `expected` holds the tags that it must read.
    """

    def __init__(self):
        self.ledger = Ledger(N, P, S, M)
        spec = CacheSpec(num_layers=1, num_kv_heads=1, head_dim=1)
        self.kv = core.with_tags(core.create_kv_cache(spec, N, P, "float32"))
        self.owners = [10, 11, 12]
        self.expected = [[], [], []]

    def append(self, copies: bool = True, shift: int = 0, **counts: int) -> None:
        """Rows r0, r1, ... take tokens; `shift` moves the last slot that is written."""
        new_tokens = {int(row[1:]): count for row, count in counts.items()}
        starts = list(self.ledger.lengths)
        allocation = self.ledger.allocate(new_tokens)
        assert allocation.ok
        if copies:
            source, target = zip(*allocation.copies.values(), (0, 0), strict=True)
            self.kv = copy_blocks(self.kv, padded(source, S, 0), padded(target, S, 0))
        slots, tags = [], []
        for row, count in new_tokens.items():
            for position in range(starts[row], starts[row] + count):
                block = self.ledger.tables[row][position // P]
                slots.append(block * P + position % P)
                tags.append(tag_of(self.owners[row], position))
                self.expected[row].append(tags[-1])
        slots[-1] += shift
        self.kv = write_tags(self.kv, padded(slots, TOKENS, 0), padded(tags, TOKENS, 7))

    def fork(self, parent: int, child: int) -> None:
        self.ledger.fork(parent, child)
        self.expected[child] = list(self.expected[parent])

    def free(self, row: int) -> None:
        self.ledger.free([row])
        self.expected[row] = []

    def check(self) -> None:
        core.check_tags(self.kv, state_of(self.ledger), self.expected)


def assert_found(pool: TaggedPool, message: str) -> None:
    with pytest.raises(AuditError) as error:
        pool.check()
    assert str(error.value) == message


def test_tags_are_the_hash_worked_in_integers():
    owners = np.array([0, 0, 1, 7, 63, 2**20, 2**31 - 1], np.int32)
    positions = np.array([0, 1, 0, 511, 2, 131071, 2**31 - 1], np.int32)
    expected = [tag_of(int(o), int(p)) for o, p in zip(owners, positions, strict=True)]
    tags = core.make_tags(owners, positions)
    assert tags.dtype == jnp.int32
    assert tags.tolist() == expected
    assert core.expected_tags(7, positions) == [tag_of(7, int(p)) for p in positions]


def test_no_two_of_many_tokens_have_the_same_tag_and_none_is_0():
    owners, positions = np.divmod(np.arange(64 * 512, dtype=np.int32), 512)
    tags = np.asarray(core.make_tags(owners, positions))
    assert np.unique(tags).size == tags.size
    assert (tags != 0).all()


def test_a_new_pool_has_only_tags_of_nobody():
    pool = TaggedPool()
    assert (pool.kv.tags.shape, pool.kv.tags.dtype) == ((N + 1, P), jnp.int32)
    assert not pool.kv.tags.any()
    pool.check()


def test_tags_are_written_into_their_slots_and_padding_into_the_null_block():
    pool = TaggedPool()
    pool.append(r0=2, r1=5)  # tables [1] and [2, 3]
    expected = np.zeros((N + 1, P), np.int32)
    expected[0, 0] = 7
    expected[1, :2] = [tag_of(10, 0), tag_of(10, 1)]
    expected[2] = [tag_of(11, position) for position in range(4)]
    expected[3, 0] = tag_of(11, 4)
    np.testing.assert_array_equal(pool.kv.tags, expected)


def test_nothing_is_found_where_nothing_is_wrong():
    pool = TaggedPool()
    pool.append(r0=6)
    pool.fork(0, 1)
    pool.check()
    pool.append(r0=1, r1=3, r2=5)
    pool.check()
    pool.free(0)
    pool.append(r0=4, r2=2)  # in blocks that others wrote before
    pool.check()


def test_a_block_handed_out_while_a_row_holds_it_is_found():
    pool = TaggedPool()
    pool.append(r0=6)
    pool.ledger.free_blocks.append(1)
    pool.append(r1=3)
    assert pool.ledger.tables[:2] == [[1, 2], [1]]
    assert_found(
        pool,
        "row 0 reads position 0 from block 1, offset 0, and finds position 0 of row 1 there "
        "(3 of 6 positions are wrong)",
    )


def test_a_copy_that_was_skipped_is_found():
    pool = TaggedPool()
    pool.append(r0=6)
    pool.fork(0, 1)
    pool.append(r0=1, r1=1, copies=False)
    assert pool.ledger.tables[:2] == [[1, 2], [1, 3]]
    assert_found(
        pool,
        "row 1 reads position 4 from block 3, offset 0, and finds a slot that nobody has written "
        "there (2 of 7 positions are wrong)",
    )


def test_a_write_into_a_block_that_is_shared_is_found():
    pool = TaggedPool()
    pool.append(r0=6)
    pool.fork(0, 1)
    pool.append(r0=1)
    assert pool.ledger.tables[:2] == [[1, 3], [1, 2]]
    pool.ledger.tables[0][1] = 2  # as if it had not left its block
    pool.append(r0=1, r1=2)
    assert_found(
        pool,
        "row 0 reads position 6 from block 2, offset 2, and finds position 6 of row 1 there "
        "(2 of 8 positions are wrong)",
    )


def test_table_entries_in_the_wrong_order_are_found():
    pool = TaggedPool()
    pool.append(r0=2, r1=8)
    pool.ledger.tables[1].reverse()
    assert_found(
        pool,
        "row 1 reads position 0 from block 3, offset 0, and finds position 4 of row 1 there "
        "(8 of 8 positions are wrong)",
    )


def test_a_slot_off_by_one_is_found():
    pool = TaggedPool()
    pool.append(r0=6, shift=1)
    assert_found(
        pool,
        "row 0 reads position 5 from block 2, offset 1, and finds a slot that nobody has written "
        "there (1 of 6 positions are wrong)",
    )


def test_what_a_row_left_behind_belongs_to_no_row():
    pool = TaggedPool()
    pool.append(r0=4, r1=4)
    pool.free(0)
    pool.ledger.tables[1][0] = 1
    assert_found(
        pool,
        "row 1 reads position 0 from block 1, offset 0, and finds a token of no present row there "
        "(4 of 4 positions are wrong)",
    )


def test_a_row_of_another_length_is_found():
    pool = TaggedPool()
    pool.append(r0=3, r2=5)
    pool.expected[2].pop()
    assert_found(pool, "row 2 has 5 tokens and must have 4")


def test_a_pool_without_tags_is_refused():
    pool = TaggedPool()
    pool.kv = dataclasses.replace(pool.kv, tags=None)
    with pytest.raises(ValueError, match="the pool has no tags; add them with with_tags"):
        pool.check()
    with pytest.raises(ValueError, match="the pool has no tags; add them with with_tags"):
        core.write_tags(pool.kv, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
