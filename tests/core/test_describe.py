"""A block state in words: one state worked out by hand, and states that are broken."""

import dataclasses

import numpy as np
import pytest

from paged_jax import core
from paged_jax.core import BlockState
from paged_jax.ledger import Ledger
from tests.core.transitions import padded, state_of

RETAINED = np.bincount([2, 9], minlength=13)
WRITTEN = np.array([6, 8, 12, 6, 1, 0])

# Slots: 9 used blocks have 36. Written are 4 + 2 of the pair that rows 0 and 3 share, 8 of row 1,
# 12 of row 2, 1 of row 4, and all 4 of block 9, which is held outside: 31. Row 4 has reserved 2.
TEXT = """\
12 blocks of 4 tokens: 9 used (3 shared), 3 free
conservation: 3 free + 9 used = 12 of 12; 10 references of rows + 2 outside = 12 of 12 counted
fragmentation: used blocks have 36 slots, 31 written, 2 reserved, 3 past the end of a row \
(13.9% not in use)
free stack, top first: 11 10 12
audit: clean

row 0: 6 tokens in 2 blocks; position 6 goes to block 4, offset 2, after a copy (count 2)
  logical  positions    block  slots          count  also held by
  0        0-3          3      12-15          2      row 3 [0]
  1        4-5          4      16-17          2      row 3 [1]

row 1: 8 tokens in 2 blocks; position 8 takes a new block
  logical  positions    block  slots          count  also held by
  0        0-3          2      8-11           2      1 outside
  1        4-7          1      4-7            1

row 2: 12 tokens in 3 blocks; its table is full
  logical  positions    block  slots          count  also held by
  0        0-3          5      20-23          1
  1        4-7          6      24-27          1
  2        8-11         7      28-31          1

row 3: 6 tokens in 2 blocks; position 6 goes to block 4, offset 2, after a copy (count 2)
  logical  positions    block  slots          count  also held by
  0        0-3          3      12-15          2      row 0 [0]
  1        4-5          4      16-17          2      row 0 [1]

row 4: 3 tokens in 1 block, of them 2 reserved; position 3 goes to block 8, offset 3, in place
  logical  positions    block  slots          count  also held by
  0        0-2          8      32-34          1"""


def ledger() -> Ledger:
    """12 blocks of 4, rows of up to 3; blocks 2 and 9 are also held by others than rows."""
    made = Ledger(12, 4, 6, 3)
    made.allocate({4: 8})  # blocks 1 and 2
    made.allocate({0: 6})  # 3 and 4
    made.free([4])
    made.allocate({1: 8, 2: 12})  # 2 and 1, which were freed in this order, then 5, 6 and 7
    made.allocate({4: 3})  # 8
    made.allocate({5: 12})  # 9, 10 and 11, of which the first outlives the row
    made.retain([2, 9])
    made.free([5])
    made.fork(0, 3)
    return made


def state(**changes) -> BlockState:
    return dataclasses.replace(state_of(ledger()), **changes)


def changed(name: str, index, value: int) -> BlockState:
    """The state with one number wrong."""
    array = np.array(getattr(state(), name))
    array[index] = value
    return state(**{name: array})


def paragraph(row: int) -> str:
    return next(part for part in TEXT.split("\n\n") if part.startswith(f"row {row}:"))


def describe(broken: BlockState, **options) -> str:
    return core.describe(broken, external=RETAINED, **options)


def lines_with(text: str, mark: str) -> list[str]:
    """Lines that carry the mark, without their columns."""
    return [" ".join(line.split()) for line in text.splitlines() if mark in line]


def test_a_whole_state_reads_as_worked_out_by_hand():
    assert core.describe(state(), external=RETAINED, written=WRITTEN) == TEXT


@pytest.mark.parametrize("row", range(5))
def test_one_row_is_its_part_of_the_whole(row):
    assert core.describe(state(), row=row, external=RETAINED, written=WRITTEN) == paragraph(row)


def test_an_empty_row_waits_for_its_first_block():
    assert describe(state(), row=5) == "row 5: 0 tokens in 0 blocks; position 0 takes a new block"


def test_everything_counts_as_written_unless_told_otherwise():
    text = describe(state())
    assert "36 slots, 33 written, 0 reserved, 3 past the end of a row (8.3% not in use)" in text
    assert "reserved;" not in text


def test_one_position_is_no_range():
    small = Ledger(3, 4, 1, 2)
    small.allocate({0: 5})
    assert core.describe(state_of(small), row=0).splitlines()[-1] == (
        "  1        4            2      8              1"
    )


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (0, "block 0: the null block, never handed out; padding is written here"),
        (2, "block 2: count 2, held by row 1 [0], 1 outside"),
        (3, "block 3: count 2, held by row 0 [0], row 3 [0]"),
        (7, "block 7: count 1, held by row 2 [2]"),
        (9, "block 9: count 1, held by 1 outside"),
        (10, "block 10: count 0, held by nobody, free (to be handed out after 1 other)"),
        (11, "block 11: count 0, held by nobody, free (to be handed out after 0 others)"),
    ],
)
def test_one_block_is_found_in_rows_outside_or_on_the_stack(block, text):
    assert describe(state(), block=block) == text


def test_a_fresh_pool_lists_the_blocks_that_go_first():
    text = core.describe(core.create_block_state(20, 4, 2, 3))
    assert text == (
        "20 blocks of 4 tokens: 0 used (0 shared), 20 free\n"
        "conservation: 20 free + 0 used = 20 of 20; "
        "0 references of rows + 0 outside = 0 of 0 counted\n"
        "fragmentation: used blocks have 0 slots, 0 written, 0 reserved, "
        "0 past the end of a row (0.0% not in use)\n"
        "free stack, top first: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 ... and 4 more\n"
        "audit: clean"
    )


def test_a_full_pool_has_an_empty_stack():
    full = Ledger(3, 4, 1, 3)
    full.allocate({0: 9})
    text = core.describe(state_of(full))
    assert "free stack, top first: empty" in text
    assert "12 slots, 9 written, 0 reserved, 3 past the end of a row (25.0% not in use)" in text


def test_owners_that_nobody_mentions_are_missed():
    text = core.describe(state())
    assert "10 references of rows + 0 outside = 10 of 12 counted" in text
    law = "AUDIT: block 2: its count differs from its owners (count 2, owners 1)"
    assert lines_with(text, "AUDIT") == [law]
    assert lines_with(text, "WRONG") == ["0 0-3 2 8-11 2 <- WRONG: count 2, 1 owners"]


def test_a_count_that_is_too_low_is_marked_where_the_block_is_held():
    text = describe(changed("refcounts", 4, 1))
    law = "AUDIT: block 4: its count differs from its owners (count 1, owners 2)"
    assert lines_with(text, "AUDIT") == [law]
    assert lines_with(text, "WRONG") == [
        "1 4-5 4 16-17 1 row 3 [1] <- WRONG: count 1, 2 owners",
        "1 4-5 4 16-17 1 row 0 [1] <- WRONG: count 1, 2 owners",
    ]


def test_a_block_that_is_owned_and_free_is_marked():
    text = describe(changed("free_blocks", 1, 7))
    assert lines_with(text, "AUDIT") == ["AUDIT: block 7: is free and has owners (count 1)"]
    assert lines_with(text, "WRONG") == ["2 8-11 7 28-31 1 <- WRONG: owned and free"]
    assert lines_with(text, "top first") == ["free stack, top first: 11 7 12"]


def test_a_block_that_is_lost_is_marked():
    broken = state(free_blocks=padded([12, 11], 13, 0), num_free=np.int32(2))
    text = describe(broken)
    assert lines_with(text, "AUDIT") == ["AUDIT: block 10: is neither free nor owned"]
    assert "conservation: 2 free + 9 used = 11 of 12" in text
    assert describe(broken, block=10) == (
        "block 10: count 0, held by nobody  <- WRONG: neither owned nor free"
    )


def test_a_row_that_holds_the_null_block_is_marked():
    text = describe(changed("block_tables", (2, 1), 0))
    assert lines_with(text, "AUDIT") == [
        "AUDIT: block 0: row 2 of length 12 must hold 3 blocks, its table is [5, 0, 7]"
    ]
    assert lines_with(text, "WRONG") == ["1 4-7 0 0-3 0 <- WRONG: the null block"]


def test_two_rows_in_a_block_of_one_are_both_marked():
    text = describe(changed("block_tables", (1, 1), 6))
    assert lines_with(text, "WRONG") == [
        "1 4-7 6 24-27 1 row 2 [1] <- WRONG: count 1, 2 owners",
        "1 4-7 6 24-27 1 row 1 [1] <- WRONG: count 1, 2 owners",
    ]
    assert "block 1: count 1, held by nobody  <- WRONG" in describe(
        changed("block_tables", (1, 1), 6), block=1
    )


def test_faults_are_shown():
    text = describe(state(faults=np.int32(core.FAULT_OCCUPIED)))
    assert lines_with(text, "AUDIT") == ["AUDIT: fault bits are set: 0b10"]


@pytest.mark.parametrize("row", [-1, 6])
def test_rows_out_of_range_are_refused(row):
    with pytest.raises(ValueError, match=rf"row \({row}\) must be in 0\.\.5"):
        core.describe(state(), row=row)


@pytest.mark.parametrize("block", [-1, 13])
def test_blocks_out_of_range_are_refused(block):
    with pytest.raises(ValueError, match=rf"block \({block}\) must be in 0\.\.12"):
        core.describe(state(), block=block)


TOO_LARGE_OR_SMALL = (-(2**31), -1, 13, 1000, 2**31 - 1)


@pytest.mark.parametrize(
    "name",
    [
        "free_blocks",
        "num_free",
        "refcounts",
        "lengths",
        "block_tables",
    ],
)
def test_no_wrong_number_keeps_it_from_speaking(name):
    for index in np.ndindex(np.shape(getattr(state(), name))):
        for value in TOO_LARGE_OR_SMALL:
            text = describe(changed(name, index, value))
            assert "AUDIT" in text, (index, value)
