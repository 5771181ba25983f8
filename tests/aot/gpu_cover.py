"""A small set of GPU entries in which every two properties of programs meet that may meet.

Names of shapes are no properties: a shape enters a kernel by its head dim, its group of query
heads and its options. Dtypes of one width and kind differ in nothing but the casts of an attention
kernel: each meets every one of these, every block size and target, and its kind meets everything.
"""

import functools
import itertools
import random

from tests.aot.gpu_shapes import SHAPES, is_mosaic, op_of, served_entries
from tests.aot.shapes import Entry

KINDS = {
    "float32": "float32",
    "bfloat16": "half",
    "float16": "half",
    "int8": "int8",
    "float8_e4m3fn": "float8",
    "float8_e5m2": "float8",
}
"""Kinds of pools."""

ATTEMPTS = 5


@functools.cache
def covering_entries() -> tuple[Entry, ...]:
    """The set for the version of JAX that runs; Mosaic's part has its own cover."""
    served = served_entries()
    parts = [[e for e in served if is_mosaic(e.kernel) == wanted] for wanted in (False, True)]
    return tuple(entry for part in parts for entry in _smallest_cover(part))


def meetings(entry: Entry) -> set[tuple]:
    """The pairs of properties that meet in an entry."""
    shape, kind = SHAPES[entry.shape], ("kind", KINDS[entry.pool])
    factors = [(f, getattr(entry, f)) for f in ("target", "kernel", "block_size")]
    numbers = [("head_dim", shape.head_dim if shape.head_dim in (64, 128, 256) else "other")]
    found = set(itertools.combinations(factors, 2))
    if op_of(entry.kernel) in ("decode", "prefill"):  # the others know no queries
        numbers.append(("group", shape.num_heads // shape.num_kv_heads))
        options = (
            len(shape.windows),
            shape.soft_cap,
            shape.has_sinks,
            shape.context_len,
            shape.is_packed,
        )
        numbers.append(("options", options))
        found |= {(factor, ("pool", entry.pool)) for factor in factors}
        found.add((("op", "attention"), ("shape", entry.shape)))
    return found | set(itertools.product([*factors, kind], [*numbers, kind]))


def _smallest_cover(entries: list[Entry]) -> list[Entry]:
    """The best of a few attempts, each greedy with ties broken by chance; the same every time."""
    index = {}
    masks = [
        sum(1 << index.setdefault(meeting, len(index)) for meeting in meetings(entry))
        for entry in entries
    ]
    covers = (_cover(masks, random.Random(seed)) for seed in range(ATTEMPTS))
    return [entries[i] for i in sorted(min(covers, key=len))]


def _cover(masks: list[int], rng: random.Random) -> list[int]:
    missing, chosen = 0, []
    for mask in masks:
        missing |= mask
    order = list(range(len(masks)))
    rng.shuffle(order)
    order = list({masks[i]: i for i in order}.values())  # one of those in which the same meets
    while missing:
        chosen.append(max(order, key=lambda i: (masks[i] & missing).bit_count()))
        missing &= ~masks[chosen[-1]]
    return chosen
