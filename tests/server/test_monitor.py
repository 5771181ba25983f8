"""The block map that the dashboard draws."""

from paged_jax.ledger import Ledger
from paged_jax.server import monitor
from paged_jax.server.monitor import CACHED, FREE, OWNED, SHARED, block_kinds, block_map


def ledger() -> Ledger:
    """Blocks: 1 of rows 0 and 1, 2 and 3 of row 1, 4 of somebody who is no row; 5 and 6 free."""
    made = Ledger(6, 4, 2, 4)
    made.tables = [[1], [1, 2, 3]]
    made.refcounts = [0, 2, 1, 1, 1, 0, 0]
    return made


def test_each_block_has_a_kind_and_an_owner():
    kinds, owners = block_kinds(ledger(), {0: 7, 1: 8})
    assert kinds == [SHARED, OWNED, OWNED, CACHED, FREE, FREE]
    assert owners == [8, 8, 8, -1, -1, -1]
    assert block_map(kinds, owners)[:2] == [[SHARED, 8], [OWNED, 8]]


def test_a_row_that_no_longer_runs_has_no_name():
    assert block_kinds(ledger(), {0: 7})[1] == [-1] * 6


def test_neighbours_share_a_cell_where_blocks_are_many(monkeypatch):
    monkeypatch.setattr(monitor, "MAX_CELLS", 2)
    kinds, owners = [FREE, OWNED, OWNED, CACHED, FREE], [-1, 3, 5, -1, -1]
    # The first of those that matter most, not the owner with the largest number.
    assert block_map(kinds, owners) == [[OWNED, 3], [CACHED, -1]]
