"""What the next token may be, where only the host can tell: grammars, and bans of several tokens.

A guided sequence takes one token per dispatch, because its next mask depends on it.
"""

from collections.abc import Sequence as Listed
from typing import Protocol

import numpy as np


class GuideError(ValueError):
    """A grammar cannot go on: it has outgrown its limits, or met a token that it forbids."""


class Guide(Protocol):
    """Follows the output of one sequence."""

    is_over: bool
    """Whether nothing may follow."""
    end_ids: frozenset[int]
    """Tokens that say that the text is complete, whatever the request says of them."""

    @property
    def mask(self) -> np.ndarray:
        """u32[W], the tokens that may come next; never empty."""
        ...

    def accept(self, token: int) -> None:
        """Takes the next token of the output.

        Raises: GuideError if it cannot follow, or nobody can tell what may follow it.
        """
        ...

    def copy(self) -> "Guide":
        """One that goes on from the same place."""
        ...


class BadWords:
    """Forbids the last token of each word where the others have just been put out."""

    is_over = False
    end_ids: frozenset[int] = frozenset()

    def __init__(self, words: Listed[Listed[int]], allowed: np.ndarray):
        """With `allowed`, u32[W], of the tokens that are not banned everywhere."""
        self._words = words
        self._allowed = allowed
        self._tail: list[int] = []
        self._longest = max(map(len, words)) - 1
        self.mask = allowed

    def accept(self, token: int) -> None:
        self._tail = [*self._tail, token][-self._longest :]
        mask = self._allowed.copy()
        for *start, last in self._words:
            if self._tail[-len(start) :] == start:
                mask[last // 32] &= ~np.uint32(1 << last % 32)
        self.mask = mask if mask.any() else self._allowed

    def copy(self) -> "BadWords":
        copied = BadWords(self._words, self._allowed)
        copied._tail, copied.mask = self._tail, self.mask
        return copied
