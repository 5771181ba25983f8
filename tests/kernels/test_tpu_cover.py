"""The cases of the TPU kernels hold what they promise; nothing is compiled."""

import itertools

from tests.cover import pairwise
from tests.kernels.tpu_cases import FACTORS, Entry, covering_entries, may_meet, typical_entries


def test_every_two_values_that_may_meet_do():
    entries = covering_entries()
    for left, right in itertools.combinations(FACTORS, 2):
        met = {(getattr(entry, left), getattr(entry, right)) for entry in entries}
        assert met == {
            (a, b)
            for a, b in itertools.product(FACTORS[left], FACTORS[right])
            if may_meet((left, a), (right, b))
        }


def test_the_readme_runs_every_kernel_and_option():
    options = set(FACTORS) - {"head_dim", "group", "num_kv_heads", "block_size"}
    for name in options:
        assert {getattr(entry, name) for entry in typical_entries()} == set(FACTORS[name])
    assert typical_entries() < set(covering_entries())


def test_cases_are_few_and_the_same_every_time():
    assert Entry._fields == tuple(FACTORS)
    assert len(covering_entries()) <= 66
    assert len(set(map(str, covering_entries()))) == len(covering_entries())
    assert covering_entries() == covering_entries.__wrapped__()


def test_values_that_may_not_meet_do_not():
    factors = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    chosen = pairwise(factors, lambda x, y: {x, y} != {("a", 1), ("b", 1)})
    assert {(c["a"], c["b"]) for c in chosen} == {(0, 0), (0, 1), (1, 0)}
    assert {(c["a"], c["c"]) for c in chosen} == set(itertools.product((0, 1), repeat=2))
    assert {(c["b"], c["c"]) for c in chosen} == set(itertools.product((0, 1), repeat=2))
