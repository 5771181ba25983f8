"""The one key of dimension letters, used in annotations, comments and einsum strings.

T new tokens in a step · S rows (sequence slots) · R rows that take part in a step ·
H query heads · K KV heads · G = H / K · D head dim · N usable blocks · P token positions per
block (`block_size`) · M blocks per table row · L layers · E hidden · F MLP hidden · V vocabulary.

A KV pool is `[L, N+1, R, P, C]`; here R counts pool rows, 2K of them in layout `split`, and C is
their width, see `KVCache`. Physical block 0 is the null block: it is never handed out, and every
padding write goes there.
"""

from typing import TypeVar

Number = TypeVar("Number")


def ceil_div(a: Number, b: int) -> Number:
    """Ceiling division for Python integers and integer arrays with a >= 0 and b > 0."""
    return (a + b - 1) // b  # type: ignore[operator]
