"""A few combinations of values in which every two values of two factors meet, where they may."""

import random
from collections.abc import Callable, Sequence
from typing import Any

Value = tuple[str, Any]
"""A factor and one of its values."""


def pairwise(
    factors: dict[str, Sequence], may_meet: Callable[[Value, Value], bool], attempts: int = 5
) -> list[dict[str, Any]]:
    """Combinations of one value per factor; the same every time.

    Each is the best of a few attempts, which take the factors in random orders and of each the
    value that meets most that it has not met yet.

    Args:
      factors: Values by name.
      may_meet: Whether two values of two factors go together. Values that go together pairwise must
        go together, and every value with one of every other factor whatever was chosen before.
      attempts: Orders tried per combination.
    Source: Cohen, Dalal, Fredman and Patton 1997, "The AETG system".
    """
    values = [(name, value) for name, choices in factors.items() for value in choices]
    members = {
        name: [i for i, (other, _) in enumerate(values) if other == name] for name in factors
    }
    # Sets of values are the bits of an integer.
    allowed = [
        sum(1 << j for j, b in enumerate(values) if a[0] != b[0] and may_meet(a, b)) for a in values
    ]
    missing, rng, chosen = list(allowed), random.Random(0), []
    while any(missing):
        best = max(
            (_attempt(list(members.values()), allowed, missing, rng) for _ in range(attempts)),
            key=lambda combination: sum(
                (missing[i] & _bits(combination)).bit_count() for i in combination
            ),
        )
        for i in best:
            missing[i] &= ~_bits(best)
        chosen.append({values[i][0]: values[i][1] for i in sorted(best)})
    return chosen


def _attempt(
    members: list[list[int]], allowed: list[int], missing: list[int], rng: random.Random
) -> list[int]:
    first = max(range(len(missing)), key=lambda i: (missing[i].bit_count(), rng.random()))
    rest = [choices for choices in members if first not in choices]
    rng.shuffle(rest)
    combination = [first]
    for choices in rest:
        taken = _bits(combination)
        combination.append(
            max(
                (i for i in choices if allowed[i] & taken == taken),
                key=lambda i: (
                    (missing[i] & taken).bit_count(),
                    missing[i].bit_count(),
                    rng.random(),
                ),
            )
        )
    return combination


def _bits(indices: list[int]) -> int:
    return sum(1 << i for i in indices)
