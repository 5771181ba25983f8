"""The covering set of ahead-of-time compiles holds what it promises; needs no compiler."""

import itertools

from tests.aot.cover import covering_entries, served_entries
from tests.aot.shapes import FACTORS, Entry, is_refused


def test_every_two_values_that_can_meet_do():
    covered, served = covering_entries(), served_entries()
    for left, right in itertools.combinations(range(len(FACTORS)), 2):
        can_meet = {(entry[left], entry[right]) for entry in served}
        assert {(entry[left], entry[right]) for entry in covered} == can_meet


def test_every_pool_that_a_kernel_can_read_is_compiled_on_every_target():
    covered, served = covering_entries(), served_entries()
    can_meet = {(entry.target, entry.kernel, entry.pool) for entry in served}
    assert {(entry.target, entry.kernel, entry.pool) for entry in covered} == can_meet


def test_set_is_small_and_the_same_every_time():
    covered = covering_entries()
    assert len(covered) <= 160
    assert len(set(covered)) == len(covered)
    assert covered == covering_entries.__wrapped__()
    assert set(covered) <= set(served_entries())


def test_pools_of_8_bits_are_refused_but_for_blocks_of_128():
    assert is_refused(Entry("v5e", "decode", "llama3-8b", 64, "int8"))
    assert not is_refused(Entry("v5e", "decode", "llama3-8b", 128, "int8"))
    assert not is_refused(Entry("v5e", "decode", "llama3-8b", 16, "bfloat16"))
    assert not any(is_refused(entry) for entry in served_entries())


def test_every_value_is_compiled_somewhere():
    for factor, values in enumerate(FACTORS.values()):
        assert {entry[factor] for entry in covering_entries()} == set(values)
