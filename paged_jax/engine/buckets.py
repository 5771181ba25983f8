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
_ONE_PROGRAM_ROWS = 8
"""Up to so many rows one decode program serves all: a second takes longer to compile than the few
milliseconds of padding that it saves are worth."""
_PREFILL_TOKENS = (64, 256)
_FEW_ROWS = 32


def programs(config: ResolvedConfig) -> tuple[Program, ...]:
    """All programs of an engine, the cheapest first.

    Programs with T = R are for rows of one token each and have no prefill attention. In the
    others logits of padding rows cost little beside their tokens; the largest takes all rows.
    """
    most_rows = max(2, config.max_num_seqs)
    most_tokens = max(most_rows + 1, config.max_num_batched_tokens)
    decode = {most_rows}
    if most_rows > _ONE_PROGRAM_ROWS:
        decode |= {size for size in _DECODE_ROWS if size < most_rows}
    prefill = {size for size in _PREFILL_TOKENS if size < most_tokens} | {most_tokens}
    found = [Program(rows, rows) for rows in decode]
    for tokens in prefill:
        rows = most_rows if tokens == max(prefill) else min(_FEW_ROWS, most_rows)
        if rows < tokens:
            found.append(Program(tokens, rows))
    return tuple(sorted(found))


def choose(
    available: tuple[Program, ...], num_tokens: int, num_rows: int, *, is_single: bool
) -> Program:
    """The cheapest program that holds so many tokens and rows.

    Args:
      is_single: Whether every row has one token.
    """
    return next(
        program
        for program in available
        if program.num_tokens >= num_tokens
        and program.num_rows >= num_rows
        and (is_single or program.num_tokens > program.num_rows)
    )
