"""Grammars that the text of a request must follow, by llguidance."""

import functools
import json
import re
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paged_jax.bitmask import pack_mask
from paged_jax.engine import grammar_trial
from paged_jax.engine.guide import GuideError
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.sampling_params import StructuredOutputsParams

MAX_GRAMMAR_SECONDS = 5.0
"""Compiling a grammar may take as long, in another process and without a vocabulary."""


class Grammar:
    """A `Guide` that follows a grammar."""

    def __init__(self, matcher: Any, num_words: int, end_ids: frozenset[int]):
        """With llguidance's matcher, and the `num_words` of a mask."""
        self._matcher, self.end_ids = matcher, end_ids
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

    def copy(self) -> "Grammar":
        copied = Grammar.__new__(Grammar)
        copied.__dict__.update(self.__dict__)
        copied._matcher, copied._bits = self._matcher.deep_copy(), self._bits.copy()
        return copied

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


def compile_grammar(
    params: StructuredOutputsParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> Grammar:
    """Checks what is wanted of the text and prepares it; each sequence gets a copy.

    Raises: ValueError if it cannot be read, takes too long, or there is no tokenizer; ImportError
      without llguidance.
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
        if params.choice is None and not params.json_object:
            try_grammar(grammar)
        if problem := LLMatcher.validate_grammar(grammar, backend):
            raise ValueError(problem)
    except ValueError as error:
        why = " ".join(str(error).split())
        raise ValueError(f"structured_outputs cannot be used: {why}") from None
    matcher = LLMatcher(backend, grammar, log_level=0)
    return Grammar(matcher, len(pack_mask(np.ones(vocab_size, bool))), eos_token_ids)


@functools.lru_cache(maxsize=1024)
def try_grammar(grammar: str) -> None:
    """Compiles a grammar where that harms nobody; costs 0.1 s, once per grammar.

    The compiler is native code without bounds of time and depth: `/a.*/ & /b.*/ & ...` keeps it
    busy for hours, and a thousand rules that name one another overflow its stack.

    Raises: ValueError if it takes longer than `MAX_GRAMMAR_SECONDS` or needs too much stack.
    """
    # By its file: the package need not be imported there.
    command = [sys.executable, "-P", str(Path(grammar_trial.__file__))]
    try:
        done = subprocess.run(
            command,
            input=json.dumps({"path": sys.path, "grammar": grammar}),
            capture_output=True,
            text=True,
            timeout=MAX_GRAMMAR_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"to compile it takes more than {MAX_GRAMMAR_SECONDS:g} s") from None
    if done.returncode < 0:
        raise ValueError("its parts refer to one another in too long a chain")


def _grammar_of(params: StructuredOutputsParams, matcher: Any) -> str:
    options = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.json_object:
        return matcher.grammar_from_json_schema({"type": "object"}, options)
    if params.json is not None:
        return matcher.grammar_from_json_schema(_schema_text(params.json), options)
    if params.regex is not None:
        return matcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return matcher.grammar_from_regex("|".join(map(re.escape, params.choice)))
    assert params.grammar is not None
    return matcher.grammar_from_lark(params.grammar)


def _schema_text(schema: str | Mapping[str, Any]) -> str:
    try:
        read = json.loads(schema) if isinstance(schema, str) else dict(schema)
        if not isinstance(read, dict):
            raise ValueError("json must be a schema, which is a JSON object")
        return json.dumps(read)
    except TypeError as error:
        raise ValueError(f"json: {error}") from None
    except RecursionError:
        raise ValueError("json is nested too deeply") from None


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
