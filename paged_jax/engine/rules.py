"""Which tokens a request forbids, ends with or is bound to: checked and prepared at submission."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paged_jax.bitmask import pack_mask
from paged_jax.engine.grammar import compile_grammar
from paged_jax.engine.guide import BadWords, Guide
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.sampling_params import SamplingParams, StructuredOutputsParams


@dataclass(frozen=True, kw_only=True)
class Rules:
    """See the fields of the same names of `Request`."""

    stop_ids: frozenset[int]
    """Those that the request names."""
    banned: np.ndarray | None
    guide: Guide | None


def check_rules(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> Rules:
    """Raises: ValueError that names the field and the rule."""
    stop_ids = frozenset(params.stop_token_ids or ())
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _check_ids(name, getattr(params, name) or (), vocab_size)
    banned = np.zeros(vocab_size, bool)
    if params.allowed_token_ids is not None:
        banned[:] = True
        banned[list(params.allowed_token_ids)] = False
    words = _bad_words(params, tokenizer)
    banned[[word[0] for word in words if len(word) == 1]] = True
    ends = stop_ids if params.ignore_eos else stop_ids | eos_token_ids
    before_the_end = banned.copy()
    if params.min_tokens:
        before_the_end[list(ends)] = True
    if banned.all() or before_the_end.all():
        raise ValueError(
            "allowed_token_ids, bad_words and min_tokens leave no token that may be sampled"
        )
    guide: Guide | None = None
    longer = tuple(word for word in words if len(word) > 1)
    structured = params.structured_outputs
    if structured is not None:
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(params, name):
                raise ValueError(f"{name} cannot be combined with structured_outputs")
        assert isinstance(structured, StructuredOutputsParams)
        guide = compile_grammar(structured, tokenizer, vocab_size, eos_token_ids)
    elif longer:
        guide = BadWords(longer, pack_mask(~banned))
    return Rules(stop_ids=stop_ids, banned=banned if banned.any() else None, guide=guide)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if token >= vocab_size:
            raise ValueError(
                f"{name}: token id {token} is outside the vocabulary [0, {vocab_size})"
            )


def _bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> set[tuple[int, ...]]:
    """Token ids of each word as it begins a text, and as it follows a space, as in vLLM."""
    if not params.bad_words:
        return set()
    if tokenizer is None:
        raise ValueError("bad_words needs a tokenizer, and this model has none")
    found = set()
    for word in params.bad_words:
        bare = word.lstrip() or word
        alone, follower = (
            tokenizer.encode(blank + bare, add_special_tokens=False) for blank in ("", " ")
        )
        if not alone:
            continue
        found.add(tuple(alone))
        # Where the space is a token of its own, the word is the same with and without it.
        if follower[:1] != alone[:1] and len(follower) == len(alone):
            found.add(tuple(follower))
    return found
