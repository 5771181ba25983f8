"""The sizes that steps are compiled for: about half a dozen programs."""

from typing import NamedTuple

from paged_jax.config import ResolvedConfig


class Program(NamedTuple):
    """Sizes of one compiled step."""

    num_tokens: int
    """T, the packed token axis."""
    num_rows: int
    """R, rows and their logits; at most T."""


# The smallest is 2: XLA:CPU computes rows of a matrix product bit-equal for every batch size but 1.
_DECODE_ROWS = (2, 8, 32)
_PREFILL_TOKENS = (64, 256)
_FEW_ROWS = 32


def programs(config: ResolvedConfig) -> tuple[Program, ...]:
    """All programs of an engine, the cheapest first.

    Decode programs have one token per row. In the others logits of padding rows cost little
    beside their tokens, so they take all rows, but for the smallest.
    """
    most_rows = max(2, config.max_num_seqs)
    most_tokens = max(most_rows, config.max_num_batched_tokens)
    rows = [size for size in _DECODE_ROWS if size < most_rows]
    found = {Program(size, size) for size in [*rows, most_rows]}
    for tokens in (size for size in _PREFILL_TOKENS if size < most_tokens):
        few = most_rows if tokens > _PREFILL_TOKENS[0] else _FEW_ROWS
        found.add(Program(tokens, min(few, most_rows, tokens)))
    found.add(Program(most_tokens, most_rows))
    return tuple(sorted(found))


def choose(available: tuple[Program, ...], num_tokens: int, num_rows: int) -> Program:
    """The cheapest program that holds so many tokens and rows."""
    return next(
        program
        for program in available
        if program.num_tokens >= num_tokens and program.num_rows >= num_rows
    )
