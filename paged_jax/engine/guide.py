"""What the next token may be, where only the host can tell: grammars, and bans of several tokens.

A guided sequence takes one token per dispatch, because its next mask depends on it.
"""

import json
import re
import weakref
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paged_jax.bitmask import pack_mask
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.sampling_params import StructuredOutputsParams


class GuideError(ValueError):
    """A grammar cannot go on: it has outgrown its limits, or met a token that it forbids."""


class Guide(Protocol):
    """Follows the output of one sequence."""

    is_over: bool
    """Whether nothing may follow."""

    @property
    def mask(self) -> np.ndarray:
        """u32[W], the tokens that may come next; never empty."""
        ...

    def accept(self, token: int) -> None:
        """Takes the next token of the output.

        Raises: GuideError if it cannot follow, or nobody can tell what may follow it.
        """
        ...


class BadWords:
    """Forbids the last token of each word where the others have just been put out."""

    is_over = False

    def __init__(self, words: Listed[Listed[int]], allowed: np.ndarray):
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


class Grammar:
    """Follows a grammar of llguidance."""

    def __init__(self, tokenizer: Any, grammar: str, num_words: int):
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._bits = np.zeros((1, num_words), np.int32)
        self.is_over = False
        self._fill()

    @property
    def mask(self) -> np.ndarray:
        return self._bits[0].view(np.uint32)

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()
        self.is_over = self._matcher.is_stopped()
        if not self.is_over:
            self._fill()

    def _fill(self) -> None:
        # At once and not when the mask is wanted: a failure is then this request's alone.
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            # What follows the first line is the state of its parser.
            reason = self._matcher.get_error().partition("\n")[0]
            if reason.startswith("NoExtension"):
                reason = "there is no text that satisfies it, or goes on so"
            raise GuideError(f"structured_outputs: {reason}")


@dataclass(frozen=True, kw_only=True)
class GuideMaker:
    """Makes a guide for each sequence of a request."""

    allowed: np.ndarray  # u32[W], of tokens that are not banned everywhere
    bad_words: tuple[tuple[int, ...], ...] = ()
    tokenizer: Any = None
    """llguidance's, for a grammar."""
    grammar: str | None = None

    def make(self) -> Guide:
        """One at the beginning of the output."""
        if self.grammar is not None:
            return Grammar(self.tokenizer, self.grammar, len(self.allowed))
        return BadWords(self.bad_words, self.allowed)


def compile_grammar(
    params: StructuredOutputsParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> GuideMaker:
    """Checks what is wanted of the text and prepares it.

    Raises: ValueError if it cannot be read or there is no tokenizer; ImportError without
      llguidance.
    """
    if tokenizer is None:
        raise ValueError("structured_outputs needs a tokenizer, and this model has none")
    if not eos_token_ids:
        raise ValueError("structured_outputs needs an end-of-sequence token, and there is none")
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ImportError(
            "structured_outputs needs llguidance: pip install 'paged-jax[llm]'"
        ) from error
    backend = _backend(tokenizer, vocab_size, tuple(sorted(eos_token_ids)))
    try:
        grammar = _grammar_of(params, LLMatcher)
        if problem := LLMatcher.validate_grammar(grammar, backend):
            raise ValueError(problem)
    except ValueError as error:
        why = " ".join(str(error).split())
        raise ValueError(f"structured_outputs cannot be used: {why}") from None
    words = pack_mask(np.ones(vocab_size, bool))
    return GuideMaker(allowed=words, tokenizer=backend, grammar=grammar)


def _grammar_of(params: StructuredOutputsParams, matcher: Any) -> str:
    options = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.json_object:
        return matcher.grammar_from_json_schema({"type": "object"}, options)
    if params.json is not None:
        schema = params.json
        if isinstance(schema, str):
            schema = json.loads(schema)
        return matcher.grammar_from_json_schema(json.dumps(dict(schema)), options)
    if params.regex is not None:
        return matcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return matcher.grammar_from_regex("|".join(map(re.escape, params.choice)))
    assert params.grammar is not None
    return matcher.grammar_from_lark(params.grammar)


_backends: weakref.WeakKeyDictionary[Tokenizer, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _backend(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Any:
    """llguidance's view of a tokenizer, which takes a second to make for a large vocabulary."""
    from llguidance import LLTokenizer

    made = _backends.setdefault(tokenizer, {})
    key = vocab_size, eos_token_ids
    if key not in made:
        made[key] = LLTokenizer(
            tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
    return made[key]
