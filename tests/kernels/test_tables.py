"""The tables of cases hold what they promise; nothing is compiled."""

import dataclasses
import itertools

import pytest

from tests.cover import pairwise
from tests.kernels import tpu_cases, triton_cases
from tests.kernels.table import SHAPES

MOST_ENTRIES = {tpu_cases.TABLE: 66, triton_cases.TABLE: 80}
by_table = pytest.mark.parametrize("table", MOST_ENTRIES, ids=["tpu_cases", "triton_cases"])


@by_table
def test_every_two_values_that_may_meet_do(table):
    factors, entries = table.factors, table.entries
    for left, right in itertools.combinations(factors, 2):
        met = {(getattr(entry, left), getattr(entry, right)) for entry in entries}
        assert met == {
            (a, b)
            for a, b in itertools.product(factors[left], factors[right])
            if table.may_meet((left, a), (right, b))
        }


@by_table
def test_the_readme_runs_every_kernel_and_option(table):
    for name in set(table.factors) - set(SHAPES):
        assert {getattr(entry, name) for entry in table.typical} == set(table.factors[name])
    assert table.typical < set(table.entries)


@by_table
def test_cases_are_few_and_the_same_every_time(table):
    entries = table.entries
    assert table.entry._fields == tuple(table.factors)
    assert len(entries) <= MOST_ENTRIES[table]
    assert len(set(map(str, entries))) == len(entries)
    # Chosen anew by one that has chosen none yet.
    assert entries == dataclasses.replace(table).entries


def test_values_that_may_not_meet_do_not():
    factors = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    chosen = pairwise(factors, lambda x, y: {x, y} != {("a", 1), ("b", 1)})
    assert {(c["a"], c["b"]) for c in chosen} == {(0, 0), (0, 1), (1, 0)}
    assert {(c["a"], c["c"]) for c in chosen} == set(itertools.product((0, 1), repeat=2))
    assert {(c["b"], c["c"]) for c in chosen} == set(itertools.product((0, 1), repeat=2))
